"""What a message says to type is accepted when it is pasted."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_train import CONF, __version__
from ddp_train.rank import summary
from ddp_train.run_folder.result import Result, Status
from ddp_train.training.train_state import TrainState
from tests.config.test_config import command_line


def advised(shown: str) -> list[str]:
    """Return the words that the only message says to type."""
    (fix,) = re.findall(r"^  fix: (.+)$", shown, re.MULTILINE)
    meant = re.search(r"did you mean (.+)\?|remove it: (.+)$|leave it out: (.+)$", fix)
    return shlex.split((meant[1] or meant[2] or meant[3]) if meant else fix)


def paste(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    right: list[str],
    wrong: list[str],
    *,
    keeps: bool = False,
) -> tuple[str, dict[str, object]]:
    """Type a mistake, then what the message advises; return the message, and the configuration that it led to.

    Args:
        keeps: the advice is typed after what was wrong, not in its place.
    """
    assert command_line(monkeypatch, folder, *right, *wrong) == (2, [])
    shown = capsys.readouterr().err
    code, jobs = command_line(monkeypatch, folder, *right, *(wrong if keeps else []), *advised(shown))
    assert code == 0, capsys.readouterr().err
    return shown, jobs[0].config.tree


@pytest.mark.parametrize(
    ("wrong", "said", "keeps"),
    [
        (["+models=3"], "models: is not a key of the configuration, and nothing reads it", False),
        (["+traner.max_steps=3"], "did you mean trainer.max_steps=3?", False),
        (["+lr=0.1"], "did you mean optimizer.lr=0.1?", False),
        (["+profiler._target_=my.Profiler"], "a component in one of ", True),
        (["+paths.data=mine"], "values of your own, for ${extra.NAME}, go below extra", False),
        (["+extra.mine._target_=builtins.dict"], "nothing below extra is instantiated", True),
    ],
)
def test_what_nothing_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str, keeps: bool
) -> None:
    shown, _ = paste(monkeypatch, tmp_path, capsys, [], wrong, keeps=keeps)
    assert said in shown


def test_a_users_values_and_groups_have_their_place_below_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine/paths").mkdir(parents=True)
    (tmp_path / "mine/paths/home.yaml").write_text("width: 48\n")
    shown, tree = paste(monkeypatch, tmp_path, capsys, ["--config-dir=mine"], ["+paths=home"])
    assert tree["extra"] == {"width": 48} or tree["extra"] == {"paths": {"width": 48}}
    _, jobs = command_line(monkeypatch, tmp_path, "--config-dir=mine", *advised(shown), "model.width=${extra.paths.width}")
    assert jobs[0].config.tree["model"]["width"] == 48


def test_an_experiment_without_its_first_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/big.yaml").write_text("# Mine.\nseed: 7\nmodel:\n  width: 64\n")
    arguments = ["--config-dir=mine", "experiment=big"]
    assert command_line(monkeypatch, tmp_path, *arguments) == (2, [])
    shown = capsys.readouterr().err
    assert "big.yaml lacks the line `# @package _global_`" in shown and "(seed, model)" in shown
    subprocess.run(shown.rpartition("  fix: ")[2], shell=True, check=True, cwd=tmp_path)
    _, jobs = command_line(monkeypatch, tmp_path, *arguments)
    assert (jobs[0].config.tree["seed"], jobs[0].config.tree["model"]["width"]) == (7, 64)


@pytest.mark.parametrize(
    ("wrong", "said", "meant"),
    [
        (["optimizer.betas=[0.9,", "0.99]"], "the shell splits at spaces", ["optimizer.betas=[0.9, 0.99]"]),
        (["optimizer.lr", "=0.1"], "came as 2 words, 'optimizer.lr', '=0.1'", ["optimizer.lr=0.1"]),
        (["optimizer.lr", "=", "0.1"], "came as 3 words", ["optimizer.lr=0.1"]),
        (["optimizer.lr=", "0.1"], "came as 2 words", ["optimizer.lr=0.1"]),
        (["data=mnist", "data.root=my(1)"], "quotes around text", ['data.root="my(1)"']),
        (["--trainer.max_steps=3"], "key=value without dashes", ["trainer.max_steps=3"]),
        (["--multrun"], "is not an option", ["--multirun"]),
        (["model", "mlp"], "has no option", ["model=mlp"]),
        (["trainer.max_stepz=3"], "is not a key", ["trainer.max_steps=3"]),
        (["lr=0.1"], "nothing reads it", ["optimizer.lr=0.1"]),
        (["mine=0.1"], "values of your own", ["+extra.mine=0.1"]),
        (["optimizer.amsgrad=true"], "ddp_train.optimizer.adamw.AdamW takes it", ["+optimizer.amsgrad=true"]),
        (["+model=mlp"], "no + before it", ["model=mlp"]),
        (["+experiment=mnist_convnet"], "no + before it", ["experiment=mnist_convnet"]),
        (["cluster.env.NCCL_DEBUG=INFO"], "a + before an added key", ["+cluster.env.NCCL_DEBUG=INFO"]),
        (["--config-name=confg"], "there is no confg.yaml", ["--config-name=config"]),
        (["--config-name=nowhere"], "there is no nowhere.yaml", ["--config-name=config"]),
    ],
)
def test_what_hydra_refuses_says_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str, meant: list[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, *wrong) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown, shown
    assert advised(shown) == meant, shown
    right = [text for text in wrong if text == "data=mnist"]
    if meant != ["--multirun"]:  # of nothing, which Hydra runs as a sweep of one
        assert command_line(monkeypatch, tmp_path, *right, *meant)[0] == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said", "fix"),
    [
        (["callbacks=ema", "~callbacks", "trainer.max_stepz=1"], "max_stepz: is not a key", "did you mean trainer.max_steps=1?"),
        (["+extra.mine.a=1", "~extra.mine", "trainer.max_stepz=1"], "max_stepz: is not a key", "did you mean trainer.max_steps=1?"),
        (["model=mlp", "--config-dir"], "--config-dir: expected one argument", "--config-dir=VALUE"),
        (["model=mlp", "--cfg", "jop", "seed=1"], "expected: one of job, hydra, all", "--cfg=job"),
        (["resume", "s", "~model.width"], "only these can be removed from a resumed run: ~metrics.console, ", "leave it out"),
        (["resume", "s", "~model"], "model: would be removed", "leave it out"),
    ],
)
def test_nothing_is_removed_that_was_not_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], said: str, fix: str
) -> None:
    command_line(monkeypatch, tmp_path, "hydra.run.dir=s")
    assert command_line(monkeypatch, tmp_path, *typed) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown, shown
    assert re.findall(r"^  fix: (.+)$", shown, re.MULTILINE) == [fix], shown


@pytest.mark.parametrize(
    "options", [["--cfg", "job"], ["-c", "job", "-cd", "cf"], ["--info", "-cd", "cf"], ["--info", "config"], ["-c=job"]]
)
def test_options_stand_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (tmp_path / "cf").mkdir()
    assert command_line(monkeypatch, tmp_path, "model=mlp", *options, "seed=123") == (0, [])
    assert "seed: 123" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said", "meant"),
    [
        (["train", "model=mlp"], "ddp-train without one trains", ["model=mlp"]),
        (["model=mlp", "runs", "s"], "the command first", ["runs", "s"]),
        (["model=mlp", "seed=3", "resume", "s"], "keeps its components", ["resume", "s", "seed=3"]),
        (["rusume", "s"], "no command 'rusume'", ["resume", "s"]),
        (["version"], "an option", ["--version"]),
        (["s"], "is the folder of a run", ["resume", "s"]),
    ],
)
def test_a_word_that_is_no_command_says_which_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], said: str, meant: list[str]
) -> None:
    command_line(monkeypatch, tmp_path, "hydra.run.dir=s")
    assert command_line(monkeypatch, tmp_path, *typed) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown, shown
    assert advised(shown) == ["ddp-train", *meant]
    if meant != ["runs", "s"]:  # the folder of a run
        assert command_line(monkeypatch, tmp_path, *meant)[0] == 0


def test_what_other_programs_call_evaluating_is_told_our_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, "eval", "outputs/default/x", "data.split=test") == (2, [])
    assert advised(capsys.readouterr().err) == ["ddp-train", "evaluate", "outputs/default/x", "data.split=test"]


def test_nothing_is_suggested_where_nothing_is_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in ("trainer.early_stopping", "trainer.early_stopping=true", "+trainer.early_stopping=true"):
        assert command_line(monkeypatch, tmp_path, typed) == (2, [])
        shown = capsys.readouterr().err
        assert "did you mean" not in shown, shown
        assert "max_steps" in shown and "max_epochs" in shown, shown  # what there is


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", [["resume"], ["runs"], ["prepare"], ["prepare", "tokens"], ["resume", "somewhere"]])
def test_every_command_has_its_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    assert command_line(monkeypatch, tmp_path, *command, option) == (0, [])
    assert capsys.readouterr().out.startswith(f"ddp-train {command[0]} ")


def test_the_version_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(monkeypatch, tmp_path, "--version") == (0, [])
    assert capsys.readouterr().out == f"ddp_train {__version__}\n"


class Strict:
    """Says that it takes two names, and takes any: huggingface_hub's `@strict(accept_kwargs=True)` makes such classes."""

    def __init__(self, num_layers: int = 2, width: int = 8) -> None:
        self.num_layers, self.width = num_layers, width


