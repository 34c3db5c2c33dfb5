"""A real run with secrets in six places: nothing of them is written, shown or listed; only loopback listens; nobody else can write."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Project

pytestmark = pytest.mark.distributed

SECRETS = {  # planted by an environment variable of that name
    "PLANTED_API_KEY": "planted-environment-1",  # in the environment alone
    "PLANTED_TOKEN": "planted-reference-2",  # by a reference in an override, into an argument of the model
    "PLANTED_DATABASE": "postgres://me:planted-url-3@host/table",  # a URL with a password, by a reference
    "PLANTED_PASSWORD": "planted-exception-4",  # in an exception
    "PLANTED_SECRET": "planted-metric-5",  # in the name of a metric
    "PLANTED_CREDENTIAL": "planted-print-6",  # printed by every rank, and by a loader worker
}
PARTS = """
import logging, os, sys, torch
from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.model.mlp import MLP
from ddp_train.objective.classification import Classification

class Data(SyntheticImages):
    def batch(self, indices):
        print("worker", os.environ["PLANTED_CREDENTIAL"])
        logging.info("noted %s", os.environ["PLANTED_CREDENTIAL"])
        return super().batch(indices)

class Model(MLP):
    def __init__(self, token, url, fails, **others):
        super().__init__(**others)
        assert (token, url) == (os.environ["PLANTED_TOKEN"], os.environ["PLANTED_DATABASE"])
        print("rank", os.environ["PLANTED_CREDENTIAL"], token, url, flush=True)
        logging.info("told %s", os.environ["PLANTED_CREDENTIAL"])
        print(os.environ["PLANTED_CREDENTIAL"], file=sys.stderr, flush=True)
        self.fails, self.steps = fails, 0
    def forward(self, x):
        self.steps += self.training
        if self.fails and self.steps == 3:
            raise RuntimeError("cannot log in with " + os.environ["PLANTED_PASSWORD"])
        return super().forward(x)

class Objective(Classification):
    def metrics(self, sums):
        return {**super().metrics(sums), os.environ["PLANTED_SECRET"]: 1.0}
"""
RUN = [
    *[each for each in TINY if each != "~metrics.tensorboard"],
    *["trainer.max_steps=4", "evaluation.every_steps=2", "data._target_=parts.Data", "loader.num_workers=1", "cluster=cpu"],
    *["model._target_=parts.Model", "objective._target_=parts.Objective"],
    *["+model.token='${oc.env:PLANTED_TOKEN}'", "+model.url='${oc.env:PLANTED_DATABASE}'"],
]


def listeners(folder: Path) -> set[str]:
    """Return the addresses that processes that stand in a folder listen on."""
    addresses = {}
    for kind, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            place, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A":
                words = bytes.fromhex(place.partition(":")[0])
                packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                addresses[f"socket:[{inode}]"] = socket.inet_ntop(family, packed)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder:
                found |= {addresses[target] for file in (process / "fd").iterdir() if (target := os.readlink(file)) in addresses}
        except OSError:
            continue
    return found


def titles(folder: Path) -> str:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder:
                found.append((process / "cmdline").read_text() + (process / "comm").read_text())
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.long)])
def test_secrets_stay_in_the_environment_and_only_loopback_listens(project: Project, fails: bool) -> None:
    project.write("parts.py", PARTS)
    before = os.umask(0)
    try:
        process = project.start(*RUN, f"+model.fails={str(fails).lower()}", env=SECRETS)
    finally:
        os.umask(before)
    heard: set[str] = set()
    seen = ""
    while process.poll() is None:
        heard |= listeners(project.folder)
        seen += titles(project.folder)
        time.sleep(0.05)
    stdout, stderr = process.communicate()
    assert process.returncode == int(fails), stdout + stderr
    assert heard == {"127.0.0.1"}
    run = project.the_run()
    assert ("cannot log in with ***" in stderr) is fails
    assert "rank *** *** ***" in stdout
    first, second = ((run / "logs" / f"rank_0000{rank}.log").read_text() for rank in range(2))
    for log in (first, second):
        assert "worker ***" in log
        assert "loader worker INFO noted ***" in log
        assert "rank *** *** ***" in log
        assert "INFO told ***" in log
    assert "'***': 1.0" in second  # the first one's records are in its files
    assert '"***": 1.0' in (run / "metrics.jsonl").read_text()
    assert "token: ${oc.env:PLANTED_TOKEN}" in (run / "config.yaml").read_text()
    assert (run / "tensorboard").is_dir()
    for secret in ("planted-environment-1", "planted-reference-2", "planted-url-3", *list(SECRETS.values())[3:]):
        assert secret not in stdout + stderr + seen
        for path in project.folder.glob("outputs/**/*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), f"{secret} in {path}"
    for path in project.folder.glob("outputs/**/*"):
        assert not path.stat().st_mode & 0o027, f"{path} has mode {path.stat().st_mode:o}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_run_goes_on_where_that_was_accepted_and_its_restarts_do_not_ask(project: Project) -> None:
    run = project.folder / "outputs/theirs"
    project.run(*TINY, "cluster=cpu", "trainer.max_steps=2", "checkpoint.every_steps=2", "hydra.run.dir=outputs/theirs")
    for path in (run, *run.rglob("*")):
        os.chown(path, 12345, -1)
    words = ["resume", "outputs/theirs", "trainer.max_steps=6", "debug.faults=[{kind: kill, rank: 1, step: 4}]", "cluster.max_restarts=1"]
    refused = project.run(*words)
    assert refused.returncode == 2 and "belongs to another user (uid 12345)" in refused.stderr
    assert "model._target_: ddp_train.model.mlp.MLP" in refused.stderr
    accepted = project.run(*words, "--trust")
    assert accepted.returncode == 0, accepted.output
    assert "killed by signal 9" in accepted.output.lower() or "SIGKILL" in accepted.output
