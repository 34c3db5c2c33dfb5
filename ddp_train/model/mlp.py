"""A multi-layer perceptron: the smallest model that learns something, for tests and first runs.

Shapes: B samples, C channels, H height, W width, F features, K classes.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Classify images with fully connected layers.

    Args:
        image_shape: (C, H, W).
        num_classes: K.
        width: units in each hidden layer.
        depth: number of hidden layers; 0 is multinomial logistic regression.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, *, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        sizes = [math.prod(image_shape)] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BF = images_BCHW.flatten(1)
        for layer in self.hidden:
            features_BF = layer(features_BF).relu()
        logits_BK: Tensor = self.head(features_BF)
        return logits_BK
