"""Targets: components and functions of anybody's, but for a few tools of Python's that are named by mistake."""

from __future__ import annotations

import pytest

from ddp_train.config.targets.refused_targets import refuse
from ddp_train.config.targets.target import check_target, locate

TOOLS = "os.system logging.os.system subprocess.Popen shutil.rmtree sys.exit importlib.import_module builtins.eval builtins.open"
COMPONENTS = """
torch.nn.Linear torch.nn.functional.gelu torch.optim.AdamW torch.float32 torch.load numpy.load numpy.linspace numpy.memmap
ddp_train.model.mlp.MLP collections.OrderedDict builtins.dict pathlib.Path functools.partial itertools.chain math.sqrt logging.getLogger
"""


@pytest.mark.parametrize("path", TOOLS.split())
def test_tools_are_refused(path: str) -> None:
    assert "a tool of Python's and no component" in refuse(locate(path))


@pytest.mark.parametrize("path", COMPONENTS.split())
def test_components_and_what_they_are_given_are_not(path: str) -> None:
    assert not refuse(locate(path))


def test_a_node_that_names_one_is_told_what_to_do() -> None:
    (problem,) = check_target({"_target_": "os.system", "command": "ls"}, "data.transform")
    assert (problem.key, problem.fix) == ("data.transform._target_", "a function of your own, in a file in your folder")
