"""The parameters of what is trained: their names, patterns that choose some, and the parts of a model that repeat."""

from collections import Counter
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ddp_train.errors import ConfigError, join_few
from ddp_train.interfaces.objective import LossModule


def named_parameters(trained_module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of what is trained, tied ones once, by the names that a user knows.

    These are the model's own, without what `LossModule` puts before them; an objective's begin with `objective.`.
    """
    prefix = "model." if isinstance(trained_module, LossModule) else ""
    return {name.removeprefix(prefix): parameter for name, parameter in trained_module.named_parameters()}


def matching(names: Collection[str], patterns: Sequence[str], *, key: str) -> set[str]:
    """Return the parameters that patterns choose: by their whole name, or by that of a module that they are in.

    `head` and `layers.0` are all in them, `*.bias` every bias (`*` is any text, dots too), `layers.[0-3]` four layers. Errors have the key.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matched:
            expected = f"the name of a parameter or of a module that holds some, with * and ? as in file names: {join_few(sorted(names))}"
            raise ConfigError(key=key, happened=f"{pattern!r} matches no parameter", expected=expected)
        chosen |= matched
    return chosen


def repeated_blocks(model: nn.Module, *, with_layers: bool = False) -> dict[str, nn.Module]:
    """Return the blocks that a model is made of, by name; {} where nothing repeats.

    These are modules with parameters that lie beside another one of their class in a ModuleList, ModuleDict or Sequential; single layers
    only where they are asked for. One inside another is not returned.
    """
    repeated = set[nn.Module]()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            blocks = [part for part in container.children() if _is_block(part, with_layers)]
            counts = Counter(map(type, blocks))
            repeated |= {block for block in blocks if counts[type(block)] > 1}
    return _outermost({name: module for name, module in model.named_modules() if module in repeated})


def blocks_of(model: nn.Module, chosen: str | Sequence[str], *, key: str, for_shards: bool = False) -> dict[str, nn.Module]:
    """Return the blocks that a config chooses, by name, in the model's order.

    Args:
        chosen: "auto": those that repeat, which may be none; or the names of classes.
        key: the config key that has them, for errors.
        for_shards: whose weights are gathered one block at a time: single layers are blocks, too, and of classes those inside others.
    """
    if chosen == "auto":
        return repeated_blocks(model, with_layers=for_shards)
    named = {name: module for name, module in model.named_modules() if type(module).__name__ in chosen and name}
    for kind in chosen:
        if not any(type(module).__name__ == kind for module in named.values()):
            kinds = list(dict.fromkeys(type(module).__name__ for module in model.modules() if _is_block(module, for_shards)))
            expected = f"auto, or classes of its modules: {join_few(kinds[1:] or kinds)}"
            raise ConfigError(key=key, happened=f"the {type(model).__name__} has no module of a class {kind}", expected=expected)
    return named if for_shards else _outermost(named)


def _is_block(module: nn.Module, with_layers: bool) -> bool:
    """Tell whether a module has a forward and parameters, and parts, unless single layers count."""
    has_parts = with_layers or any(True for _ in module.children())
    return has_parts and not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(True for _ in module.parameters())


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if not any(name.startswith(f"{other}.") for other in modules)}
