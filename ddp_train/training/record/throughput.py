"""The speed of a run in each of its training records: rates per device, the share of the device's peak (MFU), memory.

All of it is arithmetic at log steps, on numbers that the host has already. docs/metrics.md has the names.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train import model_log
from ddp_train.amp import Amp
from ddp_train.distributed.world import World
from ddp_train.interfaces import Batch, LossModule, Objective, TurnObjective
from ddp_train.interfaces.batch import batch_size, given_batch_size, map_tensors
from ddp_train.interfaces.objective import loss_sum, module_of
from ddp_train.system.process import resident_bytes
from ddp_train.training.seeding import random_state, set_random_state

logger = logging.getLogger(__name__)

_GIB = 2.0**30
_RATES = ("samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device", "mfu", "step_ms", "data_wait_ms")
_MEMORY = ("device/memory_gib", "device/reserved_gib", "device/host_gib")
NAMES = (*_RATES, *_MEMORY)
"""Names in a training record whose values depend on the machine: they differ when the run is done again."""

_TYPES = ("float32", "tf32", "bfloat16", "float16")
_PEAKS: dict[str, tuple[float | None, ...]] = {
    r"GB200|GB300": (80, 1250, 2500, 2500),
    r"B200|B300.*": (75, 1125, 2250, 2250),
    r"H20": (44, 74, 148, 148),
    r"GH200.*|H[18]00( \d+GB HBM3)?|H200": (67, 494.7, 989.4, 989.4),
    r"H100 NVL|H200 NVL": (60, 417.5, 835.5, 835.5),
    r"H[18]00 PCIe": (51, 378, 756, 756),
    r"A100.*|A800-SXM4.*|A800 \d+GB PCIe": (19.5, 156, 312, 312),
    r"A30": (10.3, 82, 165, 165),
    r"A40": (37.4, 74.8, 149.7, 149.7),
    r"A10": (31.2, 62.5, 125, 125),
    r"L40S": (91.6, 183, 362.05, 362.05),
    r"L40": (90.5, 90.5, 181.05, 181.05),
    r"L4": (30.3, 60, 121, 121),
    r"V100-SXM.*": (15.7, None, None, 125),
    r"V100-PCIE.*": (14, None, None, 112),
    r"T4": (8.1, None, None, 65),
    r"RTX 5090": (104.8, 104.8, 209.5, 209.5),
    r"RTX 4090": (82.6, 82.6, 165.2, 165.2),
    r"RTX 3090": (35.6, 35.6, 71, 71),
    r"RTX A6000": (38.7, 77.4, 154.8, 154.8),
    r"RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2),
    r"AMD Instinct MI300X": (163.4, 653.7, 1307.4, 1307.4),
}
"""Dense matrix products in TFLOP/s in each of `_TYPES`, from the maker's data sheets; None: no units for this type, or no number published.

The keys are names of `torch.cuda.get_device_name` without the brand. Without sparsity, by which datasheets often double the numbers.

Sources:
    B200, B300: NVIDIA HGX datasheets, an eighth of the platform. GB200, GB300: those of the NVL72, a 72nd of the rack.
    H800, A800: as H100 and A100, but for float64 and the links. H20: its datasheet.
    H100, GH200, H200: the datasheet of each; SXM, NVL and PCIe differ.
    A100, A30, A40, A10, L40S, L40, L4, V100, T4: the datasheet of each.
    RTX 5090: NVIDIA RTX Blackwell GPU architecture, appendix. RTX 4090, RTX 6000 Ada: NVIDIA Ada GPU architecture, appendix.
    RTX 3090, RTX A6000: NVIDIA Ampere GA102 GPU architecture, appendix.
    MI300X: AMD Instinct MI300X data sheet.
