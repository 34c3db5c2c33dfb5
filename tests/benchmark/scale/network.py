"""What the collectives of a step cost on published networks: latency and bandwidth, by ring and by tree, as NCCL reckons itself.

    ring, all-reduce                  2 (n - m) a' + 2 (m - 1) a + 2 (n - 1)/n S / B
    ring, reduce-scatter, all-gather  half of it
    tree, all-reduce                  2 (n/m - 1) b' + 2 log2(m) b + 2 S / (0.92 B)

with n GPUs in m nodes, S bytes, B a node's bandwidth; a and b the latency of a hop between nodes, a' and b' inside one.

Sources: NCCL's src/graph/tuning.cc (the formulas, and the latencies of its protocol LL128); Sanders, Speck, Traeff 2009, "Two-Tree
Algorithms for Full Bandwidth Broadcast, Reduction and Scan" (the trees). A model: no congestion, no stragglers, no switch that reduces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GPUS = 8  # in a node


@dataclass(frozen=True, kw_only=True)
class Network:
    """A kind of cluster with eight GPUs in a node."""

    name: str
    inside_gb_s: float  # bus bandwidth, in a node
    outside_gb_s: float  # between nodes, of a whole node
    ring_us: float = 4.0  # one hop between nodes
    tree_us: float = 8.5
    tflops: float  # bf16, dense, of a GPU
    source: str


RING_INSIDE_US, TREE_INSIDE_US = 1.9, 1.2  # NVLink

NETWORKS = (
    Network(
        name="H100, 8 x 400G InfiniBand",
        inside_gb_s=370,
        outside_gb_s=376,
        tflops=989,
        source="nccl-tests #290: 46 to 48 GB/s for each 400G card; inside, NVLink 4 without its switches' sums (with them 476 GB/s there)",
    ),
    Network(
        name="A100, 4 x 200G InfiniBand",
        inside_gb_s=230.8,
        outside_gb_s=84.8,
        tflops=312,
        source="nccl-tests #119 (three nodes, 84.8 GB/s of 100); inside NVIDIA/nccl #527",
    ),
    Network(
        name="H100, 32 x 100G EFA",
        inside_gb_s=370,
        outside_gb_s=300,
        ring_us=15,
        tree_us=15,
        tflops=989,
        source="AWS p5's line rate, 400 GB/s, x 0.75: an assumption, as the latency is; nobody's measurement",
    ),
    Network(
        name="A100, 100G Ethernet",
        inside_gb_s=230.8,
        outside_gb_s=11.2,
        ring_us=25,
        tree_us=25,
        tflops=312,
        source="one card for a node, line rate 12.5 GB/s x 0.9: an assumption, as the latency of sockets is",
    ),
)

MODELS = {"GPT-2 124M": 124e6, "GPT-2 1.3B": 1.3e9, "GPT 7B": 6.7e9}  # parameters


def all_reduce_s(network: Network, num_bytes: float, ranks: int, *, by: str) -> float:
    """Return how long an all-reduce takes.

    Args:
        by: ring or tree.
    """
    nodes = max(1, ranks // GPUS)
    bandwidth = 1e9 * (network.inside_gb_s if nodes == 1 else network.outside_gb_s)
    if by == "ring":
        latency_us = 2 * (ranks - nodes) * RING_INSIDE_US + 2 * (nodes - 1) * network.ring_us
        return latency_us / 1e6 + 2 * (ranks - 1) / ranks * num_bytes / bandwidth
    latency_us = 2 * (min(ranks, GPUS) - 1) * TREE_INSIDE_US + 2 * math.log2(nodes) * network.tree_us
    return latency_us / 1e6 + 2 * num_bytes / (0.92 * bandwidth)


def scatter_or_gather_s(network: Network, num_bytes: float, ranks: int) -> float:
    """Return how long a reduce-scatter or an all-gather takes, by ring: half an all-reduce."""
    return all_reduce_s(network, num_bytes, ranks, by="ring") / 2


def compute_s(network: Network, parameters: float, tokens: int, *, mfu: float = 0.4) -> float:
    """Return how long forward and backward of so many tokens take on one GPU, six operations a parameter and token."""
    return 6 * parameters * tokens / (network.tflops * 1e12 * mfu)
