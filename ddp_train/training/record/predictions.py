"""The per-sample outputs of one evaluation, in the data set's order: a folder of .npy files, complete or not there.

    predictions/step_00000768/  loss.npy  prediction.npy ...    one row for each evaluation sample, whatever the number of ranks
    predictions/NAME/step_00000768/  ...                        the same of an evaluation set with a name

A rank's part of the evaluation set is contiguous, so every rank writes its own rows straight into the files: nothing passes through one
rank's memory. With plain writes, not a memory map: a full disk is then an error and not a SIGBUS; and where two machines share a page of a
file on a network file system, neither overwrites the other's half of it.
"""

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.errors import printable
from ddp_train.run_folder.paths import step_folders


class PredictionFiles:
    """One evaluation's files while they are written: rows of all ranks, this one's from `first` on. The constructor is collective."""

    def __init__(self, folder: Path, world: World, *, num_samples: int, first: int) -> None:
        self._folder, self._partial = folder, folder.with_name(f".partial_{folder.name}")
        self._world, self._num_samples = world, num_samples
        self._first = self._row = first  # the row of this rank's next sample
        self._files: dict[str, int] = {}
        self._layouts: dict[str, tuple[str, tuple[int, ...]]] = {}  # numpy's name of a row's type, and its shape
        self._problem = ""
        with self._noting_problems():
            if world.is_main:
                shutil.rmtree(self._partial, ignore_errors=True)  # debris of a run that was killed in an evaluation
                self._partial.mkdir(parents=True)
        world.barrier()

    def add(self, rows: Mapping[str, Tensor], *, skips: Sequence[int] = ()) -> None:
        """Write the rows of this rank's next samples, each tensor of shape [B, ...], alike in every batch. `close` reports a full disk.

        `skips`: samples among them that could not be read; their rows are NaN, or -1 in an array of integers.
        """
        arrays = {name: _to_numpy(name, tensor) for name, tensor in rows.items()}
        layouts = {name: (array.dtype.str, array.shape[1:]) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"predictions are tensors with one row per sample; got rows {lengths}")
        if self._layouts and layouts != self._layouts:
            raise ValueError(f"predictions have the same names, types and shapes in every batch; got {layouts} after {self._layouts}")
        self._layouts = layouts
        num_rows = next(iter(lengths.values())) + len(skips)
        with self._noting_problems():
            if num_rows and not self._problem:
                for name, array in arrays.items():
                    self._write(name, _with_gaps(array, [sample - self._row for sample in skips]) if skips else array)
        self._row += num_rows

    def name_samples(self, names: Iterable[str]) -> None:
        """Write samples.txt beside the rows, a line for each (rank 0)."""
        with self._noting_problems():
            (self._partial / "samples.txt").write_text("".join(f"{printable(name)}\n" for name in names))

    def close(self, *, keep: bool) -> None:
        """Rename the finished files to their own name; they replace those of an earlier evaluation after the same step. Collective.

        `keep`: False: the evaluation was given up; its files are removed.

        Raises OSError: on every rank when one could not write.
        Raises ValueError: on every rank when the rows are not one per sample, or differ between ranks.
        """
        for descriptor in self._files.values():
            with self._noting_problems():
                os.fsync(descriptor)
            os.close(descriptor)
        self._files = {}
        problems, num_rows, layouts = zip(*self._world.gather((self._problem, self._row - self._first, self._layouts)), strict=True)
        self._problem = "; ".join(problem for problem in problems if problem)
        known = [layout for layout in layouts if layout]  # a rank without samples has none
        is_complete = sum(num_rows) == self._num_samples and all(layout == known[0] for layout in known)
        if self._world.is_main:
            with self._noting_problems():
                if keep and is_complete and not self._problem:
                    earlier = self._folder.with_name(f".removed_{self._folder.name}")
                    if self._folder.exists():
                        self._folder.rename(earlier)
                    self._partial.rename(self._folder)
                    shutil.rmtree(earlier, ignore_errors=True)
            shutil.rmtree(self._partial, ignore_errors=True)  # else a full disk would stay full
        problem = self._world.from_main(lambda: self._problem)
        if keep and problem:
            raise OSError(f"{self._folder} was not saved (evaluation.save_predictions). {problem}")
        if keep and not is_complete:
            rows = f"rows {num_rows} by rank, of {known}; expected {self._num_samples}, alike on all"
            raise ValueError(f"{self._folder} was not saved: {rows}")

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        """Note an OSError of the block, which `close` raises on all ranks."""
        try:
            yield
        except OSError as error:
            self._problem = self._problem or f"rank {self._world.rank}: {error}"

    def _write(self, name: str, array: NDArray[Any]) -> None:
        """Write rows at their position in the file; rank 0, which has the first rows, writes the header as well."""
        header = _header(array.dtype, (self._num_samples, *array.shape[1:]))
        if name not in self._files:
            self._files[name] = os.open(self._partial / f"{name}.npy", os.O_WRONLY | os.O_CREAT, 0o640)
            if self._world.is_main:
                _write_at(self._files[name], memoryview(header), 0)
        row_bytes = array.itemsize * int(np.prod(array.shape[1:]))
        _write_at(self._files[name], memoryview(array.tobytes()), len(header) + self._row * row_bytes)


def forget_after(folder: Path, step: int) -> None:
    """Remove half-written predictions and those of steps after `step`, of an attempt that got further than its last checkpoint."""
    for of_set in (folder, *folder.glob("*/")):
        for path in (*of_set.glob(".partial_*"), *(later for number, later in step_folders(of_set) if number > step)):
            shutil.rmtree(path)


def _to_numpy(name: str, tensor: Tensor) -> NDArray[Any]:
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        raise ValueError(f"predictions are tensors with one row per sample; {name!r} is {tensor!r:.80}")
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
    return tensor.detach().cpu().contiguous().numpy()


def _with_gaps(array: NDArray[Any], gaps: Sequence[int]) -> NDArray[Any]:
    """Return the rows with NaN (or -1) inserted for the skipped samples, which are at the indices `gaps` of the result."""
    filled = np.full((len(array) + len(gaps), *array.shape[1:]), np.asarray(np.nan if array.dtype.kind in "fc" else -1).astype(array.dtype))
    filled[~np.isin(np.arange(len(filled)), gaps)] = array
    return filled


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file. It is the same on every rank, so that each rank knows where its rows begin."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
