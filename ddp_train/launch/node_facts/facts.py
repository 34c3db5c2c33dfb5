"""The facts of a machine, collected before torch starts: plain values that travel as JSON, up to some hundred kilobytes."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_train import __version__
from ddp_train.config.cluster import Rendezvous, environment_of
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.tree import leaves
from ddp_train.launch.node_facts.file_list import FileList, list_data, list_source
from ddp_train.system import devices, network
from ddp_train.system.redaction import HIDDEN, is_secret_key, redact_all

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_DATA_WITHIN_S, _SOURCE_WITHIN_S = 0.9, 0.4
_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf")
_TYPED_BY_MACHINE = ("cluster.node_rank=", "cluster.processes_per_node=", "cluster.threads_per_process=")
_PATH_KEYS = ("root", "path", "file", "folder", "dir", "directory")  # of data


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The facts of one machine."""

    host: str
    launch_id: str  # this and the next two as in `Rendezvous`
    node_rank: int | None
    nodes: str
    processes: int  # its ranks
    uid: int
    utc: float  # in seconds since the epoch, when this was told
    spec: str  # the hash of the spec that it was started with; "": of none
    config: Mapping[str, Any]  # key -> value, secrets hidden
    source: FileList
    data: Mapping[str, FileList | None]  # key -> what its path holds; None: there is nothing
    versions: Mapping[str, str]
    device: str  # "cpu", or the kind of the GPUs: "cuda"; with their names where the driver tells them
    device_count: int
    driver: str  # NVIDIA's; "": none
    problems: list[str] = field(default_factory=list)  # what it finds wrong with itself
    run: str = ""  # which one it came for: the folder or checkpoint that was typed, or the folder of the run that it left; "": a new one

    def now(self) -> NodeFacts:
        """Return the same, told now: for a clock that is compared with another one."""
        return replace(self, utc=time.time())

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> NodeFacts:
        fields: dict[str, Any] = json.loads(text)
        data = {key: None if files is None else FileList(**files) for key, files in fields["data"].items()}
        return cls(**{**fields, "source": FileList(**fields["source"]), "data": data})


def collect(
    config: RunConfig | ClusterConfig, rendezvous: Rendezvous, *, processes: int, spec_hash: str = "", code: Path | None = None
) -> NodeFacts:
    """Look at this machine; takes a second and a half at most, and some hundredths on a small run.

    Args:
        config: as this machine has composed or read it; of a sweep, whose jobs are composed later, the section `cluster`.
        code: the folder of the frozen code; None: the user's code is where they stand.
    """
    problems: list[str] = []
    cluster = config if isinstance(config, ClusterConfig) else config.cluster
    data = {} if isinstance(config, ClusterConfig) else dict(_data(config, problems))
    device = devices.resolve_device(cluster.device)
    environment = {**os.environ, **environment_of(cluster.env)}
    problems += interface_problems(environment, network.interfaces(), uses_gpu=device == "cuda")
    gpus = devices.gpus() if device == "cuda" else []
    inventory = devices.ask_driver() or devices.GpuInventory()
    kinds = " and ".join(sorted(set(inventory.gpus))) if inventory.gpus else "cuda"
    return NodeFacts(
        host=socket.gethostname(),
        launch_id=rendezvous.launch_id,
        node_rank=rendezvous.node_rank,
        nodes=rendezvous.nodes,
        processes=processes,
        uid=os.getuid(),
        utc=time.time(),
        spec=spec_hash,
        config={} if isinstance(config, ClusterConfig) else dict(_values(config)),
        source=list_source(code, within_s=_SOURCE_WITHIN_S),
        data=data,
        versions=_versions(),
        device=kinds if gpus else device,
        device_count=len(gpus) if device == "cuda" else len(os.sched_getaffinity(0)),
        driver=inventory.driver,
        problems=problems,
    )


def of_a_command_line(facts: NodeFacts, arguments: Sequence[str]) -> NodeFacts:
    """Return facts with what was typed in the place of what came of it, where the first machine alone composes."""
    shared = [text for text in arguments if not text.lstrip("+").startswith(_TYPED_BY_MACHINE)]
    return replace(facts, config={"the command line": redact_all(" ".join(shared))})


def _values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the config that have a value of their own."""
    for key, value in leaves(config.tree):
        if not (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):  # its items come by themselves
            shown = HIDDEN if is_secret_key(key) and value else redact_all(value)
            yield key, json.loads(json.dumps(shown, default=str))  # as the other machine reads it


def _data(config: RunConfig, problems: list[str]) -> Iterator[tuple[str, FileList | None]]:
    """Yield the files at each path that the data set is given, by the path's key."""
    paths: dict[Path, str] = {}
    for key, value in leaves(config.data):
        name = key.rpartition(".")[2]
        is_path_key = name in _PATH_KEYS or name.endswith(tuple(f"_{word}" for word in _PATH_KEYS))
        if not isinstance(value, str) or "://" in value or "${" in value:
            continue
        if value and (is_path_key or "/" in value):
            paths.setdefault(Path(value).absolute(), f"data.{key}")
    for path, key in paths.items():
        try:
            files = list_data(path, within_s=_DATA_WITHIN_S / len(paths))
        except OSError as error:  # a folder above it that this user may not enter
            problems.append(f"{key}: {path} cannot be read: {error.strerror}")
            continue
        if files is not None and files.problem:
            problems.append(f"{key}: {files.problem}")
        yield key, files


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "ddp_train": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "(not installed)"
    return versions


def interface_problems(environment: Mapping[str, str], interfaces: Mapping[str, Sequence[str]], *, uses_gpu: bool) -> Iterator[str]:
    """Yield the problems of the network interfaces that the ranks' environment names, on GPUs also to NCCL."""
    there = f"this machine has {', '.join(interfaces)}"
    for name in filter(None, environment.get(GLOO, "").split(",")):
        if name not in interfaces:
            yield f"{GLOO}={environment[GLOO]} names {name}, which does not exist; {there}"
        elif not interfaces[name]:
            yield f"{GLOO}={environment[GLOO]} names {name}, which has no address"
    wanted = environment.get(NCCL, "")
    if uses_gpu and wanted and not taken_by_nccl(wanted, interfaces):
        yield f"{NCCL}={wanted} leaves no interface with an address; {there}"


def taken_by_nccl(wanted: str, interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the interfaces with an address that NCCL may take.

    `wanted`: beginnings of names, `=` for whole names, `^` for all but these, `^=` for both. "": NCCL chooses, and takes the loopback
    interface and docker's only where there is no other.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    usable = [name for name, addresses in interfaces.items() if addresses]
    if not wanted:
        return [name for name in usable if name != "lo" and not name.startswith("docker")] or usable
    is_not, is_exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = tuple(filter(None, wanted.lstrip("^").lstrip("=").split(",")))
    return [name for name in usable if (name in names if is_exact else name.startswith(names)) != is_not]
