"""A batch comes out of shared memory as it was put in, whatever was there before."""

from __future__ import annotations

import torch

from ddp_train.loader.shared_batch import SharedBatch


def test_batches_of_any_size_and_structure_come_out_as_they_went_in() -> None:
    ours = SharedBatch()
    theirs = SharedBatch(ours.descriptor)  # as the other process has it
    for numel in (10, 100_000, 3):
        batch = {"images": torch.rand(numel, 3)[:, ::2], "labels": [torch.arange(numel), torch.empty(0, 4)], "names": ("a", numel)}
        found = theirs.copy_out(ours.put(batch), pin_memory=False)
        assert found["images"].equal(batch["images"])
        assert found["labels"][0].equal(batch["labels"][0])
        assert found["labels"][1].shape == (0, 4)
        assert found["names"] == batch["names"]
        ours.put({"images": torch.zeros(numel, 3)})
        assert found["images"].equal(batch["images"])  # a copy
    ours.close()
