"""Fixtures: the command line as users type it, and a guard against tests that leave something behind."""

from __future__ import annotations

import compileall
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_train import FOLDER
from tests.faults.in_order import differences, noting, taken_from

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # `make test &`: what the tests start would never see Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):  # the first in the background of a script, too, the second of `nohup make test`
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

FEW = ["data.num_samples=640", "data.eval.num_samples=101", "trainer.log_every_steps=1", "~metrics.tensorboard"]
TINY = ["model=mlp", "model.width=16", *FEW]
"""A run of seconds: a small model on few synthetic images."""
TINY_CONVNET = ["model=convnet", "model.width=4", *FEW]


_NOTED, _COMPARED = pytest.StashKey[Path](), pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collectives", action="store_true", help="compare after each test what the ranks of its runs have called")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--collectives"):
        config.stash[_NOTED] = Path(tempfile.mkdtemp(prefix="collectives_"))
        config.stash[_COMPARED] = 0
        os.environ.update(noting(config.stash[_NOTED]))
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        compileall.compile_dir(FOLDER, quiet=1)  # once, as an installed package is, not in each of the processes that tests start
    torch.set_num_threads(1)  # processes of tests that take all cores each wait for each other's threads, and take twice the time


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of tests and all that they have imported: collecting need not look at it again and again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Take one process more than there are cores: real clusters, time-outs and stops are mostly waited for."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group by files (xdist 3.8 has lost the marks of groups with pytest 9.2): clusters are waited for one after the other, and
    one process takes all tests of a file that share a costly fixture."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "clusters" if "cluster/" in file else file if _shares_fixture(config.rootpath / file) else nodeid

    return Scheduler(config, log)


@cache
def _shares_fixture(file: Path) -> bool:
    return 'scope="module"' in file.read_text()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _NOTED in config.stash:
        terminalreporter.write_line(f"collectives of {config.stash[_COMPARED]} ranks compared")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _NOTED in config.stash:
        shutil.rmtree(config.stash[_NOTED])


@pytest.fixture(autouse=True)
def in_one_order(pytestconfig: pytest.Config) -> Iterator[None]:
    """Under `--collectives`, fail a test of whose runs two ranks have called something else."""
    yield
    if _NOTED in pytestconfig.stash:
        found = taken_from(pytestconfig.stash[_NOTED])
        pytestconfig.stash[_COMPARED] += len(found)
        assert differences(found) == []


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@dataclass(frozen=True)
class Project:
    """An empty folder in which a user stands."""

    folder: Path

    def command(self, *arguments: str, torchrun: list[str] | None = None) -> list[str]:
        if torchrun is None:
            return [sys.executable, "-m", "ddp_train", *arguments]
        return [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "ddp_train", *arguments]

    def start(self, *arguments: str, torchrun: list[str] | None = None, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `ddp-train ARGUMENTS`, or the same under torchrun, and do not wait."""
        return subprocess.Popen(
            self.command(*arguments, torchrun=torchrun),
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pipesize=1 << 20,  # nobody reads until the end: a full pipe would hold a long run up
        )

    def run(self, *arguments: str, torchrun: list[str] | None = None, env: dict[str, str] | None = None, timeout: float = 120) -> Finished:
        """Run it to its end."""
        process = self.start(*arguments, torchrun=torchrun, env=env)
        return finish(process, timeout=timeout)

    def runs(self) -> list[Path]:
        """Return all run folders."""
        found = []
        for place, folders, names in os.walk(self.folder / "outputs"):
            folders[:] = [name for name in folders if name not in (".hydra", "launch")]  # the copy of the code has our conf/
            found += [Path(place)] if "config.yaml" in names else []
        return sorted(found)

    def the_run(self) -> Path:
        """Return the only run folder."""
        found = self.runs()
        assert len(found) == 1, f"one run folder expected, found {found}"
        return found[0]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def finish(process: subprocess.Popen[str], *, timeout: float = 120) -> Finished:
    """Wait for a started command; kill it when it hangs."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as error:  # what it has started holds its output open
            stdout, stderr = str(error.stdout), str(error.stderr)
        pytest.fail(f"still running after {timeout} s\n{stdout}\n{stderr}")
    return Finished(process.returncode, stdout, stderr)


def metrics(run: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if split in (None, record["split"])]


def wait_for(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {timeout_s} s"
        time.sleep(0.02)


def our_processes(folder: Path) -> list[str]:
    """Return the command lines of live processes that stand in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has just ended, or is not ours
    return [line for line in found if line]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Give an empty folder, and check afterwards that no process of ours is left in it."""
    yield Project(tmp_path)
    left = our_processes(tmp_path)
    assert not left, f"processes left behind: {left}"


STRATEGIES = ["ddp", pytest.param("zero1", marks=pytest.mark.long), pytest.param("fsdp", marks=pytest.mark.long)]
"""For `pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)`: what must hold under each."""


@pytest.fixture(scope="module")
def strategy(request: pytest.FixtureRequest) -> str:
    """Give the strategy of a test's runs; ddp where it names none."""
    name: str = getattr(request, "param", "ddp")
    return name


@pytest.fixture
def data_folder() -> Callable[[str], Path]:
    """Find a real data set below $DDP_TRAIN_DATA, or skip."""

    def find(name: str) -> Path:
        root = os.environ.get("DDP_TRAIN_DATA", "")
        path = Path(root) / name
        if not root or not path.exists():
            pytest.skip(f"needs the real data set {name}: set DDP_TRAIN_DATA to the folder that holds it")
        return path

    return find


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks environment variables, threads or a process group."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    # torch sets the second when it builds its first optimizer; `__main__.main` the third, for the agents that are forked from it.
    not_ours = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CPP_LOG_LEVEL")
    before, after = ({name: value for name, value in each.items() if name not in not_ours} for each in (environment, os.environ))
    assert after == before
    assert not dist.is_initialized()
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    if left:
        gc.collect()  # a pool that nobody refers to any more ends its threads, in a moment
        for thread in left:
            thread.join(timeout=2)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MB, for `fill`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs root, and a kernel that mounts a tmpfs here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk of a folder, for a second also with what a save gives back that ends meanwhile, and return the file that does."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        for _ in range(10):
            with suppress(OSError):
                while True:
                    filler.write(bytes(4096))
            time.sleep(0.1)
    return folder / "filler"


@pytest.fixture
def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to whoever asks for any: tests run side by side."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(lowest // 2, lowest))  # not `random`, which tests seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
