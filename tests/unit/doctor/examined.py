"""Machines as the doctor has examined them, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddp_train.doctor.machine import MachineReport, PeerReport
from ddp_train.doctor.problems import ClusterReport, Measurement
from tests.unit.launch.node_facts.machines import facts

HEALTHY = MachineReport(
    facts=facts(),
    address=("10.0.0.1", 4000),
    write_error="",
    free_bytes=100 << 30,
    shared_memory_bytes=8 << 30,
    open_files=65536,
    locked_bytes=None,
)
WAY = PeerReport(gloo="eth0")


def three(
    machines: dict[int, dict[str, Any]] | None = None,
    peers: dict[int, dict[str, Any]] | None = None,
    told: dict[int, dict[str, Any]] | None = None,
    measurements: dict[int, dict[str, Any]] | None = {},  # noqa: B006  # never changed
    **changes: Any,
) -> ClusterReport:
    """Return three healthy machines of a rank each, with what is said to be otherwise, by machine.

    Args:
        told: what is otherwise in their facts.
        measurements: what is otherwise with their ranks' sums; None: they were not tried.
    """
    given: dict[str, Any] = {
        "count": 3,
        "processes": 3,
        "folder": "outputs/x",
        "clocks": dict.fromkeys(range(3), 0.0),
        "machines": {
            number: replace(
                HEALTHY,
                **{
                    "facts": facts(f"node{number}", **{"node_rank": number, "processes": 1, **(told or {}).get(number, {})}),
                    **(machines or {}).get(number, {}),
                },
            )
            for number in range(3)
        },
        "peers": {number: replace(WAY, **(peers or {}).get(number, {})) for number in range(3)},
        "measurements": None
        if measurements is None
        else {
            number: replace(Measurement(rank=number, machine=number, device="cpu"), **measurements.get(number, {})) for number in range(3)
        },
    }
    return ClusterReport(**(given | changes))
