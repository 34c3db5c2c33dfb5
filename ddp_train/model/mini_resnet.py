"""A small residual network for images of 32 to 96 pixels.

Shapes: B samples, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class MiniResNet(nn.Module):
    """Classify images with three stages of residual blocks, `width`, `2 * width` and `4 * width` channels.

    Batch normalisation takes its statistics from one micro-batch on one rank: unlike for the other models, the result depends on how the
    global batch is split. Evaluation does not: it uses the running averages.

    Args:
        image_shape: (C, H, W), from 8 x 8 pixels up.
        num_classes: K.
        width: channels of the first stage.
        blocks_per_stage: basic blocks (two 3 x 3 convolutions) in each stage.
        zero_init_residual: start every block as the identity, by a last normalisation scale of 0.

    Source: He et al. 2015, arXiv:1512.03385 (residual blocks; section 4.2 for CIFAR) and arXiv:1502.01852 (initialisation);
        Goyal et al. 2017, arXiv:1706.02677, section 5.1 (zero initial scale).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        width: int = 64,
        blocks_per_stage: int = 2,
        zero_init_residual: bool = True,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(image_shape[0], width), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential()
        channels = width
        for stage, stage_channels in enumerate((width, 2 * width, 4 * width)):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(BasicBlock(channels, stage_channels, stride=stride))
                channels = stage_channels
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock) and zero_init_residual:
                nn.init.zeros_(module.norm2.weight)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BCHW = self.blocks(self.stem(images_BCHW))
        # A mean, not AdaptiveAvgPool2d: that one's CUDA backward is not deterministic.
        logits_BK: Tensor = self.head(features_BCHW.mean(dim=(2, 3)))
        return logits_BK


class BasicBlock(nn.Module):
    """Add two 3 x 3 convolutions to their input; where the shape changes, a 1 x 1 convolution projects the input."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride=stride)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        """Return features, shape [B, out_channels, ceil(H / stride), ceil(W / stride)]."""
        features_BCHW = self.norm1(self.conv1(inputs_BCHW)).relu()
        features_BCHW = self.norm2(self.conv2(features_BCHW)) + self.shortcut(inputs_BCHW)
        outputs_BCHW: Tensor = features_BCHW.relu()
        return outputs_BCHW


def _conv3x3(in_channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)  # the norm that follows has the bias
