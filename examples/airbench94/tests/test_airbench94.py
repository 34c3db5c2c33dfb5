"""The parts by themselves, and all of them in runs of a few steps. `ddp_train_run` is a fixture that comes with ddp_train."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from airbench94.data import AlternatingSides, TwoSidedCIFAR10
from airbench94.lookahead import Lookahead
from airbench94.model import Airbench
from airbench94.objective import MeanOverViews, SeveralViews, Views
from airbench94.optimizer import decoupled_sgd
from airbench94.schedule import triangle
from airbench94.whitening import Whiten, whitening_kernels
from torch import Tensor, nn

from ddp_train import RunResult
from ddp_train.interfaces import DataSource
from ddp_train.interfaces.batch import normalise_and_mix

PER_FILE = 8  # images in each of the six files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write random images in the format of CIFAR-10's binary version; neighbouring pixels are alike."""
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = random.integers(0, 256, (PER_FILE, 3, 8, 8), np.uint8).repeat(4, axis=2).repeat(4, axis=3).reshape(PER_FILE, -1)
        labels = (np.arange(PER_FILE, dtype=np.uint8) % 10)[:, None]
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels, pixels], axis=1).tobytes())
    return tmp_path


# The data: both sides of each image, in turn.


@pytest.mark.parametrize("how", ["here", "pixels", "on device"])
def test_sample_n_plus_i_is_image_i_mirrored(folder: Path, how: str) -> None:
    data = TwoSidedCIFAR10(str(folder), crop_padding=2, crop_fill="reflect")
    if how == "pixels":
        data.give_pixels()
    if how == "on device":
        data.to(torch.device("cpu"))
    images, labels = normalise_and_mix(data.batch(np.asarray([3, 43, 41, 1])))
    assert len(data) == len(data.labels) == 2 * data.num_images == 80
    assert torch.equal(images[1], images[0].flip(2)) and torch.equal(images[2], images[3].flip(2))
    assert labels.tolist() == data.labels[[3, 43, 41, 1]].tolist() == [3, 3, 1, 1]


