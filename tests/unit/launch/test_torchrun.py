"""The options that torchrun is started with."""

from __future__ import annotations

from ddp_train.config.cluster import ALONE
from ddp_train.launch.torchrun import rendezvous_options
from tests.unit.config.clusters import found


def test_one_machine_takes_no_fixed_port() -> None:
    assert rendezvous_options(found({"MASTER_PORT": "29500", "MASTER_ADDR": "m"}, nodes=1), join_timeout_s=5) == [*ALONE]


def test_the_options_of_each_rendezvous() -> None:
    elastic = rendezvous_options(found({}, nodes="1:2", rendezvous_endpoint="a:1", node_rank=0), join_timeout_s=5, conf="close_timeout=3")
    assert "--nnodes=1:2" in elastic
    assert elastic[-1].startswith("--rdzv-conf=join_timeout=5,read_timeout=5,last_call_timeout=2,keep_alive_interval=1,")
    assert elastic[-1].endswith(",is_host=1,close_timeout=3")
    static = rendezvous_options(found({}, nodes=2, rendezvous_endpoint="a:1", rendezvous_backend="static", node_rank=1), join_timeout_s=5)
    assert static[-2:] == ["--node-rank=1", "--rdzv-conf=timeout=5"]
