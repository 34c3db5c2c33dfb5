"""The scripts for SLURM: as people read them, and exact or refused for whatever is filled in."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.errors import ConfigError
from ddp_train.launch.engine.slurm_script import batch_script, quoted, sbatch_value, task_script
from ddp_train.launch.spec import Spec
from tests.unit.launch.engine.specs import spec

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/runs/mnist")
WRITES_GOLDEN_FILES = False  # True once, after a change that is meant; then read what git shows

CASES: dict[str, tuple[list[str], dict[str, object]]] = {
    "one_node": ([], {}),
    "gpus": (
        [
            *(
                "cluster.device=cuda",
                "cluster.processes_per_node=4",
                "cluster.nodes=2",
                "cluster.walltime='1-12:00:00'",
                "cluster.grace_s=120",
            ),
            *("cluster.slurm.account=me", "cluster.slurm.partition='gpu,long'", "cluster.slurm.qos=high", "cluster.slurm.reservation=r1"),
            *("cluster.slurm.constraint='a100&ib'", "cluster.slurm.dependency=singleton", "cluster.slurm.exclusive=true"),
            *("+cluster.slurm.options.mem=0", "+cluster.slurm.options.mail-type=END", "+cluster.slurm.options.contiguous=true"),
            "cluster.setup=['module load cuda/12','source /venv/bin/activate']",
        ],
        {"step_s": 2.5, "after": ["17", "18_3"]},
    ),
    "elastic": (["cluster.nodes='2:8'", "cluster.max_restarts=10", "loader.num_workers=3"], {}),
    "pyxis": (["cluster.slurm.container='nvcr.io#nvidia/pytorch:26.01'", "cluster.slurm.container_mounts=['/data','/a:/b']"], {}),
    "apptainer": (
        [
            "cluster.slurm.container=/images/torch.sif",
            "cluster.slurm.container_runtime=apptainer",
            "cluster.device=cuda",
            "cluster.processes_per_node=1",
        ],
        {},
    ),
}


def as_written(case: str) -> Spec:
    overrides, options = CASES[case]
    return spec(RUN, *overrides, **options)


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_those_that_people_have_read(case: str) -> None:
    one = as_written(case)
    for name, text in ((f"{case}.sbatch", batch_script([one])), (f"{case}.task.sh", task_script(one))):
        if WRITES_GOLDEN_FILES:
            (GOLDEN / name).write_text(text)
        assert text == (GOLDEN / name).read_text(), name
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not WRITES_GOLDEN_FILES


def test_several_runs_are_an_array_whose_tasks_are_requeued_alone() -> None:
    specs = [spec(Path(f"/runs/sweep/{number}"), parallel=2) for number in range(6)]
    text = batch_script(specs)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0-5%2\n" in text
    assert 'scontrol requeue "$job" && exit 0' in text
    assert "\njob=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID " in text and '#SBATCH --output="/dev/null"\n' in text
    assert all(f"    /runs/sweep/{number}\n" in text for number in range(6))


STATES = {  # what squeue says, "": nobody answers; whether TERM came; what scontrol returns; the exit code, after so many requests
    "the controller is away for a while": (["", "", "RUNNING None"], "", [1, 1, 0], 0, 3),
    "it answers at once": (["RUNNING None"], "", [0], 0, 1),
    "it refuses": (["RUNNING None"] * 9, "", [1] * 9, 75, 3),
    "the time limit": (["COMPLETING TimeLimit"], "yes", [0], 0, 1),
    "a preemption, until SLURM ends it": (["RUNNING None", "", "RUNNING None", "COMPLETING Preempted"], "yes", [0] * 4, 75, 0),
    "scancel": (["COMPLETING None"], "yes", [0], 75, 0),
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("case", STATES)
def test_a_requeue_is_asked_for_until_slurm_answers(tmp_path: Path, case: str, by_hand: bool) -> None:
    states, stopped, codes, ends_with, requests = STATES[case]
    text = Path("launch/slurm.sbatch").read_text() if by_hand else batch_script([as_written("one_node")])
    tail = text[text.index("# 75: stopped in good order") :]
    (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    stand_ins = """
