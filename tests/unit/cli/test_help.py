"""`ddp-train help`: a key, a group and an option, as the configuration files explain them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_train import CONF, FOLDER
from ddp_train.cli.help import argument_type, default_options, explain, kind_of, options
from ddp_train.config.check import SECTION_KEYS
from ddp_train.errors import ConfigError, UserError
from tests.fake_runner import FakeRunner


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert explain([*words], FakeRunner()) == 0
    return capsys.readouterr().out


def test_a_key_has_its_type_its_meaning_and_the_lines_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "optimizer.lr")
    line = next(n for n, text in enumerate((CONF / "optimizer/adamw.yaml").read_text().splitlines(), 1) if text.startswith("lr:"))
    assert text.startswith("optimizer.lr=1.0e-3    float")
    assert "peak learning rate" in text
    assert f"defined in conf/optimizer/adamw.yaml:{line}" in text
    assert "optimizer=sgd has 0.1" in text


def test_a_key_of_our_own_sections_has_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert "int or null, at least 1" in shown(capsys, "trainer.max_steps")
    assert "one of stop, skip, rewind" in shown(capsys, "health.on_nonfinite")
    assert shown(capsys, "loader.num_workers").startswith("loader.num_workers=0 ")  # not what an option of data makes of it


def test_a_group_has_its_options_and_an_option_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optimizer=adamw (the default)" in shown(capsys, "optimizer")
    assert "model.width=256\n    units in each hidden layer" in shown(capsys, "model=mlp")
    assert "trainer.max_epochs=6" in shown(capsys, "trainer")


def test_a_program_gets_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [json.loads(line) for line in shown(capsys, "optimizer.lr", "--json").splitlines()]
    assert {(key["group"], key["option"], key["value"]) for key in keys} >= {("optimizer", "adamw", "1.0e-3"), ("optimizer", "sgd", "0.1")}
    (option,) = (json.loads(line) for line in shown(capsys, "--json", "model=mlp").splitlines())
    assert option["name"] == "mlp" and "model.width" in {key["name"] for key in option["keys"]}


def test_ones_own_folder_is_explained_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("# Of my own.\n_target_: my.Model\ndepth: 3  # layers\n")
    assert "model.depth=3\n    layers" in shown(capsys, "model=mine", f"--config-dir={tmp_path}")


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        ("trainer.max_stepz", "ddp-train help trainer.max_steps"),
        ("model=convet", "ddp-train help model=convnet"),
        ("optimiser", "optimizer"),
    ],
)
def test_what_is_not_there_gets_the_nearest_name(asked: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        explain([asked], FakeRunner())


def test_the_type_of_a_class_is_read_and_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys; from ddp_train.cli.help import argument_type; print(argument_type('torch.optim.AdamW', 'lr'), 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "float | Tensor False\n"


def test_a_page_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "docs/data.md\n" in shown(capsys, "docs")
    assert shown(capsys, "docs/data.md") == shown(capsys, "data.md") == (FOLDER.parent / "docs/data.md").read_text()
    assert "`ddp-train help docs/bad_numbers.md` shows that page." in shown(capsys, "health")
    with pytest.raises(UserError, match=r"no page 'docs/dta.md'[^$]*ddp-train help docs/data.md"):
        shown(capsys, "docs/dta.md")


def test_every_key_of_our_own_sections_is_found_with_its_kind() -> None:
    names = {key.name for option in options(CONF) for key in option.keys}
    assert set(SECTION_KEYS) <= names
    assert [name for name in SECTION_KEYS if not kind_of(name) and name != "cluster.slurm"] == []


def test_a_comment_goes_on_in_the_lines_below(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.yaml").write_text(
        "# The first line\n# and the second.\n_target_: torch.nn.Linear\nname: 'a # b'  # a word\n         # and more\nrest: {x: 1}\n"
    )
    (option,) = options(tmp_path)
    assert (option.group, option.name, option.meaning, option.target) == ("model", "a", "The first line and the second.", "torch.nn.Linear")
    assert [(key.name, key.value, key.meaning) for key in option.keys] == [
        ("model.name", "'a # b'", "a word and more"),
        ("model.rest", "{x: 1}", ""),
    ]


def test_the_options_of_a_run_without_a_word() -> None:
    found = default_options(CONF)
    assert (found["model"], found["amp"], found["metrics"]) == ("convnet", "auto", "default")


def test_a_type_is_that_of_the_signature() -> None:
    assert argument_type("torch.optim.SGD", "momentum") == "float"
    assert argument_type("a_package_that_is_not_here.X", "y") == ""