def _taking_any(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: object, *args: object, **named: object) -> None:
        init(self)
        vars(self).update(named)

    return wrapped


Strict.__init__ = _taking_any(Strict.__init__)  # type: ignore[method-assign]
OWN_MODEL = ["~model", "+model._target_=tests.unit.config.test_auto.Configured", "+model.config._target_=tests.config.test_advice.Strict"]


@pytest.mark.parametrize(
    ("right", "wrong", "meant", "keeps"),
    [
        (OWN_MODEL, ["model.config.num_labels=10"], ["+model.config.num_labels=10"], False),
        (
            ["~data", "+data._target_=tests.unit.config.test_auto.Plain", "+data.eval.num_samples=9"],
            ["+data.channels=3"],
            ["~data.channels"],
            True,
        ),
        (["~data", "+data._target_=tests.unit.config.test_auto.Plain"], ["+data.eval.channels=3"], ["~data.eval.channels"], True),
        (["amp=off"], ["amp._target_=tests.unit.config.test_auto.Settings", "amp.dtype=null"], ["amp.dtype=0", "~amp.dtype"], True),
        (["~model.width"], ["+model.widht=3"], ["+model.width=3"], False),
        ([], ["+model.widht=3"], ["model.width=3"], False),
        (["model=mlp"], ["~model.num_classes"], ["+model.num_classes=auto"], True),
    ],
)
def test_advice_about_a_class_is_no_circle(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    right: list[str],
    wrong: list[str],
    meant: list[str],
    keeps: bool,
) -> None:
    shown, _ = paste(monkeypatch, tmp_path, capsys, right, wrong, keeps=keeps)
    assert advised(shown) == meant


