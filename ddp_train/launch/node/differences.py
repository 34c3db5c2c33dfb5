"""What a machine has otherwise than the first one: sentences for every terminal, each with both values and the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddp_train.launch.node.contents import Contents
from ddp_train.launch.node.facts import Facts

SKEW_S = 2.0
"""Clocks that differ by more are named. They break nothing of ours, but the times in logs, and whatever else compares them."""

_MOST = 8  # lines of a kind
_MAY_DIFFER = (  # by machine
    *("cluster.node_rank", "cluster.processes_per_node", "cluster.threads_per_process", "cluster.rendezvous_endpoint", "cluster.device"),
    "cluster.nodes",  # told by itself, with what the environment says
)
_BATCH = ("trainer.global_batch_size", "trainer.grad_accum_steps")  # each machine reckons as if all had as many processes as it has
_ABSENT = "absent"


def differences(first: Facts, other: Facts) -> list[str]:
    """Return what a machine has otherwise than the first: [] when both can train together.

    Left out is what may differ: how many processes and threads, devices, clocks, users.
    """
    names = _names(first, other)
    if first.launch and other.launch and first.launch != other.launch:
        return [f"it is of another run: {other.launch} on {names[1]}, {first.launch} on {names[0]}"]
    found = []
    if first.spec != other.spec:
        found.append(_sentence("spec.json", first.spec or _ABSENT, other.spec or _ABSENT, names))
    if first.nodes != other.nodes:
        found.append(_sentence("cluster.nodes", first.nodes, other.nodes, names))
    found += _first_of(list(_config(first, other, names)), "keys")
    found += _first_of(list(_source(first, other, names)), "files of code")
    for key in first.data:
        found += _first_of(list(_data(key, first.data[key], other.data.get(key), names)), f"files of {key}")
    return [*found, *_values(first.versions, other.versions, lambda name: f"version of {name}", names)]


def fingerprint(facts: Facts) -> str:
    """Return a text that machines have in common when everything that `differences` compares is the same."""
    config = {key: value for key, value in facts.config.items() if key not in _MAY_DIFFER}
    data = {key: None if found is None else (found.sizes, found.samples) for key, found in facts.data.items()}
    return json.dumps([facts.launch, facts.spec, facts.nodes, config, facts.source.hashes, data, facts.versions], sort_keys=True)


def skew_s(first: Facts, other: Facts, *, round_trip_s: float) -> float:
    """Return by how much a machine's clock is ahead of the first's (negative: behind), as far as it is certain.

    Args:
        first: told when the other's word was there (`Facts.now`).
        other: told when it was sent.
        round_trip_s: how long a word takes to the first and back: so much nobody can know.
    """
    apart = other.utc - first.utc
    return 0.0 if abs(apart) <= round_trip_s else apart - (round_trip_s if apart > 0 else -round_trip_s)


def clock(first: Facts, other: Facts, *, round_trip_s: float) -> str:
    """Return a sentence on clocks that differ; "" where they agree well enough. The arguments are those of `skew_s`."""
    ahead = skew_s(first, other, round_trip_s=round_trip_s)
    if abs(ahead) <= SKEW_S:
        return ""
    host, theirs = _names(first, other)
    return f"the clock of {theirs} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {host}"


def _names(first: Facts, other: Facts) -> tuple[str, str]:
    """Return what to call both machines."""
    if first.host != other.host:
        return first.host, other.host
    numbers = (0 if first.node is None else first.node, "another" if other.node is None else other.node)
    return f"{first.host} (machine {numbers[0]})", f"{other.host} (machine {numbers[1]})"


def _config(first: Facts, other: Facts, names: tuple[str, str]) -> Iterator[str]:
    left_out = () if first.processes == other.processes else _BATCH
    values = [{key: value for key, value in each.config.items() if not (key in _MAY_DIFFER or key in left_out)} for each in (first, other)]
    for sentence in _values(values[0], values[1], lambda key: key, names):
        # All ranks get the first machine's: it is what the run records.
        own = "; a variable that differs by machine is exported there, and null here" if sentence.startswith("cluster.env.") else ""
        yield sentence + own


def _source(first: Facts, other: Facts, names: tuple[str, str]) -> Iterator[str]:
    ours, theirs = dict(first.source.hashes), dict(other.source.hashes)
    if not (first.source.is_whole and other.source.is_whole and first.source.listed_by == other.source.listed_by):
        _keep_common(ours, theirs)
    unread = {name for files in (ours, theirs) for name, digest in files.items() if not digest}
    for name in sorted((ours.keys() | theirs.keys()) - unread):
        if ours.get(name) != theirs.get(name):
            yield _file(f"code: {name}", _short(ours.get(name)), _short(theirs.get(name)), names)


def _data(key: str, ours: Contents | None, theirs: Contents | None, names: tuple[str, str]) -> Iterator[str]:
    if ours is None:
        return  # the first machine may download it
    if theirs is None:
        yield f"{key}: is missing on {names[1]}, is there on {names[0]}"
        return
    sizes, others = dict(ours.sizes), dict(theirs.sizes)
    if not (ours.is_whole and theirs.is_whole):
        _keep_common(sizes, others)
    for name in sorted(sizes.keys() | others.keys()):
        here, there = sizes.get(name), others.get(name)
        if here != there:
            yield _file(f"{key}: {name or 'the file'}", _bytes(here), _bytes(there), names)
        elif name in ours.samples and name in theirs.samples and ours.samples[name] != theirs.samples[name]:
            here_s, there_s = _short(ours.samples[name]), _short(theirs.samples[name])
            yield f"{key}: {name or 'the file'} has other bytes: sample {there_s} on {names[1]}, {here_s} on {names[0]}; equal in size"


def _keep_common(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Drop the names that only one machine may have come to look at."""
    for files, others in ((ours, set(theirs)), (theirs, set(ours))):
        for name in files.keys() - others:
            del files[name]


def _file(what: str, here: str | None, there: str | None, names: tuple[str, str]) -> str:
    if there is None:
        return f"{what} is missing on {names[1]}, is there on {names[0]}"
    if here is None:
        return f"{what} is on {names[1]}, is missing on {names[0]}"
    return _sentence(what, here, there, names)


def _values(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: Callable[[str], str], names: tuple[str, str]) -> Iterator[str]:
    for key in sorted(ours.keys() | theirs.keys()):
        here, there = (repr(each[key]) if key in each else _ABSENT for each in (ours, theirs))
        if here != there:
            yield _sentence(name(key), here, there, names)


def _sentence(what: str, here: str, there: str, names: tuple[str, str]) -> str:
    return f"{what}: {there} on {names[1]}, {here} on {names[0]}"


def _first_of(sentences: list[str], what: str) -> list[str]:
    more = len(sentences) - _MOST
    return sentences if more <= 0 else [*sentences[:_MOST], f"and {more} more {what}"]


def _short(digest: str | None) -> str | None:
    return digest and digest[:8]


def _bytes(size: int | None) -> str | None:
    return None if size is None else "a folder" if size < 0 else f"{size} bytes"
