"""What people train, with models and metrics of others: each row is one command or one YAML, with at most so many lines of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import FEW, TINY, Project, metrics
from tests.thirdparty.conftest import needs

Train = Callable[..., Path]


def evaluated(run: Path) -> dict[str, float]:
    """Return the last evaluation's record."""
    found: dict[str, float] = metrics(run, "eval")[-1]
    return found


def yaml(project: Project, option: str, text: str) -> list[str]:
    """Write an option of one's own, and return what chooses it."""
    project.write(f"mine/{option}.yaml", text)
    return ["--config-dir=mine", option.replace("/", "=")]


GPT2 = """
_target_: transformers.GPT2LMHeadModel
config:
  _target_: transformers.GPT2Config
  vocab_size: auto
  n_positions: 16
  n_embd: 32
  n_layer: 2
  n_head: 2
  bos_token_id: 0
  eos_token_id: 0
"""


@needs("transformers")
def test_hugging_face_gpt2_from_its_config(project: Project, train: Train) -> None:
    project.write("data/input.txt", "To be, or not to be, that is the question.\n" * 40)
    chosen = yaml(project, "model/gpt2", GPT2)
    run = train(*chosen, "data=char_text", "data.context_length=16", "objective=language_modeling", "trainer.max_steps=5")
    assert evaluated(run)["perplexity"] > 1


BERT = """
_target_: transformers.BertForSequenceClassification
config:
  _target_: transformers.BertConfig
  vocab_size: 50
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  intermediate_size: 32
  max_position_embeddings: 16
  num_labels: 3
"""
SENTENCES = """
_target_: datasets.load_dataset
path: parquet
data_files: {train: train.parquet, test: test.parquet}
split: train
eval: {split: test}
"""


@needs("transformers", "datasets")
@pytest.mark.parametrize("objective", ["transformers", "classification"])
def test_hugging_face_bert_on_batches_that_are_dicts(project: Project, train: Train, objective: str) -> None:
    import datasets

    ids = [[place * (row + 1) % 50 for place in range(8)] for row in range(64)]
    rows = {"input_ids": ids, "attention_mask": [[1] * 8] * 64, "labels": [row % 3 for row in range(64)]}
    for name in ("train", "test"):
        datasets.Dataset.from_dict(rows).to_parquet(project.folder / f"{name}.parquet")
    (config_dir, model), (_, data) = yaml(project, "model/bert", BERT), yaml(project, "data/sentences", SENTENCES)
    run = train(config_dir, model, data, f"objective={objective}", "trainer.max_steps=5")
    assert 0 <= evaluated(run)["accuracy"] <= 1


METRICS = """
# @package _global_
evaluation:
  metrics:
    auroc: {_target_: torchmetrics.AUROC, task: multiclass, num_classes: auto}
    auroc_binned: {_target_: torchmetrics.AUROC, task: multiclass, num_classes: auto, thresholds: 20}
    f1: {_target_: torchmetrics.F1Score, task: multiclass, num_classes: auto, average: macro}
    recall: {_target_: torchmetrics.Recall, task: multiclass, num_classes: auto, average: none}
"""


@needs("torchmetrics")
def test_auroc_and_f1_are_those_of_torchmetrics_over_all_samples_on_any_number_of_ranks(project: Project, train: Train) -> None:
    import torch
    from torchmetrics import AUROC, F1Score

    chosen = [
        *TINY,
        *yaml(project, "experiment/measured", METRICS),
        "trainer.max_steps=5",
        "evaluation.batch_size=8",
        "trainer.global_batch_size=32",
    ]
    found = []
    for ranks in (1, 2, 3, 7):
        run = train(*chosen, f"cluster.processes_per_node={ranks}", "evaluation.save_predictions=true", "checkpoint.metric=eval/auroc")
        found.append(evaluated(run))
    for record in found[1:]:
        assert record["f1"] == pytest.approx(found[0]["f1"], abs=0.03)  # the weights differ in their last bits
    (folder,) = (run / "predictions").iterdir()
    target, prediction = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("target", "prediction"))
    assert found[-1]["f1"] == pytest.approx(float(F1Score(task="multiclass", num_classes=10, average="macro")(prediction, target)))
    assert {f"recall_{number}" for number in range(10)} <= found[-1].keys()
    assert AUROC(task="multiclass", num_classes=10).higher_is_better
    assert 0 < found[-1]["auroc"] < 1 and abs(found[-1]["auroc"] - found[-1]["auroc_binned"]) < 0.1


