"""How fast a device can multiply matrices at best: the table that `mfu` in the record is a share of."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_train.amp import Amp


class Peak(NamedTuple):
    """Dense matrix products in TFLOP/s, as the maker says; None: the device has no units for the type, or the maker says nothing."""

    float32: float
    tf32: float | None
    bfloat16: float | None
    float16: float


_PEAKS: dict[str, Peak] = {
    r"GB200|GB300": Peak(80, 1250, 2500, 2500),
    r"B200|B300.*": Peak(75, 1125, 2250, 2250),
    r"H20": Peak(44, 74, 148, 148),
    r"GH200.*|H[18]00( \d+GB HBM3)?|H200": Peak(67, 494.7, 989.4, 989.4),
    r"H100 NVL|H200 NVL": Peak(60, 417.5, 835.5, 835.5),
    r"H[18]00 PCIe": Peak(51, 378, 756, 756),
    r"A100.*|A800-SXM4.*|A800 \d+GB PCIe": Peak(19.5, 156, 312, 312),
    r"A30": Peak(10.3, 82, 165, 165),
    r"A40": Peak(37.4, 74.8, 149.7, 149.7),
    r"A10": Peak(31.2, 62.5, 125, 125),
    r"L40S": Peak(91.6, 183, 362.05, 362.05),
    r"L40": Peak(90.5, 90.5, 181.05, 181.05),
    r"L4": Peak(30.3, 60, 121, 121),
    r"V100-SXM.*": Peak(15.7, None, None, 125),
    r"V100-PCIE.*": Peak(14, None, None, 112),
    r"T4": Peak(8.1, None, None, 65),
    r"RTX 5090": Peak(104.8, 104.8, 209.5, 209.5),
    r"RTX 4090": Peak(82.6, 82.6, 165.2, 165.2),
    r"RTX 3090": Peak(35.6, 35.6, 71, 71),
    r"RTX A6000": Peak(38.7, 77.4, 154.8, 154.8),
    r"RTX 6000 Ada Generation": Peak(91.1, 182.1, 364.2, 364.2),
    r"AMD Instinct MI300X": Peak(163.4, 653.7, 1307.4, 1307.4),
}
"""By the names that `torch.cuda.get_device_name` gives, without the brand. Without sparsity, by which datasheets often double them.

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


def peak_of(device: torch.device, amp: Amp, model: nn.Module, *, cast: torch.dtype | None = None) -> float | None:
    """Return the FLOP/s of a device at best in the type that a model's products have; None: not known (a CPU, a part of a GPU)."""
    if device.type != "cuda":
        return None
    return lookup(torch.cuda.get_device_name(device), products(amp, model, device, cast=cast))


def lookup(name: str, product: str) -> float | None:
    """Return what the table has for a device's name and the type of a product, in FLOP/s."""
    plain = _BRAND.sub("", name)
    found = next((peak for pattern, peak in _PEAKS.items() if re.fullmatch(pattern, plain) and "MIG" not in plain), None)
    tera = getattr(found, product, None)
    return None if tera is None else tera * 1e12


def products(amp: Amp, model: nn.Module, device: torch.device, *, cast: torch.dtype | None = None) -> str:
    """Return the type that a model's matrix products have: `float32`, `tf32`, `bfloat16`, `float16`, or another one of torch's.

    Args:
        cast: in which type a strategy lets the weights compute; None: in their own.
    """
    with amp.autocast(device):
        if torch.is_autocast_enabled(device.type):
            return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    kinds = {cast} if cast is not None else {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    kind = str(max(kinds, key=lambda each: each.itemsize, default=torch.float32)).removeprefix("torch.")
    return "tf32" if kind == "float32" and _uses_tf32(model) else kind


def _uses_tf32(model: nn.Module) -> bool:
    """Tell whether float32 is rounded for the tensor cores: for convolutions it is unless somebody forbids it."""
    has_convolutions = any(isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in model.modules())
    backends: Any = torch.backends
    asked = [backends.cuda.matmul, *([backends.cudnn.conv] if has_convolutions else [])]
    return any(each.fp32_precision == "tf32" for each in asked)  # `allow_tf32` raises once anything has used this newer name
