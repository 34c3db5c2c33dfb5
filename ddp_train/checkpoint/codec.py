"""State as plain JSON and named tensors, and back: a checkpoint holds nothing else, and reading one makes nothing else.

    None, bool, int, finite float, str, list        as JSON has them
    {"a": 1}                                        an object, unless a key begins with $
    {1: 2}, {"$a": 1}                               {"$dict": [[1, 2]]}
    (1, 2), b"ab", float("inf"), float("nan")       {"$tuple": [1, 2]}, {"$bytes": "6162"}, {"$float": "inf"}
    a tensor at state["a"]["b"]                     {"$tensor": "a.b", "dtype": "float32", "shape": [2, 3]}

A tensor whose memory is permuted (channels last) has its "stride", too; one that is sharded among ranks the number of its "shards".
Tied tensors have one name, and are one tensor again. Mappings of other kinds come back as dicts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.errors import UserError
from ddp_train.interfaces.strategy import is_sharded, local_rows, num_shards

_NAMES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 bfloat16 float16 float32 float64 complex32 complex64 complex128
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}  # types that a checkpoint can hold
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Leaf:
    """A tensor as the plain form describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # None: contiguous
    shards: int = 1  # number of shards of its rows (interfaces/strategy.py); 1: the tensor is whole

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StateError(UserError):
    """A state cannot be saved, or a checkpoint's content is no state."""


def encode(state: Any, root: str) -> tuple[Any, dict[str, Tensor]]:
    """Return the plain form of a state, which is a copy, and its tensors by name, which are not copied.

    All names begin with `root`. Raises StateError: the state holds something else; the message has the path to it.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, root, tensors, {}), tensors


def decode(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state again. Raises StateError: the plain form is not one that `encode` makes.

    The tensors are by name; contiguous, in the shape and type that the plain form says.
    """
    if isinstance(plain, list):
        return [decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next((key for key in plain if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensors) for key, item in plain.items()}
    try:
        if tag == "$tensor":
            leaf = _leaf(plain)
            values = tensors[leaf.name]
            return values if leaf.stride is None else torch.empty_strided(values.shape, leaf.stride, dtype=values.dtype).copy_(values)
        return _UNTAG[tag](plain[tag], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(happened=f"a checkpoint says {str(plain)[:80]}: {type(error).__name__} {error}") from None


def tensor_leaves(plain: Any) -> dict[str, Leaf]:
    """Return the tensors that a plain form names, in its order. Raises StateError: it says impossible things of one."""
    return {leaf.name: leaf for leaf in _leaves(plain)}


def leaf_of(name: str, tensor: Tensor) -> Leaf:
    shape = tuple(tensor.shape)
    if is_sharded(tensor):
        return Leaf(name, tensor.dtype, shape, None, num_shards(tensor))
    # A permuted tensor (channels last) keeps its stride: its optimizer state must lie as it does. A view with gaps does not.
    has_stride = not tensor.is_contiguous() and _is_dense(shape, tensor.stride())
    return Leaf(name, tensor.dtype, shape, tensor.stride() if has_stride else None)


def _encode(value: Any, path: str, tensors: dict[str, Tensor], names: dict[tuple[Any, ...], str]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind in (list, tuple):
        items = [_encode(item, f"{path}.{position}", tensors, names) for position, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}.{key}", tensors, names) for key, item in value.items()}
        pairs = [[_encode_key(key, path), _encode(item, f"{path}.{key}", tensors, names)] for key, item in value.items()]
        return {"$dict": pairs}
    if kind is Tensor or isinstance(value, nn.Parameter) or is_sharded(value):
        return _encode_tensor(value.detach(), path, tensors, names)
    happened = f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold"
    fix = "a state_dict() that converts it, for example with .item(), .tolist() or torch.from_numpy"
    raise StateError(happened=happened, expected="tensors, numbers, text, bytes, None, and lists, tuples and dicts of them", fix=fix)


def _encode_key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, (bool, int, float, str, bytes, tuple)):
        return _encode(key, f"{path} (a key)", {}, {})
    raise StateError(happened=f"{path} has a {type(key).__qualname__} as a key", expected="numbers, text, bytes, None, and tuples of them")


def _encode_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor], names: dict[tuple[Any, ...], str]) -> Any:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES or tensor.device.type == "meta":
        raise StateError(
            happened=f"{path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device.type}, which a checkpoint cannot hold",
            expected="a dense tensor with values",
        )
    # Rows of a sharded tensor are known by their storage: it exists even on a rank with no rows.
    address = local_rows(tensor).untyped_storage()._cdata if is_sharded(tensor) else tensor.data_ptr()
    same = (address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    name = names.get(same) if tensor.numel() else None
    if name is None:
        name = path
        while name in tensors or name.endswith("]"):  # a["b.c"] and a["b"]["c"]; and what looks like a piece (layout.py)
            name += "'"
        names[same] = name
        tensors[name] = tensor
    try:
        leaf = leaf_of(name, tensor)
    except ValueError as error:
        raise StateError(happened=f"{path}: {error}", expected="shards along the first dimension, or a whole tensor") from None
    plain: dict[str, Any] = {"$tensor": name, "dtype": _DTYPE_NAMES[leaf.dtype], "shape": list(leaf.shape)}
    plain |= {} if leaf.shards == 1 else {"shards": leaf.shards}
    return plain if leaf.stride is None else {**plain, "stride": list(leaf.stride)}


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _leaf(plain: Mapping[str, Any]) -> Leaf:
    shape = tuple(plain["shape"])
    stride = plain.get("stride")
    if type(plain["$tensor"]) is not str or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("no name and shape of a tensor")
    if stride is not None and (len(stride) != len(shape) or not _is_dense(shape, tuple(stride))):
        raise ValueError("no stride of a dense tensor")
    shards = plain.get("shards", 1)
    if type(shards) is not int or shards < 1 or (shards > 1 and (not shape or stride is not None)):
        raise ValueError("no number of shards that a tensor can have")
    return Leaf(plain["$tensor"], DTYPES[plain["dtype"]], shape, None if stride is None else tuple(stride), shards)


def _leaves(plain: Any) -> Iterator[Leaf]:
    if isinstance(plain, dict) and "$tensor" in plain:
        try:
            yield _leaf(plain)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(happened=f"a checkpoint says {str(plain)[:80]}: {type(error).__name__} {error}") from None
    elif isinstance(plain, (dict, list)):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from _leaves(item)


_UNTAG: dict[str, Any] = {
    "$tuple": lambda items, tensors: tuple(decode(list(items), tensors)),
    "$dict": lambda pairs, tensors: {decode(key, tensors): decode(item, tensors) for key, item in pairs},
    "$float": lambda text, tensors: float(text),
    "$bytes": lambda text, tensors: bytes.fromhex(text),
}
