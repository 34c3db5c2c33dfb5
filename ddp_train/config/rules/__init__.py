"""Rules across keys and sections. A rule is a function that yields the problems that it finds, or raises one. Imports no torch."""

from collections.abc import Callable, Iterator

from ddp_train.config.rules import sections, strategy, training
from ddp_train.config.run_config import InvalidSectionError, PartialConfig
from ddp_train.errors import ConfigError

RULES: tuple[Callable[[PartialConfig], Iterator[ConfigError]], ...] = (
    *(training.check_loader, training.check_steps, training.check_batch_size_schedule),
    *(training.check_epochs, training.check_own_loss, training.check_optimizer, training.check_scheduler),
    *(sections.check_health, sections.check_evaluation, sections.check_callbacks, sections.check_checkpoints),
    *(strategy.check_strategy, strategy.check_cuda_graphs, strategy.check_early_step, strategy.check_open_micro_batch),
    *(strategy.check_loss_scale, sections.check_device, sections.check_machines, sections.check_precision),
    *(sections.check_activation_checkpointing, sections.check_compile, sections.check_profile, sections.check_faults),
)
"""All rules, in the order in which their problems are shown."""


def check_rules(config: PartialConfig) -> list[ConfigError]:
    """Return the problems that concern several keys. A rule that reads an invalid section ends there, without a problem of its own."""
    errors: list[ConfigError] = []
    for rule in RULES:
        try:
            errors += rule(config)  # what it has found before it raises stays
        except InvalidSectionError:
            continue
        except ConfigError as error:
            errors.append(error)
    return errors
