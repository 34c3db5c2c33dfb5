"""The weights of a run for other programs: `ddp-train export`. safetensors, pt and dcp need only a checkpoint; the others need the model.

safetensors    one file; one tensor at a time is in memory          hf              a folder as the model's own save_pretrained writes it
pt             a state_dict, read with weights_only=True            torch_export    the traced program (.pt2)      onnx    the graph
dcp            a folder of torch.distributed.checkpoint (DCP); one tensor at a time is in memory, here and on the way back (`from_dcp`)

A folder of DCP has `.metadata`, a pickle that maps each tensor to bytes of files, and files with pieces as `torch.save` writes them.
Unpickling the metadata can run any code: read only folders of writers that you trust.
"""

import importlib.util
import inspect
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.export import Dim
from torch.utils._pytree import tree_map

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.manifest import read_manifest
from ddp_train.checkpoint.read import SavedPart
from ddp_train.config.saved import answered_config
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError, join_few
from ddp_train.interfaces.batch import batch_size, describe, tensors_of
from ddp_train.system.files import appears_whole
from ddp_train.training.build.build import build_evaluation
from ddp_train.training.inference.finished_run import load, typed_config
from ddp_train.training.inference.predict import infer
from ddp_train.training.state.weights import AVERAGES, find_run, put_weights, read_weights

_MODEL = "model"  # the weights' prefix in a folder of DCP
_EXAMPLES = 2  # samples to trace a program with; it takes any number


def export(run: Path, *, format: str, to: Path) -> list[str]:
    """Write the weights of a run, or its model with them, and return lines for the screen.

    Args:
        run: a run folder or one of its checkpoints.
        format: safetensors, pt, dcp, hf, torch_export or onnx.
        to: a file or a folder that does not exist yet; it appears complete.

    Raises UserError: the run has no good checkpoint, or its model cannot be written in this format.
    """
    _, checkpoint = find_run(run)
    with appears_whole(to) as partial:
        return [f"weights  of {checkpoint}", *_WRITE[format](checkpoint, partial)]


def _safetensors(checkpoint: Path, path: Path) -> list[str]:
    """Write one plain file: every name of the state_dict, tied ones too, so that `load_state_dict` finds each."""
    manifest = read_manifest(checkpoint)
    metadata = {"format": "pt", "step": str(manifest.step), "config_sha256": manifest.config_sha256}  # transformers needs `format`
    with ExitStack() as stack:
        part, read = _weights(checkpoint, stack)
        unknown = [name for name, leaf in part.tensors.items() if leaf.dtype not in tensor_file.TORCH_DTYPES.values()]
        _require_tensors("safetensors", [*part.other_names, *unknown])
        _write_tensors(path, {name: (leaf.dtype, leaf.shape) for name, leaf in part.tensors.items()}, read, metadata)
    return [
        f"{len(part.tensors)} tensors, {path.stat().st_size / 1e6:,.1f} MB",
        'load it with: model.load_state_dict(safetensors.torch.load_file("FILE"))',
    ]


def _write_tensors(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, reading one tensor after the other."""
    header = tensor_file.make_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata)
    values = (read(name).view(-1).view(torch.uint8).numpy().data for name in tensors)
    tensor_file.write(path, chain([memoryview(header)], values))


def _require_tensors(format: str, others: list[str]) -> None:
    if others:
        happened = f"{format} cannot hold {join_few(others)}"
        raise UserError(key="--format", happened=happened, expected="tensors of its types and nothing else", fix="--format=pt")


def _weights(checkpoint: Path, stack: ExitStack) -> tuple[SavedPart, Callable[[str], Tensor]]:
    """Return the model's part of a checkpoint, and a function that reads one of its tensors, averaged where there are averages."""
    part, averages = SavedPart(checkpoint, "model", stack), SavedPart(checkpoint, AVERAGES, stack)
    averaged = {part.tensors[name].name: name for name in averages.tensors}  # a tied tensor has other names, too

    def read(name: str) -> Tensor:
        leaf = part.tensors[name]
        return averages.read(averaged[leaf.name]).to(leaf.dtype) if leaf.name in averaged else part.read(name)

    return part, read


def _dcp(checkpoint: Path, path: Path) -> list[str]:
    with ExitStack() as stack:
        part, read = _weights(checkpoint, stack)
        _require_tensors("dcp", part.other_names)
        path.mkdir(mode=0o750)
        shapes = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in part.tensors.items()}
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            save_dcp({_MODEL: shapes}, checkpoint_id=path, planner=_ReadingPlanner(read), no_dist=True)
        size = sum(file.stat().st_size for file in path.iterdir())
        return [
            f"{len(part.tensors)} tensors, {size / 1e6:,.1f} MB",
            'load it with: torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="FILE")',
        ]


def from_dcp(folder: Path, to: Path) -> list[str]:
    """Write the weights of a folder of DCP into a new safetensors file, and return lines for the screen. Unpickles: see `DcpFolder`.

    Raises UserError: it cannot be read, or has types that safetensors does not have.
    """
    source = DcpFolder(folder)
    with appears_whole(to) as partial:
        _write_tensors(partial, source.tensors, source.read, {"format": "pt"})
    others = f"; {source.num_others} other entries are skipped" if source.num_others else ""
    return [f"weights  {len(source.tensors)} tensors of {folder}{others}"]


