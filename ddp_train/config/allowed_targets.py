"""Which callables a `_target_` may name: components, not tools. docs/security.md says what this is worth.

The code of the user's own folders may be named as it is: whoever can write there needs no config. Of what is installed, only packages
that make components may, and more of them by `allowed_targets` in the root config. What counts is where an object comes from, not the
path that led to it: `logging.os.system` is `posix.system`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.errors import ConfigError
from ddp_train.system.module_names import module_name

INSTALLED = (
    *(
        module_name(f"ddp_train.{name}")
        for name in ("amp", "callbacks", "data", "metrics", "model", "objective", "optimizer", "scheduler", "strategy")
    ),
    *("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions", "torch.ao.nn"),
    *("torch._C._nn", "torch._VariableFunctionsClass", "torch.device", "torch.dtype", "torch._C.Generator"),
    *("torchvision", "torchaudio", "torchtext", "torchdata", "torchmetrics", "torch_optimizer", "torch_geometric"),
    *("timm", "transformers", "datasets", "webdataset", "streaming", "tokenizers", "tiktoken", "diffusers", "peft", "open_clip"),
    *("einops", "albumentations", "kornia", "monai", "PIL", "lightly", "x_transformers", "bitsandbytes"),
)
"""Packages that make components; `allowed_targets` adds to them."""

_STANDARD = {
    *(f"builtins.{name}" for name in ("bool", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "str", "tuple")),
    *(f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
    *("datetime.date", "datetime.datetime", "datetime.timedelta", "decimal.Decimal", "fractions.Fraction", "functools.partial"),
    *("itertools.chain", "itertools.repeat", "operator.itemgetter", "random.Random", "uuid.UUID"),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath"),
}
"""All of the standard library that a config may name; `math` and `statistics` too."""

_HARMLESS_MODULES = ("math", "cmath", "statistics")
_TOOLS = re.compile(  # functions of allowed packages that write, start or fetch code, by how they are called
    r"^_*(save|write|dump|delete|remove|unlink|rename|move|push|upload|download|extract|untar|unzip|spawn|exec|eval|system|popen|run_|shell|main$|cli$"
    r"|compile|load_inline|load_module|import|tofile|from_file|pipe|gopen)",
    re.IGNORECASE,
)
_WORKSHOPS = tuple(map(module_name, ("ddp_train.data.download", "ddp_train.data.tokens.token_writer")))  # beside what makes components
_PATHS = {name: Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def refuse(path: str, target: Any, allowed: Sequence[str]) -> str:
    """Return why a `_target_` may not be used; "" when it may.

    Args:
        path: as the config has it.
        target: what it names.
        allowed: prefixes that the user allows beside our own.
    """
    if "__" in path:
        return "leads through Python's own names"
    module, name = _origin(path, target)
    full = f"{module}.{name}"
    if _is_standard(module):
        is_fine = full in _STANDARD or module in _HARMLESS_MODULES or path in _STANDARD
        return "" if is_fine else f"is {full}, of Python's standard library, which no configuration may call"
    if not _is_installed(module):
        return ""
    if _starts(full, allowed) or _starts(path, allowed):
        return ""
    if not _starts(full, INSTALLED):
        return f"is {full}, of a package that is not known to make components"
    if _starts(full, _WORKSHOPS) or (not inspect.isclass(target) and _TOOLS.match(name.rpartition(".")[2])):
        return f"is {full}, which writes, fetches or runs something"
    return ""


def check_allowed(allowed: Sequence[str]) -> list[ConfigError]:
    """Return what is wrong with `allowed_targets`."""
    return [
        ConfigError(
            key="allowed_targets",
            happened=f"{prefix!r} {'is of the standard library' if _is_standard(prefix) else 'is no dotted name'}",
            expected="packages or dotted names of what is installed, as my_models or my_models.vision.make",
            fix="a function of your own, in a file in your folder, may call what it needs",
        )
        for prefix in allowed
        if _is_standard(prefix) or not all(part.isidentifier() for part in prefix.split("."))
    ]


def _origin(path: str, target: Any) -> tuple[str, str]:
    """Return the module and the qualified name of what would be called."""
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target) if callable(target) else target
    own = getattr(target, "__self__", None)
    name = str(getattr(target, "__qualname__", "") or getattr(target, "__name__", "") or type(target).__qualname__)
    module = getattr(target, "__module__", None)
    if module is None and inspect.ismodule(own):
        module = own.__name__
    if module is None and own is not None:
        module = (own if inspect.isclass(own) else type(own)).__module__
    if module is None:
        module = getattr(getattr(target, "__objclass__", None), "__module__", None)
    found, _, last = path.rpartition(".")
    return (str(module), name) if module else (found, last)  # some C functions do not say


def _is_standard(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in sys.builtin_module_names


def _is_installed(module: str) -> bool:
    """Tell whether a module is of an installed package, and not of the user's own folders."""
    root = module.partition(".")[0]
    if root == "ddp_train":
        return True
    loaded = sys.modules.get(module) or sys.modules.get(root)
    file = getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), None)
    if file is None:
        return True  # without a file it is no one's folder
    parents = Path(file).resolve().parents
    return any(place in parents for place in _PATHS.values()) or any(part.name in ("site-packages", "dist-packages") for part in parents)


def _starts(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
