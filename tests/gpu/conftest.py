"""The acceptance suite for GPUs (docs/gpu.md): what it runs on, what each item says while it runs, and the report at its end."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_train
from ddp_train.system import devices, process_env
from tests.conftest import Finished, Project, finish

_MOST_RANKS = 8
_REHEARSED_RANKS = 2
_REPORTS = Path(__file__).parents[2] / "outputs" / "gpu"
_ROWS = pytest.StashKey["dict[str, Row]"]()


@dataclass
class Row:
    """What the report says of one item."""

    name: str
    shows: str
    ranks: str = "-"
    outcome: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rig:
    """What an item runs on: an empty folder, a device and a number of ranks."""

    project: Project
    device: str  # cuda, or cpu for a rehearsal
    ranks: int
    row: Row
    say: Callable[[str], None]  # to the person who waits
    is_shared: bool = False  # all ranks have one GPU

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def needs(self, ranks: int, why: str) -> None:
        """Skip the item where there are fewer ranks."""
        if self.ranks < ranks:
            pytest.skip(f"needs {ranks} ranks ({why}), has {self.ranks}")

    def needs_cuda(self, why: str) -> None:
        """Skip the item in a rehearsal."""
        if not self.is_cuda:
            pytest.skip(f"cannot be rehearsed on a CPU: {why}")

    def needs_nccl(self) -> None:
        """Skip the item where ranks talk over gloo alone."""
        if self.is_shared:
            pytest.skip("the ranks share a GPU, over gloo")

    def note(self, text: str) -> None:
        """Say something that the report keeps."""
        self.row.notes.append(text)
        self.say(f"      {text}")

    def on(self, ranks: int | None = None) -> list[str]:
        """Return the overrides that choose the device and the number of ranks."""
        ranks = ranks or self.ranks
        said = self.row.ranks.split(", ") if self.row.ranks != "-" else []
        self.row.ranks = ", ".join(dict.fromkeys([*said, str(ranks)]))
        return [f"cluster.device={self.device}", f"cluster.processes_per_node={ranks}"]

    def train(self, *arguments: str, ranks: int | None = None, code: int = 0, env: dict[str, str] | None = None) -> Finished:
        """Run a command to its end, and check its exit code."""
        done = self.project.run(*arguments, *self.on(ranks), timeout=420, env=env)
        assert done.returncode == code, done.output
        return done

    def start(self, *arguments: str, ranks: int | None = None) -> subprocess.Popen[str]:
        return self.project.start(*arguments, *self.on(ranks))

    def wait(self, process: subprocess.Popen[str], condition: Callable[[], bool], *, timeout_s: float = 240) -> None:
        """Wait until something is so in a run that goes on."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                process.send_signal(signal.SIGKILL)
                pytest.fail(f"it did not happen; {finish(process).output}")
            time.sleep(0.02)

    def folder(self, name: str) -> Path:
        return self.project.folder / name

    # Small, but on a GPU large enough that the device, and not the host, is what a step waits for.

    @property
    def images(self) -> list[str]:
        """Images in memory."""
        given = ("split", "image_size", "channels", "num_classes", "noise", "seed", "num_samples", "eval")
        size, samples, batch = (32, 32768, 256) if self.is_cuda else (8, 640, 16)
        return [
            *["data._target_=tests.gpu.parts.Images", *(f"~data.{key}" for key in given), f"loader.micro_batch_size={batch}"],
            *[f"+data.size={size}", f"+data.num_samples={samples}", "+data.eval={num_samples:1001,seed:1,wrong_label_of:null}", *_PLAIN],
        ]

    @property
    def convnet(self) -> list[str]:
        """A convolutional network on them; no output of one sample depends on another sample."""
        return [*self.images, "model=convnet", f"model.width={128 if self.is_cuda else 4}"]

    @property
    def gpt(self) -> list[str]:
        """A deep GPT on characters: more kernels in a step than the device's queue holds."""
        self.project.write("text.txt", "".join(f"{number} times {number} is {number * number}\n" for number in range(20_000)))
        layers, heads, width, context, batch = (24, 8, 512, 256, 16) if self.is_cuda else (4, 2, 16, 16, 4)
        return [
            *["data=char_text", "data.path=text.txt", f"data.context_length={context}", "data.val_fraction=0.01"],
            *[f"loader.micro_batch_size={batch}", "model=gpt", f"model.num_layers={layers}", f"model.num_heads={heads}"],
            *[f"model.width={width}", "objective=language_modeling", *_PLAIN],
        ]