@needs("torchmetrics")
def test_every_kind_of_torchmetrics_states_comes_to_what_one_rank_has() -> None:
    import torch
    from torchmetrics import Metric, MetricCollection, regression, wrappers

    from ddp_train.errors import ConfigError
    from ddp_train.training.build.make import as_metric
    from ddp_train.training.parts.metric import KeptMetric

    torch.manual_seed(0)
    predictions, targets = torch.rand(40), torch.rand(40)
    makers: list[Callable[[], Metric]] = [
        *(
            regression.MeanSquaredError,
            regression.R2Score,
            regression.PearsonCorrCoef,
            regression.SpearmanCorrCoef,
            regression.ExplainedVariance,
        ),
        *(regression.ConcordanceCorrCoef, regression.CosineSimilarity),
        lambda: wrappers.MinMaxMetric(regression.MeanAbsoluteError()),
    ]
    for make in makers:
        whole = make()
        shape = (-1, 4) if isinstance(whole, regression.CosineSimilarity) else (-1,)
        whole.update(predictions.reshape(shape), targets.reshape(shape))
        states = []
        for part, other in zip(predictions.split([16, 4, 20]), targets.split([16, 4, 20]), strict=True):
            rank = KeptMetric(make())
            for pair in zip(part.split(8), other.split(8), strict=True):
                rank.update(*(each.reshape(shape) for each in pair))
            states.append(rank.state())
        expected, value = whole.compute(), KeptMetric(make()).result(states)
        for name in expected if isinstance(expected, dict) else [...]:
            one, many = (expected[name], value[name]) if name is not ... else (expected, value)
            assert torch.allclose(one, many, atol=1e-5), (type(whole).__name__, one, many)
    with pytest.raises(ConfigError, match="each with its own name"):
        as_metric(MetricCollection([regression.R2Score()]), "both", torch.device("cpu"))


AUX = """
from ddp_train.model.mlp import MLP
class WithAux(MLP):
    def forward(self, images): return (logits := super().forward(images)), logits.square().mean()
"""


def test_a_model_that_returns_logits_and_a_loss_of_its_own(project: Project, train: Train) -> None:
    project.write("aux.py", AUX)
    assert len(AUX.strip().splitlines()) == 3
    train(*TINY, "model._target_=aux.WithAux", "+objective.aux_weight=0.1", "trainer.max_steps=3")


TABLE = """
import numpy, torch
def table(path, rows):
    data = torch.from_numpy(numpy.loadtxt(path, delimiter=",", skiprows=1, dtype="float32")[slice(*rows)])
    return torch.utils.data.TensorDataset(data[:, :-1], data[:, -1])
"""


def test_regression_on_a_csv_file_with_rmse_and_r2(project: Project, train: Train) -> None:
    values = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    np.savetxt(
        project.folder / "rows.csv", np.column_stack([values, values @ [1.0, -2.0, 0.5]]), delimiter=",", header="a,b,c,y", comments=""
    )
    project.write("table.py", TABLE)
    assert len(TABLE.strip().splitlines()) <= 5
    (config_dir, model) = yaml(project, "model/line", "_target_: torch.nn.Linear\nin_features: 3\nout_features: 1\n")
    (_, data) = yaml(project, "data/table", "_target_: table.table\npath: rows.csv\nrows: [0, 150]\neval: {rows: [150, 200]}\n")
    run = train(config_dir, model, data, "objective=regression", "optimizer.lr=0.1", "trainer.max_steps=100", "trainer.max_epochs=null")
    assert evaluated(run)["r2"] > 0.9
    assert evaluated(run)["rmse"] < 1.0


GAN = """
import ddp_train
import torch
import torch.nn.functional as F
from torch import nn

class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 768), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(768, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

class Adversarial(ddp_train.TurnObjective):
    goals = {"gap": "min"}
    turns = {"discriminator": ["discriminator"], "generator": ["generator"]}
    def turn_loss(self, model, batch, turn):
        real = batch[0].flatten(1)
        fake = model.generator(torch.randn(len(real), 16, device=real.device))
        if turn == "generator":
            return F.softplus(-model.discriminator(fake)).flatten()
        return (F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(fake.detach()))).flatten()
    def evaluate(self, model, batch):
        real = batch[0].flatten(1)
        fake = model.generator(torch.randn(len(real), 16, device=real.device))
        return {"gap": (model.discriminator(real) - model.discriminator(fake)).flatten()}
"""


def test_a_gan_of_thirty_lines(project: Project, train: Train) -> None:
    project.write("gan.py", GAN)
    assert len([line for line in GAN.splitlines() if line]) <= 30
    (config_dir, model), (_, objective) = (yaml(project, f"{group}/mine", f"_target_: gan.{name}\n") for group, name in PARTS)
    run = train(*FEW, config_dir, model, objective, "trainer.max_steps=5", "trainer.clip_grad_norm=1.0")
    assert {"loss_discriminator", "loss_generator"} <= metrics(run, "train")[-1].keys()


PARTS = (("model", "GAN"), ("objective", "Adversarial"))
