"""A small residual net."""

from __future__ import annotations

import torch

from ddp_train.model.mini_resnet import MiniResNet


def test_mini_resnet_blocks_start_as_the_identity() -> None:
    torch.manual_seed(0)
    model = MiniResNet((3, 16, 16), 10, width=8)
    features_BCHW = torch.randn(4, 8, 16, 16).relu()
    torch.testing.assert_close(model.blocks[0](features_BCHW), features_BCHW)


def test_mini_resnet_has_the_parameters_that_its_config_says() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in MiniResNet((3, 32, 32), 10, blocks_per_stage=blocks).parameters()) for blocks in (2, 3)]
    assert [round(size / 1e6, 1) for size in sizes] == [2.8, 4.3]