next() { head -n 1 $1; sed -i 1d $1; }
squeue() { next states; }
scontrol() { echo "$@" >> asked; return $(next codes); }
sleep() { :; }
"""
    script = f"{stand_ins}\njob=7 SLURM_JOB_ID=7 verdict=again code=75 stopped={stopped}\n{tail}"
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert (ran.returncode, asked) == (ends_with, ["requeue 7"] * requests), ran.stderr


@pytest.mark.parametrize("name", ["signal", "output", "array", "time", "partition", "wrap", "het-group", "a b", "x=1 --wrap", "--comment"])
def test_an_option_that_is_ours_or_none_is_refused(name: str) -> None:
    one = as_written("one_node")
    one.job.config.cluster.slurm.options[name] = "1"
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.options\."):
        batch_script([one])


@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_an_option_has_one_value(value: object) -> None:
    one = as_written("one_node")
    one.job.config.cluster.slurm.options["comment"] = value
    with pytest.raises(ConfigError, match="comment"):
        batch_script([one])


@settings(deadline=None)
@given(st.text())
def test_a_value_stays_on_its_line_or_is_refused(text: str) -> None:
    try:
        value = sbatch_value(text, key="k")
    except ConfigError:
        assert not text.isprintable()
        return
    assert value.isprintable() and value[0] == value[-1] == '"'
    assert re.fullmatch(r'(?:[^"\\]|\\["\\])*', value[1:-1]), value
    assert re.sub(r"\\(.)", r"\1", value[1:-1]) == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_path_is_one_word_of_one_line_for_the_shell(text: str) -> None:
    try:
        word = quoted(text)
    except ConfigError:
        assert "\n" in text or "\0" in text
        return
    assert "\n" not in word


@pytest.mark.parametrize("folder", ["/a b", "/a'b", '/a"b', "/a$(touch /tmp/x)b", "/a;b", "/a%jb", "/a`b`", "/é", "/a*b", "/a#b", "/~"])
def test_a_path_is_the_same_in_both_scripts_whatever_it_is_called(folder: str, tmp_path: Path) -> None:
    run = tmp_path / folder[1:]
    (run / "launch").mkdir(parents=True)
    one = spec(run)
    (run / "launch/task.sh").write_text(task_script(Spec(**{**vars(one), "working_directory": str(run), "code": None})))
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    one = Spec(**{**vars(one), "working_directory": str(run), "engine_options": {"python": str(fake)}})
    (run / "launch/task.sh").write_text(task_script(one))
    lines = batch_script([one]).splitlines()
    script = [line for line in lines if line.strip().startswith(("run=", "logs="))]
    script += ['bash "$run/launch/task.sh" verdict "$run"', 'echo "$logs"']
    ran = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, check=True, cwd="/")
    pattern = str(run).replace("%", "%%")
    assert ran.stdout.splitlines() == [str(run), "-m", "ddp_train", "verdict", str(run), pattern]


def test_a_time_limit_that_is_all_warning_is_refused() -> None:
    enough, too_short = (spec(RUN, f"cluster.walltime={minutes}", "cluster.grace_s=30") for minutes in (2, 1))
    assert "#SBATCH --time=0-00:02:00\n#SBATCH --signal=USR1@60\n" in batch_script([enough])
    with pytest.raises(ConfigError, match="warn the run 60 s before"):
        batch_script([too_short])


def test_a_path_with_which_slurm_would_name_its_log_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains a backslash"):
        batch_script([spec(Path("/runs/a\\b"))])


def test_a_setup_line_that_fails_and_a_missing_interpreter_are_named(tmp_path: Path) -> None:
    for overrides, said in (
        (["cluster.setup=['true','false || module load x','true']"], "cluster.setup failed: false || module load x"),
        (["cluster.python=/no/python"], "/no/python is not on this machine; set cluster.python"),
    ):
        one = Spec(**{**vars(spec(tmp_path, *overrides)), "working_directory": str(tmp_path)})
        ran = subprocess.run(["bash", "-c", task_script(one)], capture_output=True, text=True)
        assert ran.returncode == 78 and said in ran.stderr


def test_what_setup_prints_is_no_answer(tmp_path: Path) -> None:
    one = spec(tmp_path, "cluster.setup=['echo noise','export A=5']", "cluster.python=/bin/echo")
    ran = subprocess.run(
        ["bash", "-c", task_script(Spec(**{**vars(one), "working_directory": str(tmp_path)}))], capture_output=True, text=True
    )
    assert ran.stdout == "-m ddp_train\n" and ran.stderr == "noise\n"


@pytest.mark.parametrize("can", [True, False])
def test_a_signal_waits_until_python_listens_where_env_can_hold_it(tmp_path: Path, can: bool) -> None:
    python, env = tmp_path / "python", tmp_path / "env"
    python.write_text('#!/bin/bash\necho "$@ $DDP_TRAIN_HOLDS"; grep ^SigBlk /proc/$$/status\n')
    env.write_text("#!/bin/bash\nexit 125\n")
    for program in (python, env):
        program.chmod(0o755)
    one = Spec(**{**vars(spec(tmp_path, f"cluster.python={python}")), "working_directory": str(tmp_path)})
    (tmp_path / "task.sh").write_text(task_script(one))
    path = "/usr/bin:/bin" if can else f"{tmp_path}:/usr/bin:/bin"
    ran = subprocess.run(["bash", str(tmp_path / "task.sh"), "node", "x"], capture_output=True, text=True, env={"PATH": path}, check=True)
    said, blocked = ran.stdout.splitlines()
    assert said == "-m ddp_train node x "
    assert int(blocked.split()[1], 16) & 0x4200 == (0x4200 if can else 0)  # TERM and USR1


def test_a_secret_is_a_variable_of_the_shell_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    text = task_script(spec(RUN, "cluster.setup=['export WANDB_API_KEY=${oc.env:HF_TOKEN}']"))
    assert "\nexport WANDB_API_KEY=${HF_TOKEN}\n" in text and "hf_0123456789" not in text
    for word in ("cluster.slurm.account='${oc.env:HF_TOKEN}'", "+cluster.slurm.options.comment='${oc.env:HF_TOKEN}'"):
        with pytest.raises(ConfigError, match="takes the secret HF_TOKEN"):
            batch_script([spec(RUN, word)])
    with pytest.raises(ConfigError, match="would contain a secret"):
        task_script(replace(spec(RUN), working_directory="/home/hf_0123456789"))
