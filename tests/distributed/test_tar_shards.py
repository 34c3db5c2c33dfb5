"""Tar shards in a real run."""

from __future__ import annotations

import pytest

from tests.conftest import Project, metrics
from tests.unit.data_files import write_image_tree, write_shards_of

pytestmark = pytest.mark.distributed
pytest.importorskip("PIL.Image")


@pytest.mark.long
def test_shards_give_the_run_that_the_same_files_in_folders_give(project: Project) -> None:
    write_image_tree(project.folder / "images", classes=("a", "b", "c"), per_class=15, size=(8, 8), suffix=".jpg")
    for split in ("train", "test"):
        write_shards_of(project.folder / "images", project.folder / "shards", split=split, per_shard=20)
    for data, root in (("image_folder", "images"), ("tar_shards", "shards")):
        done = project.run(
            f"data={data}",
            f"data.root={root}",
            "loader.num_workers=2",
            "data.flip=true",
            "loader.micro_batch_size=5",  # 45 samples: the last global batch of an epoch has 5
            "model=mlp",
            "model.width=16",
            "trainer.max_epochs=2",
            "trainer.log_every_steps=1",
            "~metrics.tensorboard",
            "cluster=cpu",
            "cluster.processes_per_node=2",
            f"hydra.run.dir=outputs/{data}",
        )
        assert done.returncode == 0, done.output
    in_folders, in_tars = (metrics(project.folder / "outputs" / data) for data in ("image_folder", "tar_shards"))
    assert [record["loss"] for record in in_tars] == [record["loss"] for record in in_folders]
    assert [record.get("accuracy") for record in in_tars] == [record.get("accuracy") for record in in_folders]
    logs = [(project.folder / f"outputs/tar_shards/logs/rank_0000{rank}.log").read_text() for rank in range(2)]
    assert logs[0].count("indexing 3 of 3 tars") == 2  # train and test, by the first rank alone
    assert "indexing" not in logs[1]
