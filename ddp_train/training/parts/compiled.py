"""torch.compile before the strategy (`compile`): the regions of a model, the cache, counts, and failures.

A part is compiled in place when it is first called, so that its parameters keep their names. Blocks that repeat share a graph.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError
from threading import Thread
from traceback import FrameSummary
from typing import Any

import torch
import xxhash
from torch import nn

from ddp_train.config.schema import CompileConfig
from ddp_train.distributed.world import World
from ddp_train.errors import RunError, join_few, one_line, plural
from ddp_train.interfaces.parameters import blocks_of
from ddp_train.system.folder_lock import is_shared

logger = logging.getLogger(__name__)

_CACHE, _THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
_SHOWN = 300  # characters of an error


def keep_cache(folder: Path, world: World) -> Callable[[], None]:
    """Keep compiled code in a folder: restarts, other ranks and a sweep's next jobs take it from there. A user's own folder counts more.

    Ranks that compile the same at the same time wait for each other's locks, and take what the first has made. They share the cores.
    Of a folder on a network, where thousands of small files take their time, each machine has a copy on its own disk. Collective.

    Returns a function to call when all is compiled: it copies from this machine to the folder, in a thread.
    """
    from torch._inductor import config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    local = Path(tempfile.gettempdir(), f"ddp_train_compiled_{os.getuid()}_{xxhash.xxh3_64_hexdigest(os.fsencode(folder.absolute()))}")
    is_open = os.environ.get(_CACHE, "") in ("", os.path.abspath(default_cache_dir()), str(local))  # torch sets its own where it is unset
    is_copied = is_open and is_shared(folder) and not is_shared(local)
    if is_copied:
        with suppress(OSError):
            local.mkdir(mode=0o700, exist_ok=True)
        is_copied = local.is_dir() and local.stat().st_uid == os.getuid()  # this user's: code in it is run
    if is_copied and world.local_rank == 0 and folder.is_dir():
        _copy_new(folder, local)
    world.barrier()
    if is_open:
        os.environ[_CACHE] = str(local if is_copied else folder)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault(_THREADS, str(max(1, min(32, cores // world.local_size))))  # 32: torch's own limit
    inductor.compile_threads = int(os.environ[_THREADS])  # it was imported, and has read the variable, before
    if not (is_copied and world.is_main):
        return lambda: None
    return Thread(target=_copy_new, args=(local, folder), name="compiled", daemon=True).start


def _copy_new(source: Path, target: Path) -> None:
    """Copy the files that are not there yet. What a rank writes meanwhile, or a disk has no room for, is compiled again another time."""
    try:
        for path in source.rglob("*"):
            new = target / path.relative_to(source)
            if path.is_file() and path.suffix not in (".lock", ".tmp") and not new.exists():
                new.parent.mkdir(parents=True, exist_ok=True)
                os.replace(shutil.copyfile(path, f"{new}.{os.getpid()}.tmp"), new)  # others may read there
    except OSError as error:
        logger.info("not all compiled code was copied from %s to %s: %s", source, target, one_line(str(error), _SHOWN))


class Compiled:
    """The compiled regions of a model, and counts of their compilations."""

    def __init__(self) -> None:
        self.regions: dict[str, nn.Module] = {}
        self.recompiles = self.given_up = 0
        self.seconds = 0.0
        self.begin_batch: Callable[[], None] = lambda: None
        """Called before the forwards of each micro-batch. CUDA graphs of blocks would else begin anew at each block without gradients, and
        give back the output of the one before (pytorch issue 152887)."""
        self.keep: Callable[[], None] = lambda: None  # called when all is compiled (`keep_cache`)
        self._says = False  # on rank 0
        self._is_warm = False
        self._began = 0.0
        self._graphs_before = 0

    def __bool__(self) -> bool:
        return bool(self.regions)

    @property
    def graphs(self) -> int:
        return _graphs_so_far() - self._graphs_before

    def values(self) -> dict[str, float]:
        """Return the values for a record: how many graphs there are, how many of them for new shapes or types, and their seconds."""
        if not self.regions:
            return {}
        return {"compile/graphs": self.graphs, "compile/recompiles": self.recompiles, "compile/seconds": self.seconds}

    def line(self) -> str:
        """Return the counts as a line for people."""
        again = f", {self.recompiles} of them for other shapes or types" if self.recompiles else ""
        given_up = f"; {self.given_up} regions run without compilation, the log says why" if self.given_up else ""
        return f"compile  {plural(self.graphs, 'graph')} in {self.seconds:.1f} s{again}{given_up}"

    def end_warm_up(self) -> None:
        """Print what was compiled before the first step, and from now on each compilation."""
        self._is_warm = True
        self.keep()
        if self._says:
            print(self.line(), flush=True)

    def begin(self, regions: dict[str, nn.Module], config: CompileConfig, world: World) -> None:
        """Compile the regions when they are called, and count."""
        import torch._dynamo as dynamo  # takes a second
        from torch._dynamo.callback import callback_handler

        self.regions, self._says = regions, world.is_main
        options: dict[str, Any] = {"backend": config.backend, "fullgraph": config.fullgraph}
        if config.mode != "default":
            options["mode"] = config.mode
            self.begin_batch = torch.compiler.cudagraph_mark_step_begin
        dynamo.config.recompile_limit = config.max_recompiles + len(regions)  # those whose class is the same are counted together
        self._graphs_before = _graphs_so_far()
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)
        for name, module in regions.items():
            kind: Any = type(module)
            if kind.forward.__module__.startswith("torch."):  # as nn.Sequential's: torch compiles none of its own files
                module.__class__ = _with_forward(kind)
            module.compile(**options)
            module._compiled_call_impl = _Region(self, module, name or type(module).__name__, goes_on=config.on_failure == "eager")

    def _begins(self, event: Any) -> None:
        self._began = time.perf_counter()

    def _ends(self, event: Any) -> None:
        took = time.perf_counter() - self._began
        self.seconds += took
        number = str(getattr(event, "compile_id", "")).rpartition("/")[2].partition("_")[0]  # of one frame: 0 is the first time
        is_forward = getattr(getattr(event, "callback_trigger", None), "name", "") == "DYNAMO"
        if is_forward and number.isdecimal() and int(number) > 0:
            self.recompiles += 1
            if self._is_warm:
                logger.warning("recompiled for other shapes or types: number %d, in %.1f s", self.recompiles, took)


def _graphs_so_far() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class _Region:
    """Calls the compiled forward of a module; after a failure it names the line of the user's code, or goes on without the compiler."""

    def __init__(self, compiled: Compiled, module: nn.Module, name: str, *, goes_on: bool) -> None:
        assert module._compiled_call_impl is not None
        self._compiled, self._name, self._goes_on = compiled, name, goes_on
        self._as_written: Callable[..., Any] = module._call_impl
        self._call: Callable[..., Any] = module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._call(*args, **kwargs)
        except TorchDynamoException as error:
            if _is_of_a_signal(error):  # a stop: the step is finished, and saved
                return self(*args, **kwargs)
            where = _users_line(error)
            what = f"{type(error).__name__}: {one_line(str(error), _SHOWN)}"
            if not self._goes_on:
                fix = "compile.on_failure=eager runs it without compilation; compile.regions=[CLASS] compiles other parts; compile=off"
                raise RunError(key="compile", happened=f"{self._name} cannot be compiled{where}\n  {what}", fix=fix) from error
            logger.warning("%s is not compiled%s: %s", self._name, where, what, exc_info=error)
        self._compiled.given_up += 1
        self._call = self._as_written
        return self._call(*args, **kwargs)


