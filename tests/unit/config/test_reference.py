"""What is read out of the configuration files."""

from __future__ import annotations

from pathlib import Path

from ddp_train.config.check import CONF, OWN
from ddp_train.config.reference import argument_type, default_options, kind_of, options


def test_every_key_of_our_own_sections_is_found_with_its_kind() -> None:
    names = {key.name for option in options(CONF) for key in option.keys}
    assert set(OWN) <= names
    assert [name for name in OWN if not kind_of(name) and name != "cluster.slurm"] == []


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
