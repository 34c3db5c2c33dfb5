"""The parts of a model that repeat, as the layers of a transformer: what is compiled, checkpointed or sharded piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces.batch import few

AUTO = "auto"


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model is made of, by name; {} where nothing repeats.

    These are modules of a class that comes twice at least in one ModuleList, ModuleDict or Sequential, and that have parts and parameters
    themselves: no single layers. One inside another is not returned.
    """
    classes = set[type[nn.Module]]()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            counts = Counter(type(part) for part in container.children() if _is_made_of_parts(part))
            classes |= {kind for kind, count in counts.items() if count > 1}
    return _outermost({name: module for name, module in model.named_modules() if type(module) in classes and _is_made_of_parts(module)})


def blocks_of(model: nn.Module, chosen: str | Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """Return the blocks that a config chooses, by name, in the model's order.

    Args:
        chosen: "auto": those that repeat, which may be none; or the names of classes.
        key: the config key that has them, for errors.
    """
    if chosen == AUTO:
        return repeated_blocks(model)
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in chosen and name}
    for kind in chosen:
        if not any(type(module).__name__ == kind for module in found.values()):
            kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if _is_made_of_parts(module))
            raise ConfigError(
                key=key,
                happened=f"the {type(model).__name__} has no module of a class {kind}",
                expected=f"auto, or classes of its modules: {few(list(kinds)[1:] or list(kinds))}",
            )
    return _outermost(found)


def _is_made_of_parts(module: nn.Module) -> bool:
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not is_container and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)}
