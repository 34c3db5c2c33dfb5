"""The mean over views of an image, in evaluation alone."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.objective.classification import Classification
from ddp_train.objective.views import Views


class Linear(nn.Module):
    """Logits that are linear in the pixels, beside which there is something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.randint(-8, 8, (3, 1 * 4 * 5)) / 8
        self.calls = 0

    def forward(self, pixels: Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        return pixels.flatten(1) @ self.weights.T * scale, torch.zeros(())


IMAGES = torch.arange(40.0).view(2, 1, 4, 5) / 16  # sums of them are exact
LABELS = torch.tensor([1, 2])


def mean_of(model: Linear, weighed: list[tuple[Tensor, float]]) -> Tensor:
    return torch.stack([weight * model(view)[0] for view, weight in weighed]).sum(dim=0)


def views() -> dict[str, list[tuple[Tensor, float]]]:
    rows, columns = [1, 0, 1, 2, 3, 2], [1, 0, 1, 2, 3, 4, 3]  # mirrored at the border
    padded = IMAGES[:, :, rows][:, :, :, columns]
    moved = (padded[:, :, :4, :5], padded[:, :, 2:, 2:])
    both = [(IMAGES, 0.25), (IMAGES.flip(3), 0.25)]
    return {
        "mirror": [(view, 2 * weight) for view, weight in both],
        "mirror_translate": both + [(view.flip(3) if is_flipped else view, 0.125) for view in moved for is_flipped in (False, True)],
    }


@pytest.mark.parametrize("kind", ["mirror", "mirror_translate"])
def test_the_answer_is_the_weighed_mean_of_those_for_the_views(kind: Literal["mirror", "mirror_translate"]) -> None:
    expected = mean_of(Linear(), views()[kind])
    torch.testing.assert_close(Views(Linear(), kind)(IMAGES), expected)
    torch.testing.assert_close(Views(Linear(), kind)(pixels=IMAGES, scale=2.0), 2 * expected)
    torch.testing.assert_close(Views(Linear(), kind)(IMAGES, 2.0), 2 * expected)


def test_evaluation_and_predictions_have_it_and_the_loss_has_not() -> None:
    objective, plain, model = Classification(test_views="mirror_translate", aux_weight=0.0), Classification(aux_weight=0.0), Linear()
    logits = mean_of(model, views()["mirror_translate"])
    assert objective.score(model, (IMAGES, LABELS))["loss"] == plain.measure(logits, LABELS)[0]["loss"]
    found = [objective.infer(model, IMAGES), objective.predict(model, (IMAGES, LABELS))[1]]
    assert all(torch.equal(each["probability"], plain.found(logits)["probability"]) for each in found)
    torch.testing.assert_close(objective.compare(model, (IMAGES, LABELS))[2][0], logits.softmax(dim=1))
    model.calls = 0
    assert objective.loss(model, (IMAGES, LABELS)) == plain.loss(model, (IMAGES, LABELS))
    assert model.calls == 2


def test_what_is_no_image_or_no_view_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model's first input is float32 \[2, 20\]"):
        Views(Linear(), "mirror")(IMAGES.flatten(1))
    with pytest.raises(ConfigError, match="mirror, mirror_translate or null"):
        Classification(test_views="upside_down")  # type: ignore[arg-type]
