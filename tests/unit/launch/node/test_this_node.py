"""Where a machine stands, as its engine's variables say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.launch.job import Job
from ddp_train.launch.node.this_node import rendezvous_under_an_engine
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.network import listen
from tests.unit.parts import checked

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    job = Job(config=checked(), run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=[])
    return Spec(job=job, engine="slurm", processes=(2, 2), min_nodes=2)


def test_a_step_of_slurm_says_all(spec: Spec) -> None:
    first, second = (rendezvous_under_an_engine(spec, {**STEP, "SLURM_NODEID": number}) for number in "01")
    assert (first.node_rank, first.is_first, second.node_rank, second.is_first) == (0, True, 1, False)
    assert first.launch_id == second.launch_id == "7.0.0" and first.hosts == ("node1", "node2") and not first.is_elastic
    assert second.registry_addresses() == ()  # not yet
    assert first.listener is not None
    first.publish()
    port = first.listener.getsockname()[1]
    assert all(found == port for _, found in second.registry_addresses()) and second.registry_addresses()
    assert json.loads((spec.job.run_folder.root / "launch/meeting_7.0.0.json").read_text())["port"] == port
    first.listener.close()


def test_elsewhere_the_engine_says_it(spec: Spec) -> None:
    place = rendezvous_under_an_engine(spec, {"NODE_RANK": "1"}, launch_id="monday", meeting="node0:29400")
    assert (place.node_rank, place.launch_id, place.registry_addresses()) == (1, "monday", (("node0", 29400),))
    assert place.hosts == ()
    job = replace(spec.job, config=checked("cluster=ssh", "cluster.device=cpu", "cluster.processes_per_node=2", "cluster.hosts=[a,b:2]"))
    assert rendezvous_under_an_engine(replace(spec, job=job), {}, node_rank=1, launch_id="monday").hosts == ("a", "b")
    with pytest.raises(ConfigError, match="this machine's number is unknown"):
        rendezvous_under_an_engine(spec, {}, launch_id="monday")
    with pytest.raises(ConfigError, match="machine 2 of 2"):
        rendezvous_under_an_engine(spec, {}, node_rank=2, launch_id="monday")
    with pytest.raises(ConfigError, match="the launch of the run is unknown"):
        rendezvous_under_an_engine(spec, {}, node_rank=0)


def test_a_port_is_taken_once() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])
