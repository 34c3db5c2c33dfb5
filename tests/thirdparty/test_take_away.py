"""Taking a run away: evaluated, predicted from, its weights in plain torch and for others; and weights of Lightning's coming in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY, Project, metrics
from tests.thirdparty.conftest import needs
from tests.unit.training.finished import finished

OTHER_MODEL = [f"~model.{name}" for name in ("image_shape", "num_classes", "width", "dropout")]  # arguments of the default one
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(768, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
"""

PLAIN = """
from net import Net
import torch, safetensors.torch
model = Net()
model.load_state_dict(safetensors.torch.load_file("net.safetensors"))
print(sorted(model.state_dict()) == sorted(torch.load("net.pt", weights_only=True)), model[4].weight.double().sum().item())
"""

LIGHTNING = """
import lightning, torch
from net import Net

class Module(lightning.LightningModule):
    def __init__(self, rate, loss):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, batch):
        return self.hparams.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)

data = torch.utils.data.TensorDataset(torch.rand(8, 3, 16, 16), torch.randint(10, (8,)))
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir="theirs")
module = Module(0.1, torch.nn.CrossEntropyLoss(label_smoothing=0.1))
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
trainer.save_checkpoint("theirs.ckpt")
try:
    torch.load("theirs.ckpt", weights_only=True)
except Exception as error:
    print(type(error).__name__)
"""


def python(project: Project, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=project.folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_evaluated_predicted_from_and_loaded_by_plain_torch(project: Project, train: Callable[..., Path]) -> None:
    project.write("net.py", NET)
    run = train(*TINY[2:], "model._target_=net.Net", *OTHER_MODEL, "trainer.max_steps=20")
    scored, said = project.run("evaluate", str(run), timeout=600), project.run("predict", str(run), timeout=600)
    assert (scored.returncode, said.returncode) == (0, 0), scored.output + said.output
    first, second = sorted((run / "evaluations").iterdir())
    names = ("loss", "accuracy")
    (record,), last = metrics(first), metrics(run, "eval")[-1]
    assert [record[name] for name in names] == [last[name] for name in names]
    (rows,) = second.glob("predictions/*/prediction.npy")
    assert np.load(rows).shape == (101,)
    for words in (["to=net.safetensors"], ["to=net.pt", "--format=pt"]):
        done = project.run("export", str(run), *words, timeout=600)
        assert done.returncode == 0, done.output
    is_same, total = python(project, PLAIN).split()
    found = python(project, f"import ddp_train; print(ddp_train.load({str(run)!r}).model[4].weight.double().sum().item())")
    assert is_same == "True" and float(total) == float(found)


@needs("lightning")
def test_a_checkpoint_of_lightnings_is_a_beginning(project: Project) -> None:
    project.write("net.py", NET)
    assert "UnpicklingError" in python(project, LIGHTNING)  # for its hyper-parameters; torch alone would need to trust it
    words = [*TINY[2:], "cluster=cpu", "model._target_=net.Net", *OTHER_MODEL, "init_from=theirs.ckpt", "trainer.max_steps=1"]
    done = project.run(*words, "+init_from_keys={net.:''}", timeout=600)
    assert done.returncode == 0, done.output
    assert "weights  9 of 9 tensors from theirs.ckpt" in done.output


@needs("transformers")
def test_a_model_of_transformers_is_exported_for_from_pretrained(tmp_path: Path) -> None:
    import transformers

    from ddp_train.training.inference.export import export

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}
    config = [f"+model.config.{name}={value}" for name, value in sizes.items()]
    target = ["model._target_=transformers.BertForMaskedLM", *OTHER_MODEL, "+model.config._target_=transformers.BertConfig"]
    parts = finished(tmp_path / "run", *target, *config, base=[])
    export(tmp_path / "run", format="hf", to=tmp_path / "bert")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "bert")
    for name, value in parts.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@needs("onnx", "onnxscript")
def test_a_graph_is_exported_for_any_number_of_samples(tmp_path: Path) -> None:
    import onnx.reference

    from ddp_train.training.inference.export import export

    parts = finished(tmp_path / "run", base=TINY)
    export(tmp_path / "run", format="onnx", to=tmp_path / "model.onnx")
    graph = onnx.reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    images = torch.rand(5, 3, 16, 16)
    (found,) = graph.run(None, {graph.input_names[0]: images.numpy()})
    with torch.no_grad():
        assert np.allclose(found, parts.model.eval()(images), atol=1e-5)


def test_what_needs_a_package_that_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_train.errors import UserError
    from ddp_train.training.inference import export

    finished(tmp_path / "run", base=TINY)
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install onnx onnxscript"):
        export.export(tmp_path / "run", format="onnx", to=tmp_path / "model.onnx")
