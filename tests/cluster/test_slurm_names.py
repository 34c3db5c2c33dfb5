"""Whatever a name, a path or a value is made of, SLURM has it exactly, or the run is refused before; nothing of it is executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.launch.engine.slurm_script import batch_script, sbatch_value, task_script
from ddp_train.launch.spec import Spec
from tests.cluster.slurm import Slurm
from tests.unit.launch.engine.specs import spec

pytestmark = pytest.mark.cluster

NASTY = [
    *(
        "a b",
        " a",
        "a ",
        "a  b",
        "tab\there",
        "line\nend",
        "cr\rx",
        "bell\a",
        "",
        "'",
        '"',
        "''",
        '"a"',
        "'a' 'b'",
        "\\",
        "\\\\",
        "a\\",
        '\\"',
    ),
    *(
        "$HOME",
        "${HOME}",
        "$(touch PWNED)",
        "`touch PWNED`",
        "; touch PWNED",
        "&& touch PWNED",
        "| touch PWNED",
        "> PWNED",
        "* ?",
        "[a-b]",
        "{a,b}",
    ),
    *(
        "~",
        "#",
        "a # b",
        "%j",
        "%%",
        "%A_%a",
        "!",
        "a=b,c=d",
        "--wrap=touch PWNED",
        "-x",
        "é ü 漢 😀",
        "\u202etxt",
        "\x00",
        "x" * 300,
        "(a)",
        "<a>",
    ),
]


def test_there_are_as_many_as_were_promised() -> None:
    assert len(set(NASTY)) >= 40


def test_values_of_options(slurm: Callable[..., Slurm], tmp_path: Path) -> None:
    bed = slurm(1)
    for number, text in enumerate(NASTY):
        one = spec(tmp_path / str(number))
        one.job.config.cluster.slurm.options.update({"comment": text, "hold": True})
        one = Spec(**{**vars(one), "working_directory": str(tmp_path)})
        try:
            script = batch_script([one])
        except ConfigError:
            assert not text.isprintable(), text
            continue
        file = tmp_path / f"{number}.sbatch"
        file.write_text(script)
        job = bed.must("sbatch", "--parsable", str(file))
        assert bed.run("squeue", "--noheader", f"--jobs={job}", "--format=%k").stdout.removesuffix("\n") == text, text
    assert list(tmp_path.rglob("PWNED")) == []


@pytest.mark.cluster_long
def test_paths_and_what_is_run_in_them(slurm: Callable[..., Slurm], tmp_path: Path) -> None:
    """Each in the name of the run folder, of the folder where the command stands, of the interpreter and of a line of cluster.setup."""
    bed = slurm(1)
    jobs: dict[str, tuple[Path, str]] = {}
    for number, text in enumerate(NASTY):
        if not text or "/" in text or "\0" in text or len(text) > 200:
            continue
        run = tmp_path / f"{number}{text}"
        (run / "launch").mkdir(parents=True)
        (run / "logs").mkdir()
        python = run / f"python{text}"
        python.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$PYTHONPATH" "$@"\necho "never: tried"\nexit 1\n')
        python.chmod(0o755)
        one = spec(run, python=str(python))
        one = Spec(**{**vars(one), "working_directory": str(run)})
        try:
            script, task = batch_script([one]), task_script(one)
        except ConfigError:
            assert not text.isprintable() or "\\" in text, text
            continue
        (run / "launch/slurm.sbatch").write_text(script)
        (run / "launch/task.sh").write_text(task)
        jobs[text] = (run, bed.must("sbatch", "--parsable", str(run / "launch/slurm.sbatch")))
    for text, (run, job) in jobs.items():
        bed.wait_for(job, "FAILED", within_s=60)
        log = run / f"logs/slurm-{job}.out"
        assert log.exists(), text
        said = log.read_text().splitlines()
        assert (
            said[0] == str(run)
            and said[1] == f"{run}/launch/code/src:{run}/launch/code"
            and said[-3:] == ["--begins", f"--job={job}", "never: tried"]
        ), (text, said)
    assert list(tmp_path.rglob("PWNED")) == [] and len(jobs) > 30


def test_a_refusal_says_which_key() -> None:
    with pytest.raises(ConfigError, match=re.escape("cluster.slurm.account: is 'a\\nb'")):
        sbatch_value("a\nb", key="cluster.slurm.account")
