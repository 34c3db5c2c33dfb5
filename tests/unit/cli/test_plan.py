"""`ddp-train plan`: what it shows, and that it leaves everything as it was."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_train.cli import main as app
from ddp_train.cli import plan_text
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, WRONG_INPUT
from ddp_train.launch.engine.engine import Submission
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import mark_cancelled
from tests.conftest import TINY
from tests.fake_runner import FakeRunner
from tests.unit.cli.test_plan_text import run as past_run
from tests.unit.parts import checked

Plan = Callable[..., str]


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything below a folder, with its size and when it was changed."""
    found = {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}
    return {**found, ".": (0, folder.stat().st_mtime_ns)}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Give what runs `ddp-train plan` in an empty folder, checks that it changes nothing there, and returns what it shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def show(*words: str, code: int = DONE, base: list[str] = TINY) -> str:
        monkeypatch.setattr(sys, "argv", ["ddp-train", "plan", *base, *words])
        before = tree(tmp_path)
        assert app.run(sys.argv[1:], FakeRunner(lambda job: 99)) == code
        assert tree(tmp_path) == before
        said = capsys.readouterr()
        return said.out if code == DONE else said.err

    return show


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let another process hold a folder while the block runs."""
    program = f"import sys; from pathlib import Path; from ddp_train.system.folder_lock import lock; lock(Path({str(folder)!r}), key='')"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; print(flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield


def fact(shown: str, label: str) -> list[str]:
    """Return the lines behind a label."""
    lines = shown.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"{label:<9}"))
    rest = lines[start + 1 :]
    more = next((place for place, line in enumerate(rest) if not line.startswith(" " * 9)), len(rest))
    return [line[9:] for line in [lines[start], *rest[:more]]]


def test_it_says_what_runs_how_large_it_is_and_how_it_starts(plan: Plan) -> None:
    shown = plan("cluster=cpu", "optimizer.lr=0.5", "trainer.max_steps=30", "trainer.max_epochs=null")
    command, said = fact(shown, "plan")
    assert command.startswith("ddp-train model=mlp model.width=16 ") and "Nothing is started or written" in said
    assert fact(shown, "run")[0].startswith("outputs/default/20") and "a new run" in fact(shown, "run")[0]
    assert "optimizer.lr=0.5" in shown and "instead of 0.001 (conf/optimizer/adamw.yaml)" in shown
    assert "model=mlp" in shown and "instead of convnet" in shown and "~metrics.tensorboard" in shown
    assert fact(shown, "ranks")[0] == "2 on cpu"
    config = checked("cluster.processes_per_node=2")
    assert fact(shown, "batch") == [str(config.batch), *config.batch_notes()]
    assert fact(shown, "model")[0].startswith("MLP, ") and "parameters, all trained" in fact(shown, "model")[0]
    assert fact(shown, "steps") == ["30 (10 per epoch of 640 samples)"]
    assert "at most 2 (keep_last) + 1 (one that is written) = 3 at a time, " in fact(shown, "saves")[1]
    assert fact(shown, "tests") == ["after every epoch, and at the end"]
    assert fact(shown, "time") == ["not known: no earlier run of this name had this model, data and precision"]
    (agent, *_) = fact(shown, "agent")
    assert "--nproc-per-node=2 --max-restarts=0 -m ddp_train" in agent


def test_a_program_gets_the_same_as_json(plan: Plan) -> None:
    first, *others = json.loads(plan("cluster=cpu", "--json"))["headings"]
    assert [fact["label"] for fact in first["facts"]][:2] == ["plan", "run"]
    labels = {fact["label"] for part in others for fact in part["facts"]}
    assert {"batch", "model", "steps", "saves", "agent"} <= labels and all(part["heading"] for part in others)


def test_sixteen_machines_get_a_line_each_that_differs_by_its_number(plan: Plan) -> None:
    words = ["cluster=machines", "cluster.nodes=16", "cluster.processes_per_node=8", "cluster.rendezvous_endpoint=node0:29400"]
    shown = plan(*words, "cluster.device=cpu", "cluster.node_rank=3", "+extra.note='a b'")
    first, others = fact(shown, "type")
    command = ["ddp-train", *TINY, *words, "cluster.device=cpu", "+extra.note='a b'"]
    assert first == f"{shlex.join([*command, 'cluster.node_rank=0'])}   on the machine of node0:29400"
    assert others == f"{shlex.join([*command, 'cluster.node_rank=N'])}   on each other one, N from 1 to 15"
    assert fact(shown, "ranks")[0] == "128 on cpu: 16 machines x 8"


def test_a_machine_that_knows_its_number_by_its_environment_types_the_same(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    (line,) = fact(plan("cluster=machines"), "type")
    assert line.endswith("cluster=machines   on each machine; its number comes from the environment, and is 1 here")


def test_mistakes_are_those_of_the_run(plan: Plan) -> None:
    said = plan("trainer.max_stepz=3", "seed=abc", code=WRONG_INPUT)
    assert "trainer.max_stepz" in said and "did you mean trainer.max_steps=3" in said and "seed" in said
    assert "no option 'resnet'" in plan("model=resnet", code=WRONG_INPUT)
    assert "--multirunn is not an option" in plan("--multirunn", code=WRONG_INPUT)
    assert "scheduler.warmup_steps" in plan("scheduler.warmup_steps=9999", code=WRONG_INPUT)  # which only the data tells


def test_the_time_follows_from_the_newest_run_of_the_kind(plan: Plan, tmp_path: Path) -> None:
    base = ["cluster=cpu", "cluster.processes_per_node=1", "trainer.max_steps=36000", "trainer.max_epochs=null"]
    past_run(tmp_path / "outputs/default/one", step_ms=100)
    said = fact(plan(*base), "time")
    assert said[0].startswith("about 60 min for 36,000 steps: 100 ms a step in outputs/default/one, the newest run")
    assert "which is enough" in "".join(fact(plan(*base, "cluster.walltime=120"), "time"))
    short = "".join(fact(plan(*base, "cluster.walltime=13", "cluster.grace_s=60"), "time"))
    assert "it saves and stops after 12 min, which is too short: the run has to be started 5 times" in short


def test_a_folder_that_the_run_would_be_refused_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    assert "is not an empty folder" in plan("hydra.run.dir=full", code=WRONG_INPUT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(checked("optimizer.lr=0.7").yaml({"model.num_classes": 10}))
    assert "optimizer.lr: 0.7 -> 0.001" in plan("hydra.run.dir=run", code=WRONG_INPUT)
    shown = plan("hydra.run.dir=run", "optimizer.lr=0.7", "cluster=cpu", "cluster.processes_per_node=1")
    assert fact(shown, "run") == ["run   (the run there continues from the start)"]
    with working_in(tmp_path / "run"):
        assert "another run is working in" in plan("hydra.run.dir=run", "optimizer.lr=0.7", code=WRONG_INPUT)


def test_what_it_waits_for_is_shown(plan: Plan, tmp_path: Path) -> None:
    past_run(tmp_path / "first")
    assert "after: local starts this run at once" in plan("after=first", "init_from=first", code=WRONG_INPUT)
    Submission(engine="slurm", id="7").write(RunFolder(tmp_path / "first"))
    shown = plan(*SLURM, "after=first", "init_from=first")
    assert fact(shown, "after") == ["first   (submitted, not running)"]
    assert fact(shown, "weights") == ["first   (chosen when the run begins)"]
    mark_cancelled(RunFolder(tmp_path / "first"))
    assert "first will not finish: cancelled" in plan(*SLURM, "after=first", code=ENVIRONMENT_REFUSES)


def test_the_jobs_of_a_sweep_are_listed(plan: Plan) -> None:
    shown = plan("-m", "optimizer.lr=0.1,0.01", "model.width=8,16,32", "sweep.parallel_jobs=2", "cluster=cpu")
    assert fact(shown, "sweep")[0].startswith("outputs/default/sweeps/20")
    jobs = fact(shown, "jobs")
    assert jobs[0] == "6, 2 at a time; after one that fails: sweep.on_failure=continue"
    assert jobs[1].split()[:3] == ["job", "model.width", "optimizer.lr"] or jobs[1].split()[:3] == ["job", "optimizer.lr", "model.width"]
    assert jobs[7].split()[0] == "5" and jobs[7].endswith("5")
    assert jobs[8] == "below is job 0"
    assert "optimizer.lr=0.1 " in shown
    assert "hydra.sweep.subdir: two jobs" in plan("-m", "seed=1,2", "hydra.sweep.subdir=same", code=WRONG_INPUT)


def test_what_a_sweep_would_be_refused_is_refused(plan: Plan, tmp_path: Path) -> None:
    ssh = ["-m", "seed=1,2", "cluster=ssh", "cluster.hosts=[a,b]", "cluster.device=cpu"]
    assert "sweep.parallel_jobs" in plan(*ssh, "sweep.parallel_jobs=2", code=WRONG_INPUT)
    assert "hydra/launcher=ddp_train" in plan("-m", "seed=1,2", "hydra/launcher=basic", code=WRONG_INPUT)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    assert "is not an empty folder" in plan("-m", "seed=1,2", "hydra.sweep.dir=full", code=WRONG_INPUT)
    (tmp_path / "full/mine.txt").unlink()
    with working_in(tmp_path / "full"):
        assert "another run is working in" in plan("-m", "seed=1,2", "hydra.sweep.dir=full", code=WRONG_INPUT)


def test_a_sweeper_that_decides_as_it_goes_is_named(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLALCHEMY_SILENCE_UBER_WARNING", "1")
    shown = plan("-m", "hydra/sweeper=optuna", "optimizer.lr=interval(0.001,0.1)", "cluster=cpu")
    assert fact(shown, "jobs") == ["hydra/sweeper=optuna chooses their values during the sweep; below is a job without them"]


def test_secrets_and_control_characters_are_not_shown(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    shown = plan("+cluster.env.WANDB_API_KEY='${oc.env:WANDB_API_KEY}'", "+extra.note='\x1b[31mred\n'", "cluster=cpu")
    assert "abcdef0123456789" not in shown and "${oc.env:WANDB_API_KEY}" in shown
    assert "\x1b" not in shown and "\\x1b[31mred" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_users_model_is_imported_and_nothing_is_written_beside_it(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_model.py").write_text("from torch import nn\n\n\nclass Mine(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    keys = ["~model.image_shape", "~model.num_classes", "~model.width", "~model.depth"]
    words = ["model=mlp", *keys, "model._target_=planned_model.Mine", "+model.in_features=3", "+model.out_features=4"]
    assert fact(plan(*words, base=[]), "model") == ["Mine, 16 parameters, all trained"]


def test_help_says_what_it_is_for(plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", "plan", "--help"])
    assert app.run(sys.argv[1:], FakeRunner(lambda job: 99)) == DONE
    assert capsys.readouterr().out.startswith("ddp-train plan key=value")
    assert os.listdir() == []


SLURM = ["cluster=slurm", "cluster.nodes=16", "cluster.processes_per_node=8", "cluster.walltime=12:00:00", "cluster.slurm.partition=gpu"]


def test_a_job_of_slurm_is_shown_as_it_would_be_submitted(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    shown = plan(*SLURM)
    (submit,) = fact(shown, "runs")
    script = Path(submit.removeprefix("sbatch --parsable "))
    assert script.is_relative_to(tmp_path / "outputs/default") and script.name == "slurm.sbatch"
    for line in ("#SBATCH --nodes=16", '#SBATCH --partition="gpu"', "#SBATCH --time=0-12:00:00", "#SBATCH --gpus-per-node=8"):
        assert f"  | {line}" in shown.splitlines()
    assert fact(shown, "file")[0].endswith("/launch/slurm.sbatch") and "/launch/task.sh" in shown
    assert "source files" in fact(shown, "code")[0] and "/launch/spec.json" in fact(shown, "spec")[0]
    assert fact(shown, "ranks") == ["128 on cuda: 16 machines x 8"]


def test_what_slurm_would_refuse_is_refused(plan: Plan, tmp_path: Path) -> None:
    assert "cluster.slurm.options.nodes: cannot be set here" in plan(*SLURM, "+cluster.slurm.options.nodes=3", code=WRONG_INPUT)
    assert "cluster.processes_per_node" in plan("cluster=slurm", code=WRONG_INPUT)
    past_run(tmp_path / "first")
    assert "is not done, and is not a job of slurm" in plan(*SLURM, "after=first", code=WRONG_INPUT)


def test_in_an_allocation_nothing_is_submitted(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    shown = plan(*SLURM)
    assert "it runs at once in the allocation (job 7)" in fact(shown, "step")[0] and "\nruns " not in shown


def test_jobs_of_a_sweep_on_slurm_are_one_array(plan: Plan) -> None:
    shown = plan("-m", *SLURM, "seed=1,2,3")
    assert "  | #SBATCH --array=0-2" in shown
    assert "2 more task.sh, one for each job" in fact(shown, "files")[0]
    assert len(fact(shown, "runs")) == 1


def test_machines_by_ssh_have_a_script_and_a_call_each(plan: Plan, tmp_path: Path) -> None:
    shown = plan("cluster=ssh", "cluster.hosts=[a,b:4,c]", "cluster.device=cpu", "trainer.global_batch_size=64")
    assert fact(shown, "ranks") == ["8 on cpu: 2 + 4 + 2, one number for each machine"]
    calls = fact(shown, "runs")
    assert len(calls) == 3 and all(call.startswith("ssh -o ") for call in calls) and " b " in calls[1]
    assert fact(shown, "file")[0].endswith("/launch/ssh_0.sh") and fact(shown, "files") == ["2 more ssh_N.sh, one for each machine"]


def test_a_secret_in_the_scripts_is_not_shown(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "abcdef0123456789")
    shown = plan(*SLURM, "'cluster.setup=[\"login ${oc.env:HUB_TOKEN}\"]'".strip("'"))
    assert "abcdef0123456789" not in shown and "  | login ${HUB_TOKEN}" in shown


NASTY = [
    *(
        "a b",
        "it's",
        'say "x"',
        "$HOME",
        "`id`",
        "$(id)",
        "a;b",
        "a&b",
        "a|b",
        "a>b",
        "*",
        "?",
        "~",
        "!x",
        "#x",
        "a\\b",
        "\\",
        "%s %%",
        "{a,b}",
    ),
    *(
        "[x]",
        "a\nb",
        "a\tb",
        "\x1b[31mred",
        "\x07",
        "\r",
        "\x00".replace("\x00", "\x01"),
        "\u202egnp",
        "日本",
        "é",
        "-x",
        "--",
        "=",
        "'",
        '"',
    ),
    *("<a>", "a=b=c", "[bold]x[/]", ":smile:", "\udcff", ""),
]


def test_nasty_strings_come_back_from_a_shell_and_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    printable = [text for text in NASTY if text.isprintable()]
    line = shlex.join(printable)
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert [os.fsdecode(word) for word in told.split(b"\0")[:-1]] == printable
    screen = plan_text.Screen()
    screen.table([(text, "x") for text in NASTY])
    screen.fact("all", line)
    screen.block("\n".join(NASTY))
    screen.show()
    shown = capsys.readouterr().out
    assert all(each.isprintable() for each in shown.split("\n"))
    assert line in shown and "[bold]x[/]" in shown and ":smile:" in shown


def test_nasty_names_in_a_configuration_are_shown_and_not_obeyed(plan: Plan, tmp_path: Path) -> None:
    folder = "a 'b' $(touch pwned) `touch pwned`"
    shown = plan(f'hydra.run.dir="{folder}"', "+cluster.env.X='$(touch pwned); \x1b[2J'", "cluster=cpu")
    assert fact(shown, "run")[0].startswith(shlex.quote(folder))
    assert all(line.isprintable() for line in shown.splitlines())
