"""Targets: components and the user's own code, and no tools, whatever path leads to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_train.config.refused_targets import refuse
from ddp_train.config.target import locate

TOOLS = """
os.system posix.system logging.os.system subprocess.Popen builtins.eval builtins.exec builtins.open builtins.getattr timeit.timeit
pathlib.Path.touch logging.FileHandler shutil.rmtree pickle.loads importlib.import_module runpy.run_path ctypes.CDLL socket.socket
types.FunctionType operator.methodcaller urllib.request.urlopen webbrowser.open tempfile.NamedTemporaryFile code.interact
torch.save torch.load torch.jit.load torch.hub.load torch.multiprocessing.spawn torch.utils.cpp_extension.load torch.from_file
numpy.save numpy.memmap hydra.utils.instantiate hydra.utils.get_method torch.package.PackageImporter torch.nn.Module.__subclasses__
ddp_train.system.process.fork ddp_train.system.files.write_atomic ddp_train.data.download.os.remove ddp_train.data.download.ensure
ddp_train.data.tokens.token_writer.TokenWriter ddp_train.loader.worker_pool.WorkerPool
torch.utils.collect_env.run torch.utils.collect_env.run_and_read_all torch.utils.hipify.hipify_python.hipify torch.utils.benchmark.Timer
torch.testing.make_tensor torch.fx.graph_module._forward_from_src numpy.testing.runstring numpy.f2py.get_include numpy.lib.npyio.DataSource
numpy.savetxt numpy.savez_compressed torch.compile sympy.sympify jinja2.Template pytest.main
numpy.loadtxt numpy.genfromtxt markdown.markdownFromFile
"""
COMPONENTS = """
torch.nn.Linear torch.nn.functional.gelu torch.nn.MSELoss torch.optim.AdamW torch.optim.lr_scheduler.StepLR torch.tanh
torch.utils.data.TensorDataset numpy.linspace torch.utils.data.WeightedRandomSampler torch.float32 torch.device
ddp_train.model.mlp.MLP ddp_train.metrics.console.Console collections.OrderedDict builtins.dict pathlib.Path
"""


@pytest.mark.parametrize("path", TOOLS.split())
def test_tools_are_refused(path: str) -> None:
    assert refuse(path, locate(path))


@pytest.mark.parametrize("path", COMPONENTS.split())
def test_components_are_not(path: str) -> None:
    assert not refuse(path, locate(path))


def test_the_users_own_code_is_theirs_but_no_door_to_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(
        "import functools, os\nfrom os import system as alias\npart = functools.partial(alias, 'x')\nclass M: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert not refuse("own_parts.M", locate("own_parts.M"), ())
        for path in ("own_parts.alias", "own_parts.part", "own_parts.os.system"):
            assert "posix.system" in refuse(path, locate(path), ("own_parts", "posix", "os"))
    finally:
        del sys.modules["own_parts"]


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install a package `installed_parts` that nobody has heard of."""
    site = folder / "site-packages"
    site.mkdir()
    (site / "installed_parts.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "installed_parts", raising=False)


HONEST = """
importance_weighted_loss evaluate_auc extract_features pipeline executor_loss systematic_loss compiled_net moveaxis running_mean
"""
VERBS = """
run run_it runstring eval save saveAll save_to write_file execute exec_module import_it pipe extractall extract_all main _spawn
"""
INSTALLED = """
import subprocess, torch
from os import system as alias
class Layer(torch.nn.Module): ...
class SaveAtRandom(torch.utils.data.Dataset): ...
class Warmup(torch.optim.lr_scheduler.LRScheduler): ...
class Transform:
    def __call__(self, x): return x
    def save_pretrained(self, x): ...
class Runner(subprocess.Popen): ...
def create(x): ...
def download(x): ...
def weights_from_url(x): ...
def load(x): ...
"""


def test_a_package_that_is_installed_needs_no_listing_and_its_tools_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, monkeypatch, INSTALLED)
    for name in ("Layer", "SaveAtRandom", "Warmup", "Transform", "create"):
        assert not refuse(f"installed_parts.{name}", locate(f"installed_parts.{name}"))
    for name in ("alias", "Runner", "download", "weights_from_url", "load", "Transform.save_pretrained", "subprocess.run"):
        assert refuse(f"installed_parts.{name}", locate(f"installed_parts.{name}")), name
    del sys.modules["installed_parts"]


def test_a_verb_is_a_whole_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest, verbs = HONEST.split(), VERBS.split()
    package(tmp_path, monkeypatch, "\n".join(f"def {name}(x): ..." for name in (*honest, *verbs)))
    found = {name: refuse(f"installed_parts.{name}", locate(f"installed_parts.{name}")) for name in (*honest, *verbs)}
    assert [name for name, why in found.items() if not why] == honest
    del sys.modules["installed_parts"]