class _ReadingPlanner(DefaultSavePlanner):
    """Plans by shapes and types, and reads a tensor only when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(f"{_MODEL}."))


class DcpFolder:
    """The tensors of a folder of DCP, one in memory at a time. Unpickles the metadata, which can run code.

    Those with the prefix "model." are taken, without it; all, where no name has it. Raises UserError: it is no such folder, it is damaged,
    or a part of a tensor is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
            stored = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        except Exception as error:  # unpickling can raise anything
            raise UserError(happened=f"{folder / '.metadata'} cannot be read: {type(error).__name__}: {error}") from None
        for key, entry in stored.items():
            if missing := entry.size.numel() - sum(math.prod(chunk.sizes) for chunk in entry.chunks):
                raise UserError(happened=f"{missing:,} numbers of {key} are in no file of {folder}")
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # unpickled once, and not for each tensor
        prefix = f"{_MODEL}." if any(key.startswith(f"{_MODEL}.") for key in stored) else ""
        self._keys = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
        self.tensors = {name: (stored[key].properties.dtype, tuple(stored[key].size)) for name, key in self._keys.items()}
        self.num_others = len(metadata.state_dict_metadata) - len(self.tensors)

    def read(self, name: str) -> Tensor:
        dtype, shape = self.tensors[name]
        state = {self._keys[name]: torch.empty(shape, dtype=dtype)}
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            load_dcp(state, storage_reader=self._reader, no_dist=True)
        return state[self._keys[name]]


def _pt(checkpoint: Path, path: Path) -> list[str]:
    weights = read_weights(checkpoint)
    state = OrderedDict(weights["model"])
    state._metadata = weights["model_versions"]  # type: ignore[attr-defined]  # as a state_dict has it
    torch.save(state, path)
    return [
        f"{len(state)} entries, {path.stat().st_size / 1e6:,.1f} MB",
        'load it with: model.load_state_dict(torch.load("FILE", weights_only=True))',
    ]


def _hf(checkpoint: Path, path: Path) -> list[str]:
    model: Any = load(checkpoint).model
    if not hasattr(model, "save_pretrained"):
        happened = f"is hf, and {type(model).__name__} has no save_pretrained"
        expected = "a model of transformers or diffusers, or one with huggingface_hub's PyTorchModelHubMixin"
        raise UserError(key="--format", happened=happened, expected=expected, fix="--format=safetensors")
    model.save_pretrained(path)
    return [f"load it with: {type(model).__name__}.from_pretrained('FILE')"]


def _torch_export(checkpoint: Path, path: Path) -> list[str]:
    model, args, kwargs, shapes = _traceable(checkpoint)
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    torch.testing.assert_close(*(list(tensors_of(call(*args, **kwargs))) for call in (program.module(), model)))
    torch.export.save(program, path)
    return [_describe_inputs(args, kwargs), 'load it with: torch.export.load("FILE").module()']


def _onnx(checkpoint: Path, path: Path) -> list[str]:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(key="--format", happened=f"is onnx, without {' and '.join(missing)}", fix=f"pip install {' '.join(missing)}")
    model, args, kwargs, shapes = _traceable(checkpoint)
    program: Any = torch.onnx.export(model, args, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    program.save(path)
    return [_describe_inputs(args, kwargs)]


def _traceable(checkpoint: Path) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return a run's model, example arguments for it, and their dynamic dimensions: that of the samples."""
    config = answered_config(checkpoint.parent.parent)
    changes = {
        "evaluation": {**config["evaluation"], "batch_size": _EXAMPLES, "save_predictions": False, "sets": {}},
        "loader": {**config["loader"], "num_workers": 0, "on_device": False},
        "data": {**config["data"], "eval": config["data"].get("eval") or {}},
    }
    components = build_evaluation(typed_config({**config, **changes}), alone(), {}, {})
    put_weights(checkpoint, read_weights(checkpoint), components.modules)
    assert components.eval_loader is not None
    batch = components.eval_loader.peek()
    if batch is None:
        raise ConfigError(key="data", happened="gives its samples only once", expected="data that has a batch to trace the model with")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    model = components.model.eval()
    with torch.no_grad(), model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True):
        infer(components.objective, model, components.objective.inputs(batch.batch))
    args, kwargs = calls[0]
    size = batch_size([*args, *kwargs.values()])
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = tree_map(lambda value: {0: Dim.DYNAMIC} if isinstance(value, Tensor) and value.ndim and len(value) == size else None, bound)
    return model, args, kwargs, dict(shapes)


def _describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    inputs = [describe(value) for value in args] + [f"{name}: {describe(value)}" for name, value in kwargs.items()]
    return f"takes {', '.join(inputs)}, any number of samples"


_WRITE: Mapping[str, Callable[[Path, Path], list[str]]] = {
    "safetensors": _safetensors,
    "pt": _pt,
    "dcp": _dcp,
    "hf": _hf,
    "torch_export": _torch_export,
    "onnx": _onnx,
}
