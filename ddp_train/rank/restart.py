"""What an attempt does about the one before it: one line says why the ranks have started again, and its report is archived."""

from pathlib import Path

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.errors import FINAL
from ddp_train.launch import restart_note
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.system import process_env

_SHOWN = 160  # characters of an error in the one line of a restart


def final_code_before(continues_from: Path) -> int | None:
    """Return the exit code of the failure that this attempt follows, if nothing is to be tried again after it; None: go on (rank 0)."""
    report = failure.load_report(_run_folder_of(continues_from).failure)
    return report.exit_code if report is not None and report.exit_code in FINAL and _follows_failure() else None


def archive_earlier_failure(continues_from: Path, size: int) -> None:
    """Say why the run starts again, and archive the failure of the attempt before (rank 0)."""
    run_folder = _run_folder_of(continues_from)
    print(restart_line(run_folder, size=size, has_failed=_follows_failure()), flush=True)
    run_folder.archive_failure()


def _run_folder_of(continues_from: Path) -> RunFolder:
    return RunFolder.of_checkpoint(continues_from) if is_checkpoint(continues_from) else RunFolder(continues_from)


def _follows_failure() -> bool:
    """Tell whether a failure on this machine came before this attempt, and no machine that came or went."""
    note = restart_note.recall_run()
    return note is not None and process_env.restart_count() > note.restarts


def restart_line(run_folder: RunFolder, *, size: int, has_failed: bool) -> str:
    """Say in one line why the ranks have started again, and where they continue. To be asked before the earlier failure is archived.

    The failure's screen is for the last failure. The ones before it stay as failure.1.json, failure.2.json, ...

    `has_failed`: whether a failure on this machine is the reason.
    """
    place = "continues the sweep" if is_sweep(run_folder.root) else run_folder.resume_point_text()
    report = failure.load_report(run_folder.failure)
    if report is None and not has_failed:
        return f"the set of machines changed; {size} ranks continue {place.removeprefix('continues ')}"
    reason = "a rank ended without a report"
    if report is not None and report.kind == failure.FailureKind.MACHINE:
        reason = report.message
    elif report is not None and report.kind != failure.FailureKind.CONNECTION:
        reason = f"rank {report.rank} failed ({report.error if report.error.startswith('SIG') else report.line(_SHOWN)})"
    return f"{reason}; restart {process_env.restart_count()} of {process_env.max_restarts()} {place}"
