"""Ranks that are started again: the one line that says why, and where they continue.

The failure screen is for the last failure. The ones before it stay as failure.1.json, failure.2.json, ...
"""

from __future__ import annotations

from pathlib import Path

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.sweep.folder import is_sweep
from ddp_train.system.torchrun_env import max_restarts, restart_count

LOST = "Another rank ended without a report and broke the connection"
"""What a rank adds to its failure when its collective broke: it is not the one to blame."""

_SHOWN = 160  # characters of an error in the one line


def run_folder(remembered: Path) -> Path:
    """Return the run folder of what was remembered: itself, or a checkpoint in it."""
    return remembered.parent.parent if is_checkpoint(remembered) else remembered


def line(run_folder: RunFolder, *, size: int, has_failed: bool) -> str:
    """Say why the ranks have started again, and where they continue. To be asked before the earlier failure makes way.

    Args:
        size: the number of ranks now.
        has_failed: whether a failure on this machine is the reason.
    """
    restart = f"restart {restart_count()} of {max_restarts()}"
    if is_sweep(run_folder.root):
        return f"{'a process ended' if has_failed else 'the machines have changed'}; {restart} continues the sweep"
    place = run_folder.continues()
    found = failure.load(run_folder.failure)
    if found and found.error == failure.MACHINE_LOST:
        return f"{found.message}; {restart} {place}"
    if found and LOST not in found.traceback:
        message = found.error if found.error.startswith("SIG") else found.line(_SHOWN)  # a signal's name says it all
        return f"rank {found.rank} failed ({message}); {restart} {place}"
    if found or has_failed:
        return f"a rank ended without a report; {restart} {place}"
    return f"the machines have changed; {size} ranks continue {place}"
