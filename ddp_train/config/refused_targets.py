"""Which callables a `_target_` must not name: tools instead of components. docs/security.md says what this is worth.

A component may come from anywhere: the user's own folders, and any package that is installed. What is refused is short: Python's standard
library but for plain values; what starts, writes or fetches something, by where it comes from or by what it is called; a class that is made
of such a tool of the standard library. A model, data set, optimizer or schedule, known by its base class, is a component whatever its name.
What counts is where an object comes from, not the path that led to it: `logging.os.system` is `posix.system`.
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

from ddp_train.system.module_names import module_name

_STANDARD = {
    *(f"builtins.{name}" for name in ("bool", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "str", "tuple")),
    *(f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
    *("datetime.date", "datetime.datetime", "datetime.timedelta", "decimal.Decimal", "fractions.Fraction", "functools.partial"),
    *("itertools.chain", "itertools.repeat", "operator.itemgetter", "random.Random", "uuid.UUID"),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath"),
}
"""All of the standard library that a config may name; `math` and `statistics` too."""

_HARMLESS_MODULES = ("math", "cmath", "statistics")

_COMPONENTS = {
    *("torch.nn.modules.module.Module", "torch.utils.data.dataset.Dataset", "torch.utils.data.sampler.Sampler"),
    *("torch.optim.optimizer.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
}
"""Base classes that vouch for what is made of them, whatever it is called and wherever it lies."""

_OURS = tuple(
    module_name(f"ddp_train.{name}")
    for name in ("amp", "callbacks", "data", "metrics", "model", "objective", "optimizer", "scheduler", "strategy")
)
"""Of this package, what conf/ names."""

_TOOLS = (
    *map(module_name, ("ddp_train.data.download", "ddp_train.data.tokens.token_writer")),  # beside what makes components
    *("torch.hub", "torch.package", "torch.serialization", "torch.multiprocessing", "torch.distributed", "torch.utils.cpp_extension"),
    *("torch.utils.model_zoo", "torch._inductor", "torch._ops", "torch._classes", "numpy.memmap"),
    *("torch.utils.collect_env", "torch.utils.hipify", "torch.utils.benchmark", "torch.testing", "torch.fx.graph_module"),
    *("numpy.testing", "numpy.f2py", "numpy.DataSource", "numpy.lib.npyio.DataSource", "numpy.lib._datasource", "sympy", "jinja2"),
    *("numpy.loadtxt", "numpy.genfromtxt", "markdown"),
    *("hydra", "omegaconf", "IPython", "ipykernel", "pip", "setuptools", "pkg_resources", "_pytest", "cffi", "werkzeug"),
    *("dill", "cloudpickle", "joblib", "yaml", "fsspec", "huggingface_hub", "requests", "urllib3", "httpx", "aiohttp", "boto3", "botocore"),
    *("psutil", "pexpect", "ptyprocess", "sh", "plumbum", "invoke", "fabric", "paramiko", "docker", "git"),
)
"""Packages and modules that start, write or fetch, or that look up or run whatever they are told."""

_TOOL_NAMES = re.compile(  # functions that write, start or fetch code, by how they are called; `evaluate` is no `eval`
    r"^_*((save(z|txt|fig|mat)?|write(lines|str)?|dumps?|delete|remove|unlink|rename|move|push|upload|download|untar|unzip|spawn(v|ve|vp|vpe|l)?"
    r"|exec(ute|file|v|ve|vp|l)?|eval|system|popen|run|runstring|shell|compile|import|pipe|gopen|memmap|urlopen|urlretrieve"
    r"|load_inline|load_module|load_library|load_url|read_pickle|unpickle|tofile|from_file|get_(class|method|object|attr))(_|$|(?-i:[A-Z]))"
    r"|(main|cli|loads?|full_load|extract(_?all|_(archive|zip|tar|file)\w*)?)$"
    r"|to_(csv|pickle|parquet|json|excel|html|hdf|feather|file|disk|sql|yaml)|\w+_(download|upload|to_disk|to_hub|to_file|from_url))",
    re.IGNORECASE,
)

_TOOL_BASES = (
    *("subprocess", "multiprocessing", "threading", "concurrent", "asyncio", "socket", "socketserver", "ssl", "http", "ftplib", "smtplib"),
    *(
        "urllib",
        "xmlrpc",
        "io",
        "_io",
        "tempfile",
        "zipfile",
        "tarfile",
        "shelve",
        "dbm",
        "sqlite3",
        "logging",
        "code",
        "cmd",
        "pdb",
        "pickle",
    ),
    *("_pickle", "ctypes", "_ctypes", "mmap", "importlib", "zipimport", "runpy"),
)
"""Modules of the standard library whose classes hand on what they do to those that are made of them."""

_PATHS = {name: Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def refuse(path: str, target: Any, allowed: Sequence[str] = ()) -> str:
    """Return why a `_target_` may not be used; "" when it may.

    Args:
        path: as the config has it.
        target: what it names.
        allowed: prefixes that are no tools here.
    """
    if "__" in path:
        return "leads through Python's own names"
    module, name = _origin(path, target)
    full = f"{module}.{name}"
    if _is_standard(module):
        is_fine = full in _STANDARD or module in _HARMLESS_MODULES or path in _STANDARD
        return "" if is_fine else f"is {full}, of Python's standard library, which no configuration may call"
    if not _is_installed(module) or _is_component(target) or _starts(full, allowed) or _starts(path, allowed):
        return ""
    is_inner = module.partition(".")[0] == module_name("ddp_train") and not _starts(full, _OURS)
    is_called_so = not inspect.isclass(target) and _TOOL_NAMES.match(name.rpartition(".")[2])
    if is_inner or is_called_so or _starts(full, _TOOLS) or _is_made_of_a_tool(target):
        return f"is {full}, a tool that may write, fetch or run something"
    return ""


def _is_component(target: Any) -> bool:
    return inspect.isclass(target) and not _COMPONENTS.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in target.__mro__)


def _is_made_of_a_tool(target: Any) -> bool:
    return inspect.isclass(target) and any(base.__module__.partition(".")[0] in _TOOL_BASES for base in target.__mro__)


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
