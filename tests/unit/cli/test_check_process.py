"""A configuration with somebody's own components is checked where torch is, and what comes of it is what comes of it here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, io, json, os, sys
from tests.fake_runner import FakeRunner
from ddp_train.cli import check_process
from ddp_train.cli import main as app
from ddp_train.launch.fork_requests import early_fork_server
from ddp_train.system.fork_server import run_fork_server, spawn_fork_server

if sys.argv[1:] == ["waits"]:
    sys.exit(run_fork_server(check_process.serve_check, sys.argv[1:]))

def run(words):
    said, jobs = io.StringIO(), []
    sys.argv = ["ddp-train", "cluster=cpu", *words]
    with contextlib.redirect_stderr(said):
        code = app.run(sys.argv[1:], FakeRunner(lambda job: jobs.append(job) or 0))
    return [code, said.getvalue(), [job.config.hash() for job in jobs]]

cases, results, ask = json.loads(sys.argv[1]), [], check_process._ask
sys.path.insert(0, os.getcwd())
sys.path.append("added")  # what the other process has not from its environment
early_fork_server._server = spawn_fork_server(os.environ, ["waits"], command=[sys.executable, __file__])
for words in cases:
    there = run([*words, "hydra.run.dir=there"])
    imported = [name for name in ("mine", "broken", "torch") if name in sys.modules]
    check_process._ask = lambda config, hydra: None  # as when it was killed
    here = run([*words, "hydra.run.dir=here"])
    check_process._ask = ask
    for name in ("mine", "broken"):
        sys.modules.pop(name, None)
    results.append([there, here, imported])
early_fork_server.end()
print(json.dumps(results))
"""


def test_it_is_checked_in_the_other_process_with_the_same_outcome_and_nothing_is_imported_here(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "mine.py").write_text("class Net:\n    def __init__(self, width: int, depth: int = 2) -> None: ...\n")
    (tmp_path / "broken.py").write_text("raise KeyError('half done')\n")
    cases = [
        ["model=custom", "model._target_=mine.Net", "+model.width=3", "name=${hydra:runtime.choices.model}"],
        ["model=custom", "model._target_=mine.Net", "+model.widht=3", "objective._target_=broken.Loss"],
    ]
    command = [sys.executable, str(tmp_path / "program.py"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    fine, wrong = json.loads(done.stdout)
    assert [there[0] for there, _, _ in (fine, wrong)] == [0, 2]
    assert "did you mean" in wrong[0][1] and "KeyError: 'half done'" in wrong[0][1]
    for there, here, imported in (fine, wrong):
        assert there == here
        assert imported == []
