"""A small convolutional network that a laptop's CPU trains in a minute.

Shapes: B samples, C channels, H height, W width, K classes.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Classify images with three convolutions and two fully connected layers.

    It has no batch normalisation: every sample is computed alone, so the result does not depend on how the global batch is split into ranks
    and micro-batches. It shrinks with strides, not with pooling, whose CUDA backward is not deterministic.

    Args:
        image_shape: (C, H, W), from 8 x 8 pixels up.
        num_classes: K.
        width: channels of the first convolution; the others have twice as many.
        dropout: probability of dropping a unit before the head, in [0, 1).

    Source: in the shape of LeNet-5, LeCun et al. 1998, "Gradient-based learning applied to document recognition".
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, *, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, image_width = image_shape
        self.dropout = dropout
        self.conv1 = nn.Conv2d(channels, width, kernel_size=5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, kernel_size=3, stride=2, padding=1)
        # Two strides of 2, each rounding up: 28 -> 14 -> 7, 8 -> 4 -> 2.
        self.hidden = nn.Linear(2 * width * math.ceil(height / 4) * math.ceil(image_width / 4), 4 * width)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BCHW = self.conv1(images_BCHW).relu()
        features_BCHW = self.conv2(features_BCHW).relu()
        features_BCHW = self.conv3(features_BCHW).relu()
        features_BF = self.hidden(features_BCHW.flatten(1)).relu()
        logits_BK: Tensor = self.head(F.dropout(features_BF, self.dropout, self.training))
        return logits_BK
