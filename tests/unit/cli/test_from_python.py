"""`ddp_train.run`: a run for Python, as if its words were typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ddp_train
from ddp_train.cli import from_python
from ddp_train.cli.from_python import RunFailed, RunResult, run
from ddp_train.cli.pytest_plugin import ddp_train_run  # noqa: F401  (a fixture)
from ddp_train.run_folder.failure import Failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.conftest import TINY, metrics, wait_for


@pytest.mark.distributed
def test_a_run_returns_what_came_of_it_and_prints_where_python_prints(
    ddp_train_run: Callable[..., RunResult],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a fast one, that trains, evaluates, saves and ends."""
    result = ddp_train_run(*TINY, "debug=fast", "evaluation.batch_size=32")
    assert (result.status, result.step, result.folder.name) == ("completed", 4, "1")
    assert result.metrics["eval/loss"] == metrics(result.folder, "eval")[-1]["loss"]
    assert [record["step"] for record in metrics(result.folder)] == [1, 2, 3, 4, 4]
    assert sorted(RunFolder(result.folder).saved_steps()) == [4]
    shown = capsys.readouterr().out
    assert "ranks    2 on cpu" in shown and "Done: 4 steps" in shown


def test_an_interrupt_lets_the_run_end_and_then_takes_its_effect_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a command that needs a moment to end, in the place of the real one; tests/thirdparty/test_jupyter.py has that."""
    started = tmp_path / "started"
    child = f"""
import signal, sys, time
def save(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, save)
open({str(started)!r}, "w")
time.sleep(60)
"""
    thread = threading.Thread(target=lambda: (wait_for(started.exists), os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        from_python.run_command([sys.executable, "-c", child])
    thread.join()
    assert capsys.readouterr().out == "saved\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_wrong_overrides_are_raised_with_all_of_their_problems_and_not_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match=r"did you mean trainer\.max_steps=3") as raised:
        run(["trainer.max_stepz=3", "model=convet"])
    assert "did you mean model=convnet" in str(raised.value)
    assert (raised.value.exit_code, raised.value.folder) == (2, None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "words",
    [
        "model=mlp",
        ["-m", "seed=1,2"],
        ["resume", "outputs/x"],
        ["--cfg=job"],
        ["hydra.mode=MULTIRUN", "seed=1,2"],
        ["+hydra.mode=MULTIRUN"],
        ["--config-dir", "a", "--help"],
    ],
)
def test_what_is_no_single_run_is_refused_at_once(words: list[str]) -> None:
    with pytest.raises(RunFailed) as raised:
        run(words)
    assert raised.value.exit_code == 2


def test_a_dict_of_overrides_is_refused_with_the_words_for_it() -> None:
    with pytest.raises(RunFailed, match=r"run\(\['model=mlp', 'seed=3'\]\)"):
        run({"model": "mlp", "seed": 3})  # type: ignore[arg-type]


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(RunFailed, match="torchrun"):
        run(["model=mlp"])


def test_a_failure_is_raised_in_a_few_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    Failure(rank=1, pid=7, host="node3", step=12, error="ValueError", message="no such\nclass", traceback="Traceback ...").record(folder)
    with pytest.raises(RunFailed) as raised:
        from_python._result(folder, 1)
    assert str(raised.value).splitlines() == [
        "The run failed: rank 1 on node3 (pid 7), after step 12",
        "ValueError: no such class",
        f"  run folder   {tmp_path}",
    ]
    assert raised.value.failure is not None and raised.value.failure.traceback == "Traceback ..."


@pytest.mark.parametrize(
    ("code", "result", "status"),
    [
        (0, None, "queued"),  # an engine has it
        (75, Result(status=Status.PREEMPTED, step=3), "preempted"),
        (130, Result(status=Status.INTERRUPTED, step=3), "interrupted"),
    ],
)
def test_a_run_that_stopped_in_good_order_has_not_failed(tmp_path: Path, code: int, result: Result | None, status: str) -> None:
    if result is not None:
        result.write(tmp_path / "result.json")
    found = from_python._result(RunFolder(tmp_path), code)
    assert (found.status, found.step, found.folder) == (status, result and result.step, tmp_path)


@pytest.mark.parametrize(("code", "result"), [(143, None), (1, Result(status=Status.FAILED)), (1, Result(status=Status.PREEMPTED))])
def test_a_run_that_left_nothing_or_less_than_its_code_says_has_failed(tmp_path: Path, code: int, result: Result | None) -> None:
    if result is not None:
        result.write(tmp_path / "result.json")
    with pytest.raises(RunFailed, match=f"exit code {code}"):
        from_python._result(RunFolder(tmp_path), code)


def test_to_import_it_costs_neither_torch_nor_hydra() -> None:
    code = "import json, sys, ddp_train; ddp_train.run; print(json.dumps([name for name in ('torch', 'hydra') if name in sys.modules]))"
    assert json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout) == []


def test_the_package_has_no_other_names() -> None:
    assert {"run", "RunResult", "RunFailed"} <= set(dir(ddp_train))
    typed = re.findall(r"as (\w+)$", Path(ddp_train.__file__).with_suffix(".pyi").read_text(), re.MULTILINE)
    assert sorted(typed) == sorted(ddp_train._FOR_PYTHON)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="runn"):
        ddp_train.runn  # noqa: B018


def test_the_command_is_stopped_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    """A notebook's kernel that is killed leaves no run behind; as SIGTERM does, it lets the run save."""
    started = tmp_path / "started"
    child = f"""
import signal, sys, time
from ddp_train.cli import main
main.CommandRunner()
signal.signal(signal.SIGTERM, lambda *_: (open({str(started)!r}, "a").write("stopped"), sys.exit()))
open({str(started)!r}, "w").write("started ")
time.sleep(60)
"""
    code = f"""import sys
from ddp_train.cli.from_python import run_command
run_command([sys.executable, '-c', {child!r}])"""
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: started.exists() and started.read_text() == "started ")
    process.kill()
    process.wait()
    wait_for(lambda: started.read_text() == "started stopped")