Compared with its document: L40S and L40; H100 and A100 in bfloat16 with the tables of other projects. The others have still to be compared.
Those of the RTX cards are with sums in float32, as PyTorch takes them: in float16 some of them are twice as fast.
"""

_BRAND = re.compile(r"^(NVIDIA |Tesla |GeForce )*")


@dataclass(eq=False, kw_only=True)
class Throughput:
    world: World  # the ranks, each with one device
    objective: Any = None  # its units may be tokens (its `unit`)
    tokens_per_sample: int | None = None  # of data that is windows of tokens; None: of other data
    peak: float | None = None  # FLOP/s of the device; None: not known, and there is no `mfu`
    shapes: ShapeCopy | None = None  # model and objective, to count the operations of a step; None: they could not be copied
    has_cut_windows: bool = False  # the last step had: operations are counted of whole ones, and there is no `mfu`

    def __post_init__(self) -> None:
        self._counts_tokens = getattr(self.objective, "unit", "sample") in ("token", "next_token")
        self._batch: Batch = None  # shapes of the first micro-batch, until its operations are counted
        self._num_samples = 0  # of the first micro-batch
        self._flops_per_unit: float | None = None
        if self.world.device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.world.device)  # of an earlier job

    @property
    def wants_batch(self) -> bool:
        """Whether `see` is to be called with the first micro-batch."""
        return self.shapes is not None and self._batch is None

    def see(self, batch: Batch) -> None:
        """Note the shapes of a micro-batch, and its number of samples."""
        self._batch = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
        self._num_samples = batch_size(batch)

    def memory(self) -> list[float]:
        """Return the most that tensors took of this rank's device since the last call, torch's reserve on it, and the process's memory.

        In GiB; on a CPU the process alone. As many numbers on every rank.
        """
        host_gib = [resident_bytes() / _GIB]
        if self.world.device.type != "cuda":
            return host_gib
        stats = torch.cuda.memory_stats(self.world.device)  # of torch's allocator, on the host
        torch.cuda.reset_peak_memory_stats(self.world.device)
        return [stats.get("allocated_bytes.all.peak", 0) / _GIB, stats.get("reserved_bytes.all.current", 0) / _GIB, *host_gib]

    def values(self, *, samples: int, num_units: Sequence[float], seconds: float, memory: Sequence[float]) -> dict[str, float]:
        """Return a record's values of the last steps, from samples of all ranks, the steps' units, and the ranks' sum of `memory`."""
        size = self.world.size
        values = {"samples_per_s": samples / seconds, "samples_per_s_per_device": samples / seconds / size}
        tokens = sum(num_units) if self._counts_tokens else None
        units = samples if tokens is None else tokens
        if tokens is None and self.tokens_per_sample is not None:
            tokens = float(samples * self.tokens_per_sample)
        if tokens is not None:
            values |= {"tokens_per_s": tokens / seconds, "tokens_per_s_per_device": tokens / seconds / size}
        if self.shapes is not None and self._batch is not None:
            self._count_flops(self.shapes, units_per_sample=units / samples)
        if self._flops_per_unit is not None and self.peak is not None and not self.has_cut_windows:
            values["mfu"] = units * self._flops_per_unit / seconds / (size * self.peak)
        return values | dict(zip(_MEMORY[-len(memory) :], (total / size for total in memory), strict=True))

    def _count_flops(self, shapes: ShapeCopy, *, units_per_sample: float) -> None:
        try:
            with given_batch_size(self._num_samples):
                flops = shapes.count(self._batch, self.world.device)
            if not flops:
                raise ValueError("it has no matrix product that is known")
            self._flops_per_unit = flops / (self._num_samples * units_per_sample)
        except Exception as error:
            _report_no_mfu(error, self.world)
        self.shapes = self._batch = None


