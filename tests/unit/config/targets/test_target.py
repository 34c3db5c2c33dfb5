"""What a `_target_` names, and what it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import check_target, why_no_component

HERE = "tests.unit.config.targets.test_target"
TOOLS = "os.system logging.os.system subprocess.Popen shutil.rmtree sys.exit importlib.import_module builtins.eval builtins.open"
COMPONENTS = """
torch.nn.Linear torch.nn.functional.gelu torch.optim.AdamW torch.float32 torch.load numpy.load numpy.linspace numpy.memmap
ddp_train.model.mlp.MLP collections.OrderedDict builtins.dict pathlib.Path functools.partial itertools.chain math.sqrt logging.getLogger
"""


def test_a_class_without_a_readable_signature_is_left_to_itself() -> None:
    assert check_target({"_target_": "builtins.dict", "anything": 1}, "model") == []


def test_a_class_of_a_notebook_or_a_script_is_said_to_need_a_file() -> None:
    (problem,) = check_target({"_target_": "__main__.Net"}, "model")
    assert "put it into a file (in a notebook: %%writefile my_file.py) and name my_file.Net" in problem.happened
    (problem,) = check_target({"_target_": "Net"}, "model")
    assert problem.happened.endswith("; a path begins with its module, as my_file.Net")


class Stage:
    """What WebDataset makes of a function: called, it waits for the first argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return lambda source: self.function(source, *args, **kwargs)


@Stage
def doubled(src: Iterable[int], factor: int) -> Iterable[int]:
    return (factor * each for each in src)


def tripled(src: Iterable[int]) -> Iterable[int]:
    return (3 * each for each in src)


def test_an_object_that_is_called_with_a_part_of_what_its_function_takes_lacks_nothing() -> None:
    assert check_target({"_target_": f"{HERE}.doubled", "factor": 2}, "data._args_.1") == []
    assert [each.key for each in check_target({"_target_": f"{HERE}.tripled"}, "data._args_.1")] == ["data._args_.1.src"]


@pytest.mark.parametrize("path", TOOLS.split())
def test_tools_are_refused(path: str) -> None:
    assert "a function or class of Python and not a component" in why_no_component(locate(path))


@pytest.mark.parametrize("path", COMPONENTS.split())
def test_components_and_what_they_are_given_are_not(path: str) -> None:
    assert not why_no_component(locate(path))


def test_a_node_that_names_one_is_told_what_to_do() -> None:
    (problem,) = check_target({"_target_": "os.system", "command": "ls"}, "data.transform")
    assert (problem.key, problem.fix) == ("data.transform._target_", "a function of your own, in a file in your folder")


def test_a_word_that_another_component_of_the_section_has_is_not_advised_again() -> None:
    (problem,) = check_target({"_target_": "ddp_train.strategy.fsdp.FSDP", "sync_batchnorm": True}, "strategy")
    assert (problem.key, problem.fix) == ("strategy.sync_batchnorm", "remove it: '~strategy.sync_batchnorm'")
