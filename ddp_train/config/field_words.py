"""What scripts and other frameworks call things, and what is typed here: the table is field_words.yaml."""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

LEAVE_IT_OUT = "leave it out, "
SECTIONS_HERE = {
    "callbacks": "checkpoint, evaluation, health and trainer, for what they do",
    **dict.fromkeys(("logger", "loggers"), "metrics, one writer for each NAME: +metrics.NAME._target_=my_package.MyWriter"),
    "datamodule": "data",
    "net": "model",
    "criterion": "objective",
    "loss": "objective",
}
"""What others call a section -> its name here."""


@cache
def field_words() -> dict[str, dict[str, str]]:
    """Return what is typed here, by what others call it and by the value behind it ("": any other one)."""
    table: dict[str, dict[str, str]] = {}
    for here, words in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items():
        for word, _, value in (text.partition("=") for text in words.split()):
            table.setdefault(word, {})[value] = here
    return table


def instead_of(key: str, value: Any) -> str:
    """Return what to type, or say that there is nothing to type, for a key whose last part others use; "": none of the table."""
    typed = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    by_value = field_words().get(key.rpartition(".")[2].lstrip("-").replace("-", "_"), {})
    here = by_value.get(typed.lower(), by_value.get("", ""))
    return "" if "{}" in here and not typed else here.format(shlex.quote(typed))