def compile_model(
    model: nn.Module, config: CompileConfig, world: World, *, parts: Sequence[nn.Module], cache_folder: Path | None = None
) -> Compiled:
    """Let regions of a model be compiled when they are first called, in place; on the device `meta` only look whether they are there.

    Args:
        parts: what is called of the model: itself, or its parts where an objective takes turns.
        cache_folder: keeps what is compiled (`keep_cache`); None: torch's own does.
    """
    compiled = Compiled()
    if cache_folder is not None:
        compiled.keep = keep_cache(cache_folder, world)
    regions = {} if config.regions == "whole" else blocks_of(model, config.regions, key="compile.regions")
    if not regions:
        names = {id(module): name for name, module in model.named_modules()}
        regions = {names.get(id(part), ""): part for part in parts}
    if world.device.type != "meta":
        compiled.begin(regions, config, world)
    return compiled


@cache
def _with_forward(kind: Any) -> type[nn.Module]:
    """Return a subclass of the same name, as for `activation_checkpointing`, whose forward is not in torch; alike ones share a graph."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    members = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def compile_note(compiled: Compiled, config: CompileConfig) -> str:
    """Return a line on the compiled regions for the start of a run; "": there are none."""
    if not compiled:
        return ""
    classes = join_few(sorted({type(module).__name__ for module in compiled.regions.values()}))
    return f"compile  {config.mode} ({config.backend}): {plural(len(compiled.regions), 'region')} ({classes}); the first step waits for it"


def _is_of_a_signal(error: BaseException | None) -> bool:
    """Tell whether a signal has ended the compiler: one to all processes of a job, as SLURM sends it, reaches that, too."""
    while error is not None:
        if (isinstance(error, CalledProcessError) and error.returncode < 0) or "signal terminated program" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _users_line(error: BaseException) -> str:
    stack: Sequence[FrameSummary] = getattr(error, "real_stack", None) or ()
    user_frame = next((frame for frame in reversed(stack) if f"{os.sep}torch{os.sep}" not in frame.filename), None)
    return f", at {Path(user_frame.filename).name}:{user_frame.lineno} in {user_frame.name}: {user_frame.line}" if user_frame else ""
