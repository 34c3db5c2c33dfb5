"""Who leads a sweep's ranks decides which of them serve the next job."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import HashStore

from ddp_train.distributed.attempt import Attempt
from ddp_train.job import Job
from ddp_train.rank.sweep_member import Announcement, Leader
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked


class IdleLeader(Leader):
    """Announces jobs, and runs none."""

    def begin(self, announced: Announcement) -> None:
        generations.append(announced.generation)


generations: list[int] = []


def test_ranks_are_renewed_when_what_a_process_reads_once_changes(tmp_path: Path) -> None:
    leader = IdleLeader(Attempt(store=HashStore(), prefix="", remembered=None), rank=0, size=1)
    for overrides in (
        ["seed=1"],
        ["seed=2"],
        ["deterministic=true"],
        ["deterministic=true", "seed=2"],
        [],
        ["+cluster.env.NCCL_ALGO=Ring"],
    ):
        leader.start(Job(config=checked(*overrides), run_folder=RunFolder(tmp_path), command=[], overrides=[], in_sweep=True), fresh=False)
    assert generations == [1, 1, 2, 2, 3, 4]
