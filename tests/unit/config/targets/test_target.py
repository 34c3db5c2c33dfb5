"""What a `_target_` names, and what it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ddp_train.config.check import ConfigErrors
from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import check_target, evaluation_sets, evaluation_split, set_name, split_at, why_no_component
from tests.unit.parts import checked

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


class Resize:
    def __init__(self, size: int, antialias: bool = True) -> None: ...


class Crop:
    def __init__(self, size: int, padding: int = 0) -> None: ...


NODE: dict[str, Any] = {
    "_target_": "my.Data",
    "root": "data",
    "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 2}},
    "transform": {"_target_": f"{__name__}.Crop", "size": 8, "padding": 4},
    "scales": [1, 2],
}


def test_groups_are_merged_and_lists_and_values_are_replaced() -> None:
    changes = {"root": "test", "reader": {"options": {"threads": 0}}, "scales": [1], "more": {"a": 1}}
    assert evaluation_split({**NODE, "eval": changes}) == {
        **NODE,
        "root": "test",
        "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 0}},
        "scales": [1],
        "more": {"a": 1},
    }
    assert NODE["reader"]["options"]["threads"] == 2


def test_another_class_takes_over_what_it_has_by_name() -> None:
    split = evaluation_split({**NODE, "eval": {"transform": {"_target_": f"{__name__}.Resize"}}})
    assert split["transform"] == {"_target_": f"{__name__}.Resize", "size": 8}
    assert split["reader"] == NODE["reader"]


def test_a_set_with_a_target_of_its_own_is_whole_and_the_others_differ_from_the_training_data() -> None:
    whole = {"_target_": "my.Data", "root": "other"}
    sets = {"hard": {"root": "hard"}, "whole": whole, "gone": None}
    tree = {"data": {**NODE, "eval": {"root": "test", "limit": 3}}, "evaluation": {"sets": sets}}
    assert list(evaluation_sets(tree)) == ["data.eval", "evaluation.sets.hard", "evaluation.sets.whole"]
    assert split_at(tree, "evaluation.sets.hard") == {**NODE, "root": "hard"}  # nothing of data.eval
    assert split_at(tree, "evaluation.sets.whole") == whole
    assert split_at(tree, "data.eval") == {**NODE, "root": "test", "limit": 3}
    assert [set_name(key) for key in evaluation_sets(tree)] == ["", "hard", "whole"]
    assert evaluation_sets({"data": {**NODE, "eval": None}}) == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+evaluation.sets.step_3={}", r"evaluation\.sets\.step_3: is not a valid name of an evaluation set"),
        ("+evaluation.sets={a/b: {}}", r"evaluation\.sets\.a/b: is not a valid name"),
        ("+evaluation.sets.hard=test", r"evaluation\.sets\.hard: is 'test'[\s\S]*evaluation\.sets\.hard=\{split: test\}"),
        ("+evaluation.sets.hard.nois=1", r"evaluation\.sets\.hard\.nois: .*has no argument 'nois'"),
        ("+evaluation.sets.hard.noise=loud", r"evaluation\.sets\.hard\.noise: is 'loud'"),
        ("+evaluation.sets.hard={_target_: os.system, command: ls}", r"evaluation\.sets\.hard\._target_: os\.system"),
        ("+evaluation.sets.hard.image_size=auto", r"evaluation\.sets\.hard\.image_size: is auto, and nothing provides a value"),
    ],
)
def test_what_is_wrong_with_a_set_is_told_with_its_key(override: str, said: str) -> None:
    with pytest.raises(ConfigErrors, match=said):
        checked(override)


def test_what_follows_metrics_is_content_with_a_set() -> None:
    words = ["data.eval=null", "scheduler=plateau", "callbacks=[early_stopping]", "evaluation.save_predictions=true"]
    with pytest.raises(ConfigErrors):
        checked(*words)
    assert checked(*words, "+evaluation.sets.hard.split=eval").evaluation_sets() == ["evaluation.sets.hard"]
    assert checked("+evaluation.sets.hard=null").evaluation_sets() == ["data.eval"]
