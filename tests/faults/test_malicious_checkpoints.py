"""Checkpoints and weights that somebody has made to do harm: each is refused with its reason, at once, and nothing of it is executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash

from ddp_train.checkpoint.catalog import find_checkpoint
from ddp_train.checkpoint.read import damage_of, newest_good
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.training.parts.components import Components
from ddp_train.training.state.initial_weights import load_initial_weights
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.conftest import TINY, Project
from tests.unit.parts import checked, components, saved

SECONDS, MEGABYTES = 2.0, 500


class Payload:
    """Calls something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


class Script(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """Give a file that no test may bring about."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def _memory(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1000


def refused(action: Callable[[], object], reason: str) -> None:
    """Expect an error, soon and with little memory."""
    before, started = _memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(30)  # wall clock, for what waits; the work is measured without what else the machine does
    try:
        with pytest.raises(UserError, match=reason):
            action()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert time.process_time() - started < SECONDS
    assert _memory("VmHWM") - before < MEGABYTES


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError("it waits for ever")


def begin_with(path: Path) -> Callable[[], object]:
    model = torch.nn.Linear(2, 2)
    return lambda: load_initial_weights(path, model, alone(), renames={}, is_strict=True)


def pickled(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


# Other people's files: .pt


PICKLES: dict[str, Callable[[Path], object]] = {
    "open": lambda marker: Payload(open, str(marker), "w"),
    "system": lambda marker: Payload(os.system, f"touch {marker}"),
    "eval": lambda marker: Payload(eval, f"open({str(marker)!r}, 'w')"),
    "a pickle within": lambda marker: Payload(torch.storage._load_from_bytes, _bytes_of(Payload(open, str(marker), "w"))),
    "memory": lambda marker: Payload(bytearray, 1 << 50),
}


def _bytes_of(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@pytest.mark.parametrize("call", PICKLES)
def test_a_pickle_in_a_pt_file_is_not_executed(tmp_path: Path, marker: Path, call: str) -> None:
    path = pickled(tmp_path / "weights.pt", {"weight": torch.ones(2, 2), "bias": PICKLES[call](marker)})
    refused(begin_with(path), "holds objects that are not tensors: bias")


def test_what_is_no_tensor_is_refused_even_where_it_is_harmless(tmp_path: Path, marker: Path) -> None:
    path = pickled(tmp_path / "weights.pt", {"model": {"weight": torch.ones(2, 2), "bias": [1.0, 2.0]}})
    refused(begin_with(path), "holds objects that are not tensors: bias")


def test_a_tar_of_old_torch_is_not_read(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "weights.pt"
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(Payload(open, str(marker), "w"))
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            archive.addfile(facts, io.BytesIO(content))
    refused(begin_with(path), "not a zip archive")


def test_a_bare_pickle_is_not_read(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps(Payload(open, str(marker), "w")))
    refused(begin_with(path), "not a zip archive")


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, marker: Path) -> None:
    good, path = pickled(tmp_path / "good.pt", {"weight": torch.ones(2, 2)}), tmp_path / "weights.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in source.infolist():
            if not entry.filename.endswith("data/0"):
                bomb.writestr(entry.filename, source.read(entry), zipfile.ZIP_STORED)
            else:
                bomb.writestr(entry.filename, bytes(10**8), compresslevel=1)
    assert path.stat().st_size < 10**6
    refused(begin_with(path), r"would unpack to 100,00.* bytes")


def test_a_script_is_not_loaded(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save lays it out
        archive.writestr("weights/data.pkl", pickle.dumps(Payload(open, str(marker), "w")))
        archive.writestr("weights/constants.pkl", pickle.dumps(Payload(open, str(marker), "w")))
        archive.writestr("weights/code/__torch__.py", f"open({str(marker)!r}, 'w')")
    refused(begin_with(path), "TorchScript archive, which holds code")


# Other people's files: safetensors


def safetensors_file(path: Path, header: bytes, *, length: int | None = None, values: bytes = bytes(64)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + values)
    return path


@pytest.mark.parametrize("length", [1 << 62, 1 << 30, 17 << 20])
def test_a_huge_header_is_not_parsed(tmp_path: Path, marker: Path, length: int) -> None:
    path = safetensors_file(tmp_path / "weights.safetensors", b"{}", length=length)
    os.truncate(path, 1 << 31)  # a sparse file, which has so many bytes in name
    refused(begin_with(path), "its header would have")


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HEADERS: dict[str, str] = {
    "a name comes twice": f'{{"weight": {json.dumps(ENTRY)}, "weight": {json.dumps({**ENTRY, "shape": [2, 2]})}}}',
    "values of bias are at a wrong position.*": json.dumps({"weight": ENTRY, "bias": {**ENTRY, "data_offsets": [8, 24]}}),
    "values of bias are at a wrong position": json.dumps({"weight": ENTRY, "bias": ENTRY}),
    "values of weight are at a wrong position": json.dumps({"weight": {**ENTRY, "data_offsets": [0, 1 << 60]}}),
    "weight has a shape that no tensor can have": json.dumps(
        {
            "weight": {**ENTRY, "shape": [0, 1 << 61, 1 << 61], "data_offsets": [0, 0]},
            "bias": {**ENTRY, "shape": [16], "data_offsets": [0, 64]},
        }
    ),
    "of the type 'F4' are not known": json.dumps({"weight": {**ENTRY, "dtype": "F4"}}),
    "header cannot be read": "[" * 100_000,
}


@pytest.mark.parametrize("reason", HEADERS)
def test_tensors_that_overlap_or_come_twice_are_refused(tmp_path: Path, marker: Path, reason: str) -> None:
    refused(begin_with(safetensors_file(tmp_path / "weights.safetensors", HEADERS[reason].encode())), reason)


# Folders of others


def test_a_folder_of_dcp_is_not_unpickled(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(open, str(marker), "w")))
    (folder / "__0_0.distcp").write_bytes(b"")
    refused(begin_with(folder), r"pickles can run code")
    refused(lambda: find_checkpoint(folder, damage_of, key="resume"), "COMPLETE is missing")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path, marker: Path) -> None:
    for name in ("weights.pt", "weights.safetensors"):
        os.mkfifo(tmp_path / name)
        refused(begin_with(tmp_path / name), "is not a regular file")


# Checkpoints of ours, spoilt by somebody who can hash


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and let the mark agree with it."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())


def entry_of(content: bytes) -> Mapping[str, Any]:
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


def by_link(path: Path, outside: Path) -> None:
    shard = next(path.glob("rank_*"))
    shutil.move(shard, outside)
    shard.symlink_to(outside)


def by_name(name: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    def spoil(path: Path, outside: Path) -> None:
        shutil.copy(next(path.glob("rank_*")), outside)
        rewrite(path, lambda manifest: manifest["files"].update({name(outside): entry_of(outside.read_bytes())}))

    return spoil


def by_pipe(path: Path, outside: Path) -> None:
    shard = next(path.glob("rank_*"))
    shard.unlink()
    os.mkfifo(shard)


def by_linked_folder(path: Path, outside: Path) -> None:
    path.rename(outside)
    path.symlink_to(outside)


def by_pickle(path: Path, outside: Path) -> None:
    (path / "shared.pt").write_bytes(_bytes_of(Payload(open, str(outside.with_name("marker")), "w")))


def by_manifest(path: Path, outside: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


SPOILT: dict[str, Callable[[Path, Path], None]] = {
    "links are not followed": by_link,
    r"'\.\./\.\./outside' is not the name": by_name(lambda outside: "../../outside"),
    r"'/.*/outside' is not the name": by_name(str),
    "is not a plain file": by_pipe,
    "is not a folder that can be read": by_linked_folder,
    "shared.pt is not in manifest.json": by_pickle,
    "manifest.json is not a plain file": by_manifest,
}


@pytest.fixture(scope="module")
def parts() -> Components:
    return components()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, parts: Components) -> Path:
    """Give a folder with two sound checkpoints."""
    folder = tmp_path_factory.mktemp("sound")
    for step in (1, 2):
        saved(folder, step, parts)
    return folder


@pytest.mark.parametrize("reason", SPOILT)
def test_a_checkpoint_that_leads_elsewhere_is_refused_and_the_one_before_it_used(
    tmp_path: Path, marker: Path, sound: Path, reason: str
) -> None:
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    good, bad = folder / "step_00000001", folder / "step_00000002"
    SPOILT[reason](bad, tmp_path / "outside")
    refused(lambda: find_checkpoint(bad, damage_of, key="resume"), reason)
    assert newest_good(folder) == good
    assert find_checkpoint(folder / "last", damage_of, key="resume") == good


@pytest.mark.parametrize("deceit", ["twice", "overlap"])
def test_a_shard_that_deceives_though_its_manifest_knows_it_is_refused(
    tmp_path: Path, marker: Path, sound: Path, parts: Components, deceit: str
) -> None:
    path = shutil.copytree(sound, tmp_path / "checkpoints") / "step_00000001"
    shard = next(path.glob("rank_*"))
    content = shard.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8 : 8 + length])
    first, *_, last = sorted(entries.keys() - {"__metadata__"}, key=lambda name: int(entries[name]["data_offsets"][0]))
    if deceit == "overlap":
        entries[last]["data_offsets"] = entries[first]["data_offsets"]
    text = json.dumps(entries)
    if deceit == "twice":
        text = f"{text[:-1]}, {json.dumps(first)}: {json.dumps(entries[first])}}}"
    changed = struct.pack("<Q", len(text)) + text.encode() + content[8 + length :]
    shard.write_bytes(changed)
    rewrite(path, lambda manifest: manifest["files"].update({shard.name: entry_of(changed)}))
    assert damage_of(path) is None
    refused(lambda: start_from(path, parts, TrainState(), alone()), {"twice": "twice", "overlap": "at a wrong position"}[deceit])


def test_a_config_that_came_with_a_checkpoint_is_compared_and_never_instantiated(project: Project, marker: Path, parts: Components) -> None:
    run = project.folder / "theirs"
    saved(run / "checkpoints", 1, parts)
    theirs = checked("cluster.processes_per_node=null")
    theirs.tree["model"] = {"_target_": "os.system", "command": f"touch {marker}"}
    project.write("theirs/config.yaml", theirs.yaml())
    lines = load_initial_weights(run, parts.model, alone(), renames={}, is_strict=True)
    assert lines[0].startswith("weights")  # its weights are tensors; its config is not even read
    done = project.run(*TINY, "cluster=cpu", "hydra.run.dir=theirs")
    assert done.returncode == 2
    assert "model._target_: os.system -> " in done.output
    assert not (run / "logs").exists()


def test_a_sound_file_is_none_of_these(tmp_path: Path, marker: Path) -> None:
    """The checks above must not refuse everything."""
    weights = torch.nn.Linear(2, 2).state_dict()
    begin_with(pickled(tmp_path / "weights.pt", weights))()
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")
    begin_with(tmp_path / "weights.safetensors")()