@pytest.mark.parametrize("page", ["README.md", "docs/components.md"])
def test_the_commands_that_put_a_class_of_ones_own_into_a_group_are_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    (command,) = re.findall(r"ddp-train (model\._target_=my_package\.MyModel [^`\n]+)", text)
    (tmp_path / "my_package.py").write_text("class MyModel:\n    def __init__(self, depth: int, num_classes: int) -> None: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "my_package", sys)  # so that what is imported now is forgotten at the end
    del sys.modules["my_package"]
    assert command_line(monkeypatch, tmp_path, *shlex.split(command, comments=True))[0] == 0


def test_what_to_try_next_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/wide.yaml").write_text("defaults: [mlp]\nwidth: 999\n")
    typed = [
        "--config-dir=mine",
        "model=wide",
        "+model.bias=true",
        "~model.bias",
        "optimizer.lr=0.5",
        "seed=3",
        "seed=4",
        "hydra.run.dir=run",
    ]
    assert command_line(monkeypatch, tmp_path, *typed)[0] == 0
    for resumed in ([], ["seed=5", "optimizer.lr=0.25"]):
        _, (job,) = command_line(monkeypatch, tmp_path, "resume", "run", *resumed)
        result = Result(status=Status.COMPLETED, step=4, samples=4, seconds=1.0, metrics={"last": {}, "best": {}})
        *_, again = [line.strip().partition("ddp-train ")[2] for line in summary.closing(job, TrainState(), result).splitlines()]
        assert again.startswith("--config-dir=mine model=wide +model.bias=true '~model.bias' optimizer.lr=0.5 seed=3 seed=4 ")
        assert again.endswith(" ".join([*resumed, "trainer.max_epochs=12"]))


def test_what_to_try_next_finds_a_whole_configuration_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CONF, tmp_path / "own")
    (tmp_path / "own/model/mine.yaml").write_text("defaults: [mlp]\n")
    option = f"--config-path={tmp_path}/own"
    _, (job,) = command_line(monkeypatch, tmp_path, option, "model=mine")
    assert job.options == [option]
    assert command_line(monkeypatch, tmp_path, option, "model=mime") == (2, [])
    assert advised(capsys.readouterr().err) == ["model=mine"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.num_workers=2", "loader.num_workers=2"),
        ("data.micro_batch_size=8", "loader.micro_batch_size=8"),
        ("data.eval_batch_size=8", "evaluation.batch_size=8"),
        ("trainer.evaluate_every_steps=5", "evaluation.every_steps=5"),
        ("trainer.on_nonfinite=skip", "health.on_nonfinite=skip"),
        ("evaluate.save_predictions=true", "evaluation.save_predictions=true"),
        ("trainer.accumulate_grad_batches=4", "trainer.grad_accum_steps=4"),
        ("data.batch_size=8", "loader.micro_batch_size=8"),
        ("trainer.devices=4", "cluster.processes_per_node=4"),
    ],
)
def test_an_old_or_a_neighbours_name_is_answered_with_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert command_line(monkeypatch, tmp_path, typed) == (2, [])
    assert f"did you mean {meant}?" in capsys.readouterr().err
    assert command_line(monkeypatch, tmp_path, meant)[0] == 0


