"""What a step takes on top of weights and gradients, with and without activation checkpointing: the most that the process had.

    MALLOC_MMAP_THRESHOLD_=65536 python -m tests.benchmark.activation_memory

The kernel counts it. Each setting has a process of its own. A GPT of 12 layers, 8 samples of 256 tokens, float32, on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ddp_train.model.gpt import GPT
from ddp_train.system.process import fork
from ddp_train.training.build.activation_checkpointing import checkpoint_activations
from tests.benchmark.strategy_memory import in_memory
from tests.unit.parts import checked

SETTINGS = {
    "off": [],
    "full": ["activation_checkpointing=full"],
    "selective": ["activation_checkpointing=selective"],
    "full, every=2": ["activation_checkpointing=full", "activation_checkpointing.every=2"],
}
_MB = 1e6


def measure(*overrides: str) -> float:
    """Return the megabytes that the second step took at most, beside what lasts and its gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(vocab_size=256, context_length=256, num_layers=12, num_heads=8, width=256)
    checkpoint_activations(model, checked(*overrides).activation_checkpointing)
    tokens = torch.randint(0, 256, (8, 256))
    before = 0
    for _ in range(2):
        model.zero_grad()
        before = in_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    return (in_memory("VmHWM") - before - gradients) / _MB


def main() -> None:
    """Print a line for each setting."""
    for name, overrides in SETTINGS.items():

        def work(name: str = name, overrides: list[str] = overrides) -> int:
            print(f"{name:14} {measure(*overrides):8,.0f} MB", flush=True)
            return 0

        fork(work).wait()


if __name__ == "__main__":
    main()
