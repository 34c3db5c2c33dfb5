"""The config.yaml of a run folder: the composed config, and the answers of its `auto`s."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_train.config import auto
from ddp_train.config.run_config import ANSWERED, RunConfig
from ddp_train.config.schema import SECTIONS
from ddp_train.config.targets.target import AUTO
from ddp_train.config.tree import differences, dotted_items, replace_values
from ddp_train.errors import ConfigError
from ddp_train.system.files import write_atomic


def saved_config(folder: Path) -> dict[str, Any]:
    """Return the config of a run folder as composed, with its `auto`s."""
    saved, answered = _read(folder)
    return {str(name): value for name, value in replace_values(saved, "", lambda key, value: AUTO if key in answered else value).items()}


def replaced_configs(folder: Path) -> list[dict[str, Any]]:
    """Return the run folder's earlier configs, from before attempts with other settings."""
    return [_read(folder, path.name)[0] for path in sorted(folder.glob("config.*.yaml"))]


def answered_config(folder: Path) -> dict[str, Any]:
    """Return the config of a run folder with the answers of its `auto`s."""
    return _read(folder)[0]


def answers_of(folder: Path) -> dict[str, Any]:
    """Return the answers of a run's `auto`s, by their keys."""
    saved, answered = _read(folder)
    values = dict(dotted_items(saved))
    return {key: values[key] for key in answered if key in values}


def changes(checked: RunConfig, folder: Path) -> list[str]:
    """Name the differences to the config of a run that is to be continued. An `auto` equals its answer, on either side."""
    return differences(auto.with_answers(checked.tree, "", answers_before(checked, folder)), answered_config(folder))


def config_text(checked: RunConfig, folder: Path) -> str:
    """Return config.yaml for a run folder, with the earlier values of the run's `auto`s, if any; `record_answers` compares them."""
    return checked.yaml(answers_before(checked, folder))


def record_answers(file: Path, checked: RunConfig, answers: Mapping[str, Any]) -> None:
    """Complete config.yaml with the answers of the `auto`s, when the data is there (rank 0).

    Raises ConfigError: the answers differ from those when the run began.
    """
    values = {key: auto.yaml_value(value) for key, value in answers.items()}
    written, text = file.read_text(), checked.yaml(values)
    if f"\n{ANSWERED}:" in written:  # it has earlier answers
        auto.refuse_changed(values, answers_before(checked, file.parent))
    if written != text:
        write_atomic(file, text)  # nothing but answers differs: it replaces no other config


def answers_before(checked: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the answers in a run's config.yaml for the `auto`s of a config; {}: there is no such file yet."""
    if not (folder / "config.yaml").exists():
        return {}
    values = dict(dotted_items(answered_config(folder)))
    return {key: values[key] for key in auto.keys(checked.tree) if key in values and values[key] != AUTO}


def _read(folder: Path, name: str = "config.yaml") -> tuple[dict[str, Any], list[str]]:
    """Return the content of config.yaml, and the keys in it that were `auto`."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(folder / name))
    except Exception as error:  # OSError, or what the YAML parser raises
        raise ConfigError(key="resume", happened=f"{folder}/{name} cannot be read: {error}") from None
    if not isinstance(saved, dict) or not saved:
        raise ConfigError(key="resume", happened=f"{folder}/{name} holds no configuration")
    if missing := [section for section in SECTIONS if section not in saved]:
        happened = f"{folder}/{name} has no section {', '.join(missing)}: another version of ddp_train wrote it"
        fix = f"the version that started it (environment.json has its packages); or a new run with its weights: init_from={folder}"
        raise ConfigError(key="resume", happened=happened, expected="a run of this version", fix=fix)
    answered = saved.pop(ANSWERED, None)
    return {str(key): value for key, value in saved.items()}, answered if isinstance(answered, list) else []
