"""The differences of a machine from the first one, as sentences for every terminal, each with both values and the key."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddp_train.launch.node_facts.facts import NodeFacts
from ddp_train.launch.node_facts.file_list import FileList

SKEW_S = 2.0  # clocks that differ by more are named: times in logs differ, and whatever else compares them
_MAX = 8  # sentences of a kind
_MAY_DIFFER = (  # by machine
    *("cluster.node_rank", "cluster.processes_per_node", "cluster.threads_per_process", "cluster.rendezvous_endpoint", "cluster.device"),
    "cluster.nodes",  # told by itself, with what the environment says
    "trainer.grad_accum_steps",  # follows from the global batch and from how many ranks there are
)
_BATCH = "trainer.global_batch_size"  # each machine computes it as if all had as many processes as it has
_ABSENT = "absent"


class _Names(NamedTuple):  # of the two machines, in a sentence
    first: str
    other: str


def differences(first: NodeFacts, other: NodeFacts) -> list[str]:
    """Return a sentence for each difference of a machine from the first one: [] when both can train together.

    The number of processes and threads, devices, clocks and users may differ.
    """
    names = _names(first, other)
    if first.launch_id and other.launch_id and first.launch_id != other.launch_id:
        return [f"it belongs to another run: {other.launch_id} on {names.other}, {first.launch_id} on {names.first}"]
    sentences = []
    if first.spec != other.spec:
        sentences.append(_sentence("spec.json", first.spec or _ABSENT, other.spec or _ABSENT, names))
    if first.nodes != other.nodes:
        sentences.append(_sentence("cluster.nodes", first.nodes, other.nodes, names))
    sentences += _shortened(_config_differences(first, other, names), "keys")
    sentences += _shortened(_file_differences("code", first.source, other.source, names), "files of code")
    for key, first_files in first.data.items():
        other_files = other.data.get(key)
        if first_files is None:
            continue  # the first machine may download it
        if other_files is None:
            sentences.append(f"{key}: is missing on {names.other}, exists on {names.first}")
        else:
            sentences += _shortened(_file_differences(key, first_files, other_files, names), f"files of {key}")
    return [*sentences, *_value_differences(first.versions, other.versions, "version of ", names)]


def fingerprint(facts: NodeFacts) -> str:
    """Return a text that machines have in common when everything that `differences` compares is the same."""
    config = {key: value for key, value in facts.config.items() if key not in _MAY_DIFFER}
    data = {key: None if files is None else (files.sizes, files.hashes) for key, files in facts.data.items()}
    return json.dumps([facts.launch_id, facts.spec, facts.nodes, config, facts.source.hashes, data, facts.versions], sort_keys=True)


def clock(first: NodeFacts, other: NodeFacts, *, round_trip_s: float) -> str:
    """Return a sentence on clocks that differ; "" where they agree well enough.

    `other` was told when its word was sent, `first` (`NodeFacts.now`) when that was there; of the round trip between so much is not known.
    """
    ahead = other.utc - first.utc
    skew_s = abs(ahead) - round_trip_s
    if skew_s <= SKEW_S:
        return ""
    names = _names(first, other)
    return f"the clock of {names.other} is {skew_s:.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {names.first}"


def _names(first: NodeFacts, other: NodeFacts) -> _Names:
    if first.host != other.host:
        return _Names(first.host, other.host)
    number = "another" if other.node_rank is None else other.node_rank
    return _Names(f"{first.host} (machine {first.node_rank or 0})", f"{other.host} (machine {number})")


def _config_differences(first: NodeFacts, other: NodeFacts, names: _Names) -> Iterator[str]:
    left_out = _MAY_DIFFER if first.processes == other.processes else (*_MAY_DIFFER, _BATCH)
    first_config, other_config = ({key: value for key, value in facts.config.items() if key not in left_out} for facts in (first, other))
    return _value_differences(first_config, other_config, "", names)


def _file_differences(what: str, first: FileList, other: FileList, names: _Names) -> Iterator[str]:
    here, there = _described(first), _described(other)
    if not (first.is_whole and other.is_whole and first.listed_by == other.listed_by):  # only one may have come to look at it
        seen_by_both = here.keys() & there.keys()
        here, there = ({name: files[name] for name in seen_by_both} for files in (here, there))
    for name in sorted(here.keys() | there.keys()):
        shown, hash_here, hash_there = f"{what}: {name or 'the file'}", first.hashes.get(name), other.hashes.get(name)
        if name not in there:
            yield f"{shown} is missing on {names.other}, exists on {names.first}"
        elif name not in here:
            yield f"{shown} exists on {names.other}, is missing on {names.first}"
        elif here[name] != there[name]:
            yield _sentence(shown, here[name], there[name], names)
        elif hash_here and hash_there and hash_here != hash_there:
            samples = f"sample {hash_there[:8]} on {names.other}, {hash_here[:8]} on {names.first}"
            yield f"{shown} has the same size but different content: {samples}"


def _described(files: FileList) -> dict[str, str]:
    if not files.sizes:  # of source
        return {name: digest[:8] for name, digest in files.hashes.items()}
    return {name: "a folder" if size < 0 else f"{size} bytes" for name, size in files.sizes.items()}


def _value_differences(first: Mapping[str, Any], other: Mapping[str, Any], prefix: str, names: _Names) -> Iterator[str]:
    for key in sorted(first.keys() | other.keys()):
        here, there = (repr(values[key]) if key in values else _ABSENT for values in (first, other))
        if here != there:
            yield _sentence(prefix + key, here, there, names)


def _sentence(what: str, here: str, there: str, names: _Names) -> str:
    return f"{what}: {there} on {names.other}, {here} on {names.first}"


def _shortened(differences: Iterator[str], what: str) -> list[str]:
    sentences = list(differences)
    more = len(sentences) - _MAX
    return sentences if more <= 0 else [*sentences[:_MAX], f"and {more} more {what}"]