def test_a_key_of_ours_among_a_data_sets_arguments_is_sent_to_its_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, "+data.num_workers=2") == (2, [])
    assert "did you mean loader.num_workers=2?" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_refused_with_a_way_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.yaml").write_text("trainer: {max_steps: 3}\ndata: {micro_batch_size: 8}\nevaluate: {save_predictions: false}\n")
    assert command_line(monkeypatch, tmp_path, "resume", "old") == (2, [])
    assert "another version of ddp_train wrote it" in (said := capsys.readouterr().err)
    assert f"init_from={tmp_path}/old" in said


@pytest.mark.parametrize(
    ("yaml", "meant"),
    [
        ("trainer: {on_nonfinite: skip}", "did you mean health.on_nonfinite=skip?"),
        ("trainer: {evaluate_every_steps: 5}", "did you mean evaluation.every_steps=5?"),
        ("data: {batch_size: 64}", "did you mean loader.micro_batch_size=64?"),
        ("data: {eval: test}", "data.eval: is 'test'"),
    ],
)
def test_an_old_name_in_a_yaml_is_answered_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], yaml: str, meant: str
) -> None:
    (tmp_path / "cf/experiment").mkdir(parents=True)
    (tmp_path / "cf/experiment/old.yaml").write_text(f"# @package _global_\n{yaml}\n")
    assert command_line(monkeypatch, tmp_path, "--config-dir=cf", "+experiment=old") == (2, [])
    assert meant in capsys.readouterr().err


def test_a_key_of_ours_is_not_passed_on_to_a_data_set_that_takes_any_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taking = ["~data", "+data._target_=tests.config.test_advice.TakesAny", "+data.num_workers=2"]
    assert command_line(monkeypatch, tmp_path, *taking) == (2, [])
    assert "did you mean loader.num_workers=2?" in capsys.readouterr().err


class TakesAny(torch.utils.data.Dataset[int]):
    """A data set of somebody who hands everything on."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> int:
        return place


def test_a_module_that_cannot_be_imported_is_told_with_the_users_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_mine.py").write_text("import torch\nimport not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("model=custom", "model._target_=of_mine.Model", "data=custom", "data._target_=of_mine.Data", "cluster=cpu")
    assert command_line(monkeypatch, tmp_path, *words) == (2, [])
    shown = capsys.readouterr().err
    assert "of_mine.py:2: import not_installed" in shown and "No module named 'not_installed'" in shown
    assert "data._target_" in shown and "model._target_" in shown


def test_a_stream_of_unknown_length_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_stream.py").write_text(
        "import torch\n\nclass Endless(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        yield torch.zeros(3, 4, 4), 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("data=custom", "data._target_=of_stream.Endless", "+data.eval._target_=of_stream.Endless", "trainer.max_epochs=null")
    assert command_line(monkeypatch, tmp_path, *words, "trainer.max_steps=5", "cluster=cpu", "model=mlp") == (2, [])
    assert "evaluation.every_steps: is null, and Endless does not say how many samples it has" in capsys.readouterr().err
