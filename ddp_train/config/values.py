"""Ranges of values, and parsers for values with several forms; for any other value a parser raises a ValueError with what was expected."""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

EVERY_ATTEMPT = "every"
_BOUNDS = {"min": ("at least", operator.ge), "above": ("more than", operator.gt), "below": ("less than", operator.lt)}


def range_of(rule: Mapping[str, Any]) -> list[str]:
    """Return the bounds of a rule (`min`, `above`, `below`), as `at least 1`."""
    return [f"{words} {rule[name]}" for name, (words, _) in _BOUNDS.items() if name in rule]


def missed_range(value: float, rule: Mapping[str, Any]) -> str:
    """Return the range of a rule that a number is not in; "": it is in it."""
    is_inside = all(compare(value, rule[name]) for name, (_, compare) in _BOUNDS.items() if name in rule)
    return "" if is_inside else " and ".join(range_of(rule))


class NodeRange(NamedTuple):
    """How many machines a run needs, and how many may take part."""

    least: int
    most: int


class Host(NamedTuple):
    """A machine as ssh knows it."""

    name: str
    processes: int | None  # None: as many as the section `cluster` says


class StepChange(NamedTuple):
    """A value that holds from a step on."""

    first_step: int  # counted from 0
    value: int


def node_range(nodes: Any) -> NodeRange:
    """Return the numbers of machines for `2` or `1:4`."""
    low, colon, high = str(nodes).partition(":")
    numbers = [int(text) for text in (low, high if colon else low) if text.isdigit()]
    if isinstance(nodes, bool) or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError("a number of machines, or MIN:MAX such as 1:4 (in quotes in a YAML)")
    return NodeRange(*numbers)


def _host(text: Any) -> Host:
    """Return the machine for `b:4` or `b`."""
    match = re.fullmatch(r"((?:[\w.-]+@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:]+\]))(?::([1-9]\d*))?", str(text), re.ASCII)
    if match is None or str(text).startswith("-"):
        raise ValueError("the machines' names for ssh, each with its number of processes if it differs: [a,b:4,user@c]")
    name = match[1].replace("[", "").replace("]", "")  # an address with colons, which ssh takes without brackets
    return Host(name, int(match[2]) if match[2] else None)


def host_list(value: Any) -> tuple[Host, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("a list of machines: [a,b:4,c]")
    hosts = tuple(_host(text) for text in value)
    names = [host.name for host in hosts]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each machine once; {repeated[0]} is repeated")
    return hosts


def seconds_of(walltime: Any) -> int:
    """Return the seconds for `12:00:00`, `2-00:00:00` or a number of minutes."""
    expected = "HH:MM:SS, D-HH:MM:SS or a number of minutes"
    if isinstance(walltime, int) and walltime >= 3600:  # YAML reads 12:00:00 as 43200; a longer time in minutes has days
        raise ValueError(f'{expected}; in a YAML in quotes: "{walltime // 3600}:{walltime // 60 % 60:02}:{walltime % 60:02}"')
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d))|(\d+)", str(walltime))
    if match is None or isinstance(walltime, bool):
        raise ValueError(expected)
    days, hours, minutes, seconds, whole_minutes = (int(group or 0) for group in match.groups())
    return 60 * (60 * (24 * days + hours) + minutes + whole_minutes) + seconds


def batch_changes(value: Any) -> tuple[StepChange, ...]:
    """Return the sizes of the global batch, by ascending steps."""
    expected = "the first step, counted from 0, and the size from there on: {1000: 128, 5000: 256}"
    return _by_step(value, 1, expected, "steps and sizes of at least 1. trainer.global_batch_size is the size before them")


def length_changes(value: Any) -> tuple[StepChange, ...]:
    """Return the tokens of a piece, by ascending steps."""
    expected = "the first step, counted from 0, and the tokens of a piece from there on: {0: 256, 2000: 512, 5000: 1024}"
    return _by_step(value, 0, expected, "lengths of at least 1")


def _by_step(value: Any, least_step: int, expected: str, limits: str) -> tuple[StepChange, ...]:
    if not isinstance(value, Mapping):
        raise ValueError(expected)
    changes = [StepChange(int(str(step)) if str(step).isdecimal() else -1, number) for step, number in value.items()]
    if not all(step >= least_step and type(number) is int and number > 0 for step, number in changes):
        raise ValueError(f"{expected}; {limits}")
    return tuple(sorted(changes))


def micro_batch(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("at least 1; or auto: as many as fit the device, with trainer.global_batch_size")
    return value


def block_classes(value: Any, *words: str) -> Any:
    """Return the classes of a model's blocks: `auto`, another of some words, or their names."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if value not in ("auto", *words) and not (is_list and all(isinstance(name, str) and name.isidentifier() for name in value)):
        raise ValueError(f"{', '.join(('auto', *words))}, or the classes of the model's blocks: [Block]")
    return value


def regions(value: Any) -> Any:
    """Return the parts of a model that are compiled: `auto`, `whole`, or the names of classes."""
    return block_classes(value, "whole")


def run_folders(value: Any) -> tuple[str, ...]:
    folders = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not folders or not all(isinstance(folder, str) and folder for folder in folders):
        raise ValueError("a run folder, or several: '[RUN1,RUN2]'; null for none")
    return folders


def attempt_number(value: Any) -> Any:
    """Return the attempt in which a fault happens: a number of restarts, or `every`."""
    if value != EVERY_ATTEMPT and not (type(value) is int and value >= 0):
        raise ValueError(f"the number of earlier restarts, from 0, or {EVERY_ATTEMPT}")
    return value
