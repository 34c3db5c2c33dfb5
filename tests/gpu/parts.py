"""Data and models for the acceptance suite, for `model._target_=tests.gpu.parts.NAME`."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_train.interfaces import Batch, Indices
from ddp_train.model.convnet import ConvNet
from ddp_train.training.record import log_window
from tests.gpu.judges import SYNCED

WARM_UP_STEPS = 12
"""Steps that may wait: the optimizer makes its state, cuDNN and the allocator look around, DDP rebuilds its buckets."""
_CLASSES = 10


class Images:
    """Random images in memory whose class can be learned; reading them costs next to nothing.

    Args:
        size: height and width in pixels.
        num_samples: how many.
        seed: of the images; what tells the classes apart is the same for all.
        wrong_label_of: a sample whose label is no class; None: none.
    """

    def __init__(self, size: int, num_samples: int, seed: int = 0, wrong_label_of: int | None = None) -> None:
        self._size = size
        classes = torch.randn(_CLASSES, 3, size, size, generator=torch.Generator().manual_seed(99))
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(_CLASSES, (num_samples,), generator=generator)
        self.inputs = torch.randn(num_samples, 3, size, size, generator=generator) + 0.5 * classes[self.targets]
        if wrong_label_of is not None:
            self.targets[wrong_label_of] = WRONG_LABEL

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"num_classes": _CLASSES, "image_shape": (3, self._size, self._size)}

    @property
    def labels(self) -> Indices:
        return self.targets.numpy()

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Indices) -> Batch:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


WRONG_LABEL = 4711


class Synced(ConvNet):
    """Notes each time that the main thread waits for the device, from some steps on, in syncs_RANK.jsonl."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._steps = 0
        log_window.is_host = lambda device: False  # on a CPU, too, values stay where they are until a log, as on a GPU
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            warnings.filterwarnings("always", message=SYNCED)
            warnings.showwarning = self._note
            if next(self.parameters()).is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            else:
                _warn_when_the_host_reads()

    def _note(self, message: Warning | str, *_: object) -> None:
        if SYNCED in str(message) and threading.current_thread() is threading.main_thread():  # others write checkpoints, and may wait
            frames = [frame for frame in traceback.extract_stack()[:-1] if Path(frame.filename).name != "warnings.py"][-7:]
            where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
            with Path(f"syncs_{os.environ['RANK']}.jsonl").open("a") as file:
                file.write(json.dumps({"step": self._steps, "where": " > ".join(where)}) + "\n")


def _warn_when_the_host_reads() -> None:
    """Warn, in a rehearsal, where a GPU's host would wait."""

    def warning(real: Any) -> Any:
        def read(*arguments: Any) -> Any:
            warnings.warn(SYNCED, stacklevel=2)
            return real(*arguments)

        return read

    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        setattr(Tensor, name, warning(getattr(Tensor, name)))


class Weighed(ConvNet):
    """Notes in memory_RANK.jsonl, before each evaluation, how much memory this process holds: of the device, or on a CPU its own."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            held = torch.cuda.memory_reserved() if images.is_cuda else _resident()
            with Path(f"memory_{os.environ['RANK']}.jsonl").open("a") as file:
                file.write(f"{held}\n")
        return super().forward(images)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Greedy(ConvNet):
    """Wants, on one rank in one training step, more memory than there is.

    Args:
        rank: the rank.
        step: the step, from 1.
    """

    def __init__(self, rank: int, step: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._left = step if os.environ.get("RANK") == str(rank) else -1
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self._left -= 1

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self._left == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=images.device)
        return super().forward(images)


class Late(ConvNet):
    """Holds up, in each forward, whatever stream it runs on: batches, snapshots and collectives on other streams run ahead."""

    def forward(self, images: Tensor) -> Tensor:
        if images.is_cuda:
            torch.cuda._sleep(20_000_000)  # cycles: some ten milliseconds
        else:
            time.sleep(0.01)
        return super().forward(images)


class Crowded(ConvNet):
    """Takes, in its third training step, all memory that is left, and then lets a library ask for some outside torch's allocator."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._steps, self._taken = 0, list[Tensor]()
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self._steps += 1

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self._steps == 2:
            if not images.is_cuda:
                raise RuntimeError(OUTSIDE)
            for size in (1 << 30, 1 << 24, 1 << 21):
                with suppress(torch.OutOfMemoryError):
                    while True:
                        self._taken.append(torch.empty(size, dtype=torch.uint8, device=images.device))
            torch.linalg.eigh(torch.eye(64, device=images.device))  # cuSOLVER makes its handle, and loads its kernels
        return super().forward(images)


OUTSIDE = "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
"""What a rehearsal says for a GPU."""


class Hungry(ConvNet):
    """A network of which a sample in training keeps some 5 % of the device's memory until backward."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = super().forward(images)
        if not self.training or not images.is_cuda:
            return logits
        kept = torch.ones(len(images), torch.cuda.get_device_properties(images.device).total_memory // 160, device=images.device)
        return logits + 0 * (kept * logits[:, :1]).sum(1, keepdim=True)
