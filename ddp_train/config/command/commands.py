"""The commands of `ddp-train`: what each first word stands for. Without one of them it trains. Imports nothing of ours."""

from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    module: str  # of `ddp_train.cli`
    function: str
    usage: str = "USAGE"  # what --help shows, in the same module
    overrides: str = ""  # which it takes: "all"; "values", of keys that a saved run has; "": none
    reads_yaml: bool = False  # the same as a run that is typed
    starts_ranks: bool = False
    words: tuple[str, ...] = ()  # that may follow it at once


COMMANDS = {
    "plan": Command("plan", "plan", overrides="all", reads_yaml=True),
    "resume": Command("resume", "resume_typed", overrides="values", starts_ranks=True),
    "evaluate": Command("evaluate", "evaluate", overrides="all", starts_ranks=True),
    "predict": Command("evaluate", "predict", "PREDICT_USAGE", overrides="all", starts_ranks=True),
    "export": Command("export", "export"),
    "runs": Command("runs", "runs", words=("show", "compare", "tag", "note", "clean")),
    "status": Command("status", "show_status"),
    "report": Command("report", "report"),
    "reproduce": Command("reproduce", "reproduce", overrides="values"),
    "verify": Command("verify", "verify"),
    "logs": Command("status", "show_logs", "LOGS_USAGE"),
    "cancel": Command("cancel", "cancel"),
    "verdict": Command("status", "show_verdict", "VERDICT_USAGE"),
    "doctor": Command("doctor", "examine", overrides="all", reads_yaml=True, starts_ranks=True),
    "help": Command("help", "explain", reads_yaml=True),
    "node": Command("node", "node"),  # what engines start; `ddp-train --help` names all but this one
    "prepare": Command("prepare", "prepare", overrides="all"),
    "init": Command("init", "init"),
    "completion": Command("completion", "complete", reads_yaml=True),
    "schema": Command("schema", "write", reads_yaml=True),
}

_SHOWS_TEXT = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_THIS_MACHINE = ("cluster=local", "cluster=cpu")  # a login node, from which jobs go elsewhere, has few processors to give


def starts_ranks(words: Sequence[str]) -> bool:
    """Tell by the words alone whether a command starts ranks on this machine, if nothing is wrong with it."""
    is_command = bool(words) and "=" not in words[0] and words[0][:1] not in ("-", "+", "~")
    shows_text = any(word.partition("=")[0] in _SHOWS_TEXT for word in words)
    is_elsewhere = any(word.startswith(("cluster=", "cluster.launcher=")) and word not in _THIS_MACHINE for word in words)
    trains = not is_command or (words[0] in COMMANDS and COMMANDS[words[0]].starts_ranks)
    return trains and not shows_text and not is_elsewhere