_PLAIN = ["scheduler=constant", "trainer.max_epochs=null", "evaluation.every_steps=100000", "~metrics.tensorboard"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("the acceptance suite for GPUs")
    group.addoption("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse what makes sense without a GPU")
    group.addoption("--ranks", type=int, help="how many at most; default: one per GPU, up to eight; in a rehearsal two")

    group.addoption(
        "--share-gpu", type=int, metavar="RANKS", help="so many ranks on one GPU, over gloo: what several ranks do, with one GPU"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = {}
    if config.getoption("--share-gpu", None):
        os.environ[process_env.ONE_GPU] = "shared"


@pytest.fixture
def rig(project: Project, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Give what an item runs on, or skip it where that is not there."""
    config = request.config
    device, ranks = config.getoption("--device", "cuda"), config.getoption("--ranks", None)
    row = config.stash[_ROWS][request.node.nodeid]
    shared = config.getoption("--share-gpu", None)
    there = _REHEARSED_RANKS if device == "cpu" else len(devices.gpus())
    if there == 0:
        pytest.skip("needs a GPU, and torch sees none here (a rehearsal on a CPU: make gpu ARGS=--device=cpu)")
    say = _teller(config)
    number = ranks if device == "cpu" and ranks else min(there, ranks or _MOST_RANKS)
    yield Rig(project, device, shared or number, row, say, is_shared=bool(shared))
    assert not torch.cuda.is_initialized(), "this process has a CUDA context of its own, which takes memory from the ranks"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            config.stash[_ROWS][item.nodeid] = Row(item.name.removeprefix("test_").replace("_", " "), _doc(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    rows = item.config.stash[_ROWS]
    if item.nodeid in rows:
        number = list(rows).index(item.nodeid) + 1
        _teller(item.config)(f"\n[{number} of {len(rows)}] {rows[item.nodeid].name}\n      {rows[item.nodeid].shows}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    row = item.config.stash[_ROWS].get(item.nodeid)
    if row is not None:
        row.seconds += report.duration
        if report.skipped and isinstance(report.longrepr, tuple):
            row.outcome, reason = "skipped", report.longrepr[2].removeprefix("Skipped: ")
            row.notes.append(reason)
        elif report.failed:
            row.outcome = "FAILED"
            folder = item.funcargs.get("tmp_path") if isinstance(item, pytest.Function) else None
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            row.notes += [said.strip().splitlines()[0][:300], f"its folder: {folder}"]
        elif report.when == "call":
            row.outcome = "passed"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the report that a person sends in."""
    rows = [row for row in config.stash[_ROWS].values() if row.outcome]
    if not rows or all(row.outcome == "skipped" for row in rows):
        return
    text = _report(rows, device=config.getoption("--device", "cuda"))
    _REPORTS.mkdir(parents=True, exist_ok=True)
    file = _REPORTS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.md"
    file.write_text(text)
    terminalreporter.write_line(f"\n{text}\nreport   {file} (docs/gpu.md says what to send in)")


def _report(rows: list[Row], *, device: str) -> str:
    """Return the table of all items, and what they ran on."""
    names = asked_of_driver("name") if device == "cuda" else []
    driver = next(iter(asked_of_driver("driver_version")), "unknown")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "-"
    lines = [
        f"# {'Acceptance' if device == 'cuda' else 'Rehearsal on a CPU'}: ddp_train {ddp_train.__version__}, commit {_commit()}",
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver}, Python {platform.python_version()}",
        *[f"- {names.count(name)} x {name}" for name in dict.fromkeys(names)],
        "",
        "| item | ranks | outcome | seconds | what was found |",
        "|---|---|---|---|---|",
        *[f"| {row.name} | {row.ranks} | {row.outcome} | {row.seconds:.0f} | {'<br>'.join(row.notes).replace('|', '/')} |" for row in rows],
        "",
        f"{sum(row.seconds for row in rows) / 60:.1f} minutes",
    ]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def asked_of_driver(what: str) -> list[str]:
    """Return one fact of each GPU, as nvidia-smi has it: torch would make a CUDA context in this process."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return [line.strip() for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Return what shows a line at once, although pytest keeps what tests print."""
    reporter, capture = config.pluginmanager.getplugin("terminalreporter"), config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(text)

    return say


def _doc(item: pytest.Item) -> str:
    text = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return " ".join(text.split())
