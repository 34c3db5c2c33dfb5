"""What a run has said where a terminal would have shown it: an engine's logs (logs/*.out), or else the log of rank 0."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_train.errors import printable
from ddp_train.run_folder.paths import RunFolder

_CHUNK = 1 << 20  # bytes of a file that are read at a time
_JOB = re.compile(r"^[a-z]+-(\d+)")


class LogTail:
    """Reads what is added to the logs of a run; new files, too.

    Args:
        last: how many bytes of what is there already are read first.
    """

    def __init__(self, run_folder: RunFolder, *, last: int = 0) -> None:
        self._run_folder = run_folder
        self._places = {path: max(0, path.stat().st_size - last) for path in self._files()}  # how far each file was read

    def lines(self) -> list[str]:
        """Return the whole lines since the last call; with the machine before them where several have a log."""
        files = self._files()
        machines = {path: path.stem.split("-", 2)[2] for path in files if path.stem.count("-") > 1}
        found = []
        for path in files:
            name = f"{machines[path]}: " if path in machines and len(machines) > 1 else ""
            found += [f"{name}{printable(line)}" for line in self._new_lines(path)]
        return found

    def _new_lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                new = file.read(_CHUNK)
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == _CHUNK else b"")  # a progress bar may never end its line
        self._places[path] = self._places.get(path, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()

    def _files(self) -> list[Path]:
        """Return the logs of the newest job, its own before those of its machines."""
        jobs = {path: int(found[1]) if (found := _JOB.match(path.name)) else 0 for path in self._run_folder.logs.glob("*.out")}
        newest = [path for path, job in jobs.items() if job == max(jobs.values())]
        return sorted(newest, key=lambda path: (len(path.name), path.name)) or [
            path for path in [self._run_folder.rank_log(0)] if path.exists()
        ]