class ShapeCopy:
    """Model and objective on torch's meta device, as they are before anything wraps, compiles or shards them.

    So the model's own operations alone are counted, without those of a strategy or of a forward that is computed again for the backward.

    Raises Exception: they cannot be copied, or take turns, each with a backward of its own.
    """

    def __init__(self, trained_module: nn.Module, objective: Objective) -> None:
        if isinstance(objective, TurnObjective):
            raise ValueError("the parts of the objective take turns")
        shapes: dict[int, Any] = {}
        for module in (trained_module, module_of(objective)):
            if module is not None:
                shapes |= {id(tensor): _shape_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._trained_module, self._objective = copy.deepcopy((trained_module, objective), shapes)

    def count(self, batch: Batch, device: torch.device) -> int:
        """Return the operations of one forward and backward: 2 for each product of two numbers and its sum. Raises where values are needed.

        Counts matrix products, convolutions and torch's attention, a causal one as a full one. Custom kernels count as nothing. Random
        streams stay as they are.
        """
        from torch.utils.flop_counter import FlopCounterMode  # most runs do not need this module

        streams = random_state(device)
        try:
            with model_log.taken_by(None), FlopCounterMode(display=False) as counter:
                shapes = map_tensors(lambda tensor: tensor.to("meta"), batch)
                module = self._trained_module.model if isinstance(self._trained_module, LossModule) else self._trained_module
                loss_sum(self._objective, module, shapes).total.backward()
        finally:
            set_random_state(streams, device)
        return int(counter.get_total_flops())


def _shape_of(tensor: Tensor) -> Tensor:
    shape = torch.empty_like(tensor, device="meta")
    return nn.Parameter(shape, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def make_throughput(world: World, objective: Objective, trained_module: nn.Module, *, source: Any, peak: float | None) -> Throughput:
    """Return the throughput meter of a run, before the model is compiled or wrapped; `peak` is the device's, in FLOP/s."""
    has_lengths = getattr(source, "lengths", None) is not None  # a sample may be shorter than the longest
    window = None if has_lengths else source.facts.get("context_length")
    shapes = None
    if peak is not None:
        try:
            shapes = ShapeCopy(trained_module, objective)
        except Exception as error:
            _report_no_mfu(error, world)
    return Throughput(world=world, objective=objective, tokens_per_sample=window, peak=peak, shapes=shapes)


def _report_no_mfu(error: Exception, world: World) -> None:
    logger.debug("no mfu", exc_info=error)
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    world.print(f"mfu      left out: the operations of a step cannot be counted ({why})")


def peak_of(device: torch.device, amp: Amp, model: nn.Module, *, cast: torch.dtype | None = None) -> float | None:
    """Return the peak FLOP/s of a device in the type of a model's products; None: not known (a CPU, a part of a GPU)."""
    if device.type != "cuda":
        return None
    return lookup(torch.cuda.get_device_name(device), products(amp, model, device, cast=cast))


def lookup(name: str, product: str) -> float | None:
    """Return the FLOP/s in the table for a device's name and the type of a product."""
    plain = _BRAND.sub("", name)
    row = next((peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, plain) and "MIG" not in plain), ())
    tera = dict(zip(_TYPES, row, strict=False)).get(product)
    return None if tera is None else tera * 1e12


def products(amp: Amp, model: nn.Module, device: torch.device, *, cast: torch.dtype | None = None) -> str:
    """Return the type of a model's matrix products: `float32`, `tf32`, or another of torch's; a strategy may cast weights to `cast`."""
    with amp.autocast(device):
        if torch.is_autocast_enabled(device.type):
            return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    dtypes = {cast} if cast is not None else {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    name = str(max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)).removeprefix("torch.")
    return "tf32" if name == "float32" and _uses_tf32(model) else name


def _uses_tf32(model: nn.Module) -> bool:
    """Tell whether float32 is rounded for the tensor cores; by default it is for convolutions."""
    has_convolutions = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in model.modules())
    backends: Any = torch.backends
    operations = [backends.cuda.matmul, *([backends.cudnn.conv] if has_convolutions else [])]
    return any(operation.fp32_precision == "tf32" for operation in operations)  # `allow_tf32` raises once this newer name was used
