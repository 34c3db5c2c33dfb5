"""The client begins when every machine is ready, shows what they print, and ends as they do. Here each machine is a bash on this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FAILED, INTERRUPTED, TERMINATED, WRONG_INPUT
from ddp_train.launch.engine.ssh_client import Remote, preamble, run_client
from ddp_train.launch.engine.ssh_remote import MARK, READY
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.process import fork
from tests.conftest import wait_for

READS = f"""
printf '{READY}\\n'
while read -r what which; do case $what in
    go) echo "$which began" ;;
    signal) echo "signal $which"; exit 0 ;;
esac; done
echo "the line ended"
"""


def remote(host: str, script: str) -> Remote:
    return Remote(host=host, command=["bash"], script=f"{script}\n")


def run(folder: Path, *scripts: str, least: int | None = None, stop: int | None = None) -> tuple[int, list[str]]:
    """Run a client, and return its exit code and the lines that it showed."""
    (folder / "launch").mkdir(exist_ok=True)
    shown = folder / "shown"
    remotes = [remote(f"host{index}", script) for index, script in enumerate(scripts)]

    def client() -> int:
        sys.stdout = sys.stderr = shown.open("w")  # pytest's own lead elsewhere
        return run_client(RunFolder(folder), remotes, least=len(scripts) if least is None else least)

    child = fork(client)
    if stop is not None:
        wait_for(lambda: shown.exists() and shown.read_text().count("began") == len(scripts), 20)
        child.signal(stop)
    return child.wait(), shown.read_text().splitlines()


def test_every_machine_begins_with_the_same_launch_id_and_stops_with_the_signal(tmp_path: Path) -> None:
    code, shown = run(tmp_path, READS, READS, stop=signal.SIGTERM)
    assert shown.pop().endswith("starts again: nothing is saved")  # no rank was there to save anything
    words = {line.removeprefix("[host1] ").split()[0] for line in shown if line.endswith("began")}
    assert len(words) == 1
    assert sorted(shown) == sorted(
        [f"{word} began" for word in words] + [f"[host1] {word} began" for word in words] + ["[host1] signal 15", "signal 15"]
    )
    assert code == TERMINATED
    assert list((tmp_path / "launch").iterdir()) == []


def test_a_second_stop_ends_the_node_programs_at_once(tmp_path: Path) -> None:
    assert "signal 9" in run(tmp_path, READS, stop=signal.SIGQUIT)[1]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"printf '{MARK}no does not see it; fix: cd\\n'; exit 78", "host1 does not see it\n  fix: cd"),
        (f"echo oh dear >&2; printf '{MARK}no failed in setup; fix: try\\n'; exit 78", "host1 failed in setup: oh dear"),
        ("echo no route to host >&2; exit 255", "host1 cannot be reached by ssh: no route to host"),
        ("echo 'a word of the day'; exit 3", "host1 exited with code 3 before the run began: a word of the day"),
    ],
)
def test_nothing_begins_where_one_machine_cannot_take_part(tmp_path: Path, script: str, said: str) -> None:
    code, shown = run(tmp_path, READS, script)
    text = "\n".join(shown)
    assert code == ENVIRONMENT_REFUSES
    assert (
        said in text
        and "fix:" in text
        and text.endswith("nothing was started")
        and " began" not in text.replace("run began", "")
        and "Traceback" not in text
    )


def ends_with(code: int) -> str:
    return f"printf '{READY}\\n'; while read -r what which; do [ $what = go ] && exit {code}; done"


@pytest.mark.parametrize(
    ("codes", "least", "expected"),
    [
        ((0, 0, 0), 3, DONE),
        ((FAILED, FAILED, FAILED), 3, FAILED),
        ((0, FAILED, 0), 3, FAILED),
        ((0, FAILED, 0), 2, DONE),  # a machine that was lost, of a run that goes on
        ((FAILED, WRONG_INPUT, FAILED), 3, WRONG_INPUT),
        ((255, 0, 0), 3, DONE),  # its line was lost; the others know how it went
        ((255, 255), 2, FAILED),
    ],
)
def test_the_exit_code_is_the_runs(tmp_path: Path, codes: tuple[int, ...], least: int, expected: int) -> None:
    assert run(tmp_path, *map(ends_with, codes), least=least)[0] == expected


@pytest.mark.parametrize("ended", [ENVIRONMENT_REFUSES, FAILED, 137])
def test_the_others_are_stopped_where_the_program_of_a_machine_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    monkeypatch.setattr("ddp_train.launch.engine.ssh_client._ENDS_ALONE_S", 0.5)
    code, shown = run(tmp_path, READS, ends_with(ended))
    assert code == ended
    assert "signal 15" in shown


def test_a_stop_before_all_are_ready_begins_nothing(tmp_path: Path) -> None:
    for number, expected in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)):
        folder = tmp_path / str(number)
        (folder / "launch").mkdir(parents=True)
        mark = folder / "reached"
        child = fork(lambda mark=mark, folder=folder: run_client(RunFolder(folder), [remote("a", f"touch {mark}; sleep 5")], least=1))  # type: ignore[misc]
        wait_for(mark.exists, 20)
        child.signal(number)
        assert child.wait() == expected


NASTY = [
    *(
        "",
        " ",
        "  two  ",
        "a b",
        "'",
        "''",
        '"',
        "\\",
        "\\\\",
        "\\n",
        "\n",
        "a\nb",
        "\n\n",
        "\t",
        "\r",
        "`id`",
        "$(id)",
        "$HOME",
        "${HOME}",
        "$",
    ),
    *(
        "!",
        "!!",
        "*",
        "?",
        "[a-z]",
        "~",
        "#",
        "# no comment",
        "; id",
        "& id",
        "| id",
        "> file",
        "< file",
        "{a,b}",
        "%s",
        "-n",
        "--",
        "=",
        "é",
        "日本",
    ),
    *("\udcff", "\x01", "\x1b[31m", "\x7f", "EOF", "'\"'\"'", "exit 1", "a\\", "\\'", "x" * 70000),
]


def test_variables_arrive_as_they_are() -> None:
    environment = {f"NASTY_{number}": text for number, text in enumerate(NASTY)}
    code = f"import os; os.write(1, b'\\0'.join(os.environb[b'NASTY_' + str(n).encode()] for n in range({len(NASTY)})))"
    script = preamble(environment, "3f2a") + f'[ "$launch_id" = 3f2a ] && exec python3 -c "{code}"\n'.encode()
    done = subprocess.run(["bash"], input=script, capture_output=True, check=True)
    assert done.stderr == b""
    assert done.stdout.split(b"\0") == [os.fsencode(text) for text in NASTY]


def test_what_tells_of_this_machine_or_login_stays_here() -> None:
    mine = {
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/x",
        "SLURM_JOB_ID": "1",
        "RANK": "0",
        "BASH_FUNC_x%%": "() { id; }",
        "PATH": "/venv/bin",
        "NCCL_DEBUG": "INFO",
    }
    assert preamble(mine, "w").decode() == "export NCCL_DEBUG=INFO\nexport PATH=/venv/bin\nlaunch_id=w\n"
