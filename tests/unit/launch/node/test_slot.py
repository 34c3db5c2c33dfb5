"""Where a machine stands, as its engine's variables say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.launch.job import Job
from ddp_train.launch.node.slot import listen, slot_under_an_engine
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    job = Job(config=checked(), run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=[])
    return Spec(job=job, engine="slurm", processes=(2, 2), min_nodes=2)


def test_a_step_of_slurm_says_all(spec: Spec) -> None:
    first, second = (slot_under_an_engine(spec, {**STEP, "SLURM_NODEID": number}) for number in "01")
    assert (first.index, first.is_first, second.index, second.is_first) == (0, True, 1, False)
    assert first.launch == second.launch == "7.0.0" and first.names == ("node1", "node2") and not first.is_elastic
    assert second.registry_addresses() == ()  # not yet
    assert first.listener is not None
    first.publish()
    port = first.listener.getsockname()[1]
    assert all(found == port for _, found in second.registry_addresses()) and second.registry_addresses()
    assert json.loads((spec.job.run_folder.root / "launch/meeting_7.0.0.json").read_text())["port"] == port
    first.listener.close()


def test_elsewhere_the_engine_says_it(spec: Spec) -> None:
    place = slot_under_an_engine(spec, {"NODE_RANK": "1"}, launch="monday", meeting="node0:29400")
    assert (place.index, place.launch, place.registry_addresses()) == (1, "monday", (("node0", 29400),))
    assert place.names == ()
    job = replace(spec.job, config=checked("cluster=ssh", "cluster.device=cpu", "cluster.processes_per_node=2", "cluster.hosts=[a,b:2]"))
    assert slot_under_an_engine(replace(spec, job=job), {}, index=1, launch="monday").names == ("a", "b")
    with pytest.raises(ConfigError, match="which machine"):
        slot_under_an_engine(spec, {}, launch="monday")
    with pytest.raises(ConfigError, match="machine 2 of 2"):
        slot_under_an_engine(spec, {}, index=2, launch="monday")
    with pytest.raises(ConfigError, match="which start"):
        slot_under_an_engine(spec, {}, index=0)


def test_a_port_is_taken_once() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])