def test_each_image_comes_once_an_epoch_and_shows_its_other_side_in_the_next(folder: Path) -> None:
    order = AlternatingSides(TwoSidedCIFAR10(str(folder)), seed=5)
    epochs = [order(epoch, np.arange(40)) for epoch in range(3)]
    assert all(sorted(epoch % 40) == [*range(40)] for epoch in epochs)
    assert not np.array_equal(epochs[0] % 40, epochs[1] % 40)
    first, second, third = ({sample % 40: sample // 40 for sample in epoch.tolist()} for epoch in epochs)
    assert second == {image: 1 - side for image, side in first.items()} and third == first
    assert 5 < sum(first.values()) < 35
    again = AlternatingSides(TwoSidedCIFAR10(str(folder)), seed=5)  # asked for any positions, in any order, it says the same
    assert np.array_equal(again(2, np.asarray([7, 3])), epochs[2][[7, 3]]) and np.array_equal(again(0, np.arange(40)), epochs[0])
    with pytest.raises(ValueError, match="both_sides=true"):
        AlternatingSides(TwoSidedCIFAR10(str(folder), both_sides=False), seed=5)


# The model, and what it begins with.


def test_it_has_the_published_size_and_trains_all_but_the_first_kernels_and_the_scales_of_its_norms() -> None:
    with torch.device("meta"):
        model = Airbench((3, 32, 32), 10)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 1.97
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {*(f"groups.{group}.norm{norm}.weight" for group in range(3) for norm in (1, 2))}
    assert not any(name.endswith("bias") and "norm" not in name and name != "whitening.bias" for name, _ in model.named_parameters())


def test_convolutions_begin_as_the_identity_as_far_as_their_channels_go() -> None:
    torch.manual_seed(0)
    group = Airbench((3, 16, 16), 10, width=32).groups[0]
    features = torch.randn(2, 24, 8, 8)
    first = group.conv1(features)
    assert torch.equal(first[:, :24], features)
    assert not torch.equal(first[:, 24:32], features[:, :8])
    assert torch.equal(group.conv2(first), first)


def test_pooling_computes_the_same_where_it_must_be_deterministic() -> None:
    found = []
    for is_deterministic in (False, True):
        torch.manual_seed(0)
        model = Airbench((3, 17, 16), 10, width=4).eval()
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            outputs = model(torch.randn(2, 3, 17, 16))  # odd: what is left over is in no window
            outputs.square().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        found.append([outputs, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert all(torch.equal(plain, other) for plain, other in zip(*found, strict=True))


def a_run(model: nn.Module, **changes: Any) -> Any:
    """Return what a callback sees of a run on one process."""
    return SimpleNamespace(**{"model": model, "step": 0, "total_steps": 1, "world_size": 1, "device": torch.device("cpu"), **changes})


def test_the_first_layer_gives_values_of_variance_1_that_have_nothing_to_do_with_each_other(folder: Path) -> None:
    model, data = Airbench((3, 32, 32), 10, width=4), TwoSidedCIFAR10(str(folder))
    Whiten().on_start(a_run(model, data=data))
    pixels, _ = data.batch(np.arange(80))
    rows = model.whitening(pixels).detach().transpose(0, 1).flatten(1)
    covariance = rows @ rows.T / rows.shape[1]
    torch.testing.assert_close(covariance[:12, :12], torch.eye(12), atol=0.05, rtol=0)
    assert torch.equal(model.whitening.weight[12:], -model.whitening.weight[:12])
    assert model.whitening.found_from == 80


def test_kernels_are_found_once_from_the_first_images() -> None:
    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = type(
        "Images", (DataSource,), {"facts": {}, "__len__": lambda self: 40, "batch": lambda self, indices: (images[indices], indices)}
    )()
    model = Airbench((3, 8, 8), 10, width=4)
    Whiten(16).on_start(a_run(model, data=data))
    expected = whitening_kernels([images[:16]]).view(24, 3, 2, 2).float()
    torch.testing.assert_close(model.whitening.weight.detach(), expected)
    Whiten(40).on_start(a_run(model, data=data))  # as a run that goes on, or has loaded weights, does
    torch.testing.assert_close(model.whitening.weight.detach(), expected)
    with pytest.raises(ValueError, match="a stream has no positions"):
        Whiten().on_start(a_run(Airbench((3, 8, 8), 10, width=4), data=iter([])))


# The optimizer and its rate.


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LayerNorm(2))


def moved(momentum: float, lr: float, weight_decay: float, gradient: float) -> tuple[float, float]:
    """Return how far a weight of about 1 goes in a late step under a gradient that stays the same, and a batch norm's bias."""
    net = small_model()
    optimizer = decoupled_sgd(net, lr=lr, momentum=momentum, weight_decay=weight_decay, norm_bias_scale=4.0)
    weight, bias = net.get_parameter("0.weight"), net.get_parameter("1.bias")
    for _ in range(200):
        before = weight.detach().clone(), bias.detach().clone()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        with torch.no_grad():
            steps = (weight - before[0]).mean().item(), (bias - before[1]).mean().item()
            weight.fill_(1.0)
            bias.fill_(1.0)
    return steps


@pytest.mark.parametrize("momentum", [0.5, 0.85, 0.95])
def test_a_step_has_the_length_of_the_rate_over_two_minus_the_momentum(momentum: float) -> None:
    length = 0.01 / (2 - momentum)
    assert moved(momentum, lr=0.01, weight_decay=0.0, gradient=1.0) == pytest.approx((-length, -4 * length), rel=1e-3)


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_a_step_takes_the_decays_share_of_all_weights_away_whatever_the_rate(lr: float) -> None:
    share = 0.002 / (2 - 0.85)
    assert moved(0.85, lr=lr, weight_decay=0.002, gradient=0.0) == pytest.approx((-share, -share), rel=1e-3)


def test_only_the_biases_of_batch_norms_have_a_rate_of_their_own() -> None:
    net = small_model()
    net.get_parameter("1.weight").requires_grad_(False)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = decoupled_sgd(net).param_groups
    found = [{names[id(parameter)] for parameter in group["params"]} for group in groups]
    assert found == [{"0.weight", "0.bias", "2.weight", "2.bias"}, {"1.bias"}]
    assert groups[1]["lr"] == pytest.approx(64 * groups[0]["lr"])
    assert len(decoupled_sgd(nn.Linear(2, 2)).param_groups) == 1


def rates(steps: int, total_steps: int, **arguments: float) -> list[float]:
    """Return the rate of each step."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule, found = triangle(optimizer, total_steps, **arguments), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_triangle_rises_to_its_peak_and_falls_towards_its_end() -> None:
    found = rates(12, 10, start_ratio=0.2, peak=0.45, final_ratio=0.4)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4])
    assert rates(4, 4, peak=0.0, final_ratio=0.0) == pytest.approx([1, 0.75, 0.5, 0.25])


# The slow weights.

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var"]


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.25)
    model(torch.randn(8, 3, 2, 2))  # batch norm's averages


def now(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name in NAMES}


def test_slow_weights_follow_every_few_steps_and_training_goes_on_from_there() -> None:
    run = a_run(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), total_steps=13)
    lookahead = Lookahead(0.9, decay_power=2.0, every_steps=3, start_step=3, return_every_steps=5)
    lookahead.on_start(run)
    slow: dict[str, Tensor] = {}
    for run.step in range(1, 14):
        change(run.model)
        expected = now(run.model)
        if run.step in (6, 9, 12):
            keeps = 0.9**3 * (run.step / 13) ** 2
            slow = {name: keeps * slow[name] + (1 - keeps) * each for name, each in expected.items()} if slow else expected
        if run.step in (9, 10, 12, 13):  # it has followed, a period is over (5 was before the first time), or it is the last step
            expected = slow
        lookahead.on_step(run)
        for name, each in now(run.model).items():
            torch.testing.assert_close(each, expected[name], msg=f"{name} after step {run.step}")
    lookahead.load_state_dict({"slow": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match="another model"):
        lookahead.on_start(run)


def test_half_precision_is_averaged_in_float32() -> None:
    run, lookahead = a_run(nn.Linear(3, 2).bfloat16(), total_steps=2), Lookahead(every_steps=1)
    lookahead.on_start(run)
    for run.step in (1, 2):
        lookahead.on_step(run)
    assert {each.dtype for each in lookahead.state_dict()["slow"].values()} == {torch.float32}
    assert {each.dtype for each in run.model.parameters()} == {torch.bfloat16}


# The views.


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.randint(-8, 8, (3, 1 * 4 * 5)) / 8
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images.flatten(1) @ self.weights.T


IMAGES = torch.arange(40.0).view(2, 1, 4, 5) / 16  # sums of them are exact
LABELS = torch.tensor([1, 2])


def mean_of(model: Linear, kind: Views) -> Tensor:
    rows, columns = [1, 0, 1, 2, 3, 2], [1, 0, 1, 2, 3, 4, 3]  # mirrored at the border
    padded = IMAGES[:, :, rows][:, :, :, columns]
    both = [(IMAGES, 0.25), (IMAGES.flip(3), 0.25)]
    moved = [(side, 0.125) for view in (padded[:, :, :4, :5], padded[:, :, 2:, 2:]) for side in (view, view.flip(3))]
    weighed = [(view, 2 * weight) for view, weight in both] if kind == "mirror" else both + moved
    return torch.stack([weight * model(view) for view, weight in weighed]).sum(dim=0)


@pytest.mark.parametrize("kind", ["mirror", "mirror_translate"])
def test_the_answer_is_the_weighed_mean_of_those_for_the_views(kind: Views) -> None:
    torch.testing.assert_close(MeanOverViews(Linear(), kind)(IMAGES), mean_of(Linear(), kind))


def test_evaluation_and_predictions_have_it_and_the_loss_has_not() -> None:
    objective, model = SeveralViews(), Linear()
    logits = mean_of(model, "mirror_translate")
    evaluated, expected = objective.evaluate(model, (IMAGES, LABELS)), objective.measure(logits, LABELS)
    torch.testing.assert_close(evaluated.values["loss"], expected.values["loss"])
    found = [objective.infer(model, IMAGES), evaluated.rows]
    assert all(torch.equal(each["probability"], objective.predictions(logits)["probability"]) for each in found)
    assert evaluated.compared is not None
    torch.testing.assert_close(evaluated.compared[0], logits.softmax(dim=1))
    model.calls = 0
    assert objective.loss(model, (IMAGES, LABELS)) == nn.CrossEntropyLoss()(model(IMAGES), LABELS)
    assert model.calls == 2


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((Lookahead, {name: value}) for name, value in {"decay": 1.0, "decay_power": -1.0, "every_steps": 0, "start_step": -1}.items()),
        (Lookahead, {"return_every_steps": 0}),
        *((lambda **wrong: decoupled_sgd(small_model(), **wrong), {name: 0.0}) for name in ("momentum", "lr", "norm_bias_scale")),
        *((lambda **wrong: rates(1, 10, **wrong), {"peak": peak}) for peak in (-0.1, 1.0)),
        (SeveralViews, {"test_views": "upside_down"}),
        (Whiten, {"num_images": 0}),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is {next(iter(wrong.values()))!r}"):
        make(**wrong)


# All of it.

FEW = [
    *["model.width=4", "trainer.global_batch_size=16", "loader.micro_batch_size=8", "trainer.max_steps=6", "evaluation.every_steps=6"],
    *["trainer.log_every_steps=1", "checkpoint.every_steps=3", "callbacks.freeze.from_step=2", "callbacks.lookahead.start_step=0"],
    *["callbacks.lookahead.every_steps=2", "callbacks.lookahead.return_every_steps=null", "~metrics.tensorboard"],
    *["optimizer.lr=0.18", "optimizer.weight_decay=0.00024"],  # for 16 samples a step
]


def test_a_run_that_was_resumed_is_the_run_that_never_stopped_and_any_number_of_ranks_evaluates_the_same(
    ddp_train_run: Callable[..., RunResult], folder: Path
) -> None:
    run = ddp_train_run(*FEW, f"data.root={folder}")  # on two processes
    whole = losses(run.folder)
    assert [step for split, step, _ in whole if split == "train"] == [*range(1, 7)]
    again = ddp_train_run(*FEW, f"data.root={folder}", f"resume={run.folder}/checkpoints/step_00000003")
    assert (again.folder, losses(run.folder)) == (run.folder, whole)
    words = ["evaluate", str(run.folder), "cluster=cpu", "cluster.processes_per_node=1"]
    done = subprocess.run([sys.executable, "-m", "ddp_train", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (alone,) = (run.folder / "evaluations").iterdir()
    assert losses(alone) == [pytest.approx(whole[-1])]


def losses(folder: Path) -> list[tuple[str, int, float]]:
    """Return split, step and loss of each record."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["split"], record["step"], record["loss"]) for record in records]
