"""`ddp-train init DIR`: make a project to start from, with its own parts, its YAML over that of ddp_train, an experiment and a test."""

import importlib.util
import keyword
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ddp_train import FOLDER
from ddp_train.cli.saved_run import parse_words
from ddp_train.errors import DONE, UserError
from ddp_train.launch.job_runner import JobRunner

USAGE = """ddp-train init DIR

  Creates a project in the new folder DIR: a package of the same name with a model, a data set, a metric and a callback; conf/ with their
  YAML on top of ddp_train's, and .schema/, with which editors complete and check it; an experiment; a test; a README with the commands.
  The project trains as it is. Commands typed inside it find its conf/ without flags, because pyproject.toml names it.
"""

_PACKAGE, _DISTRIBUTION = "my_project", "my-project"  # the names in the starter
_FIX = "ddp-train init ANOTHER_NAME"


def init(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train init DIR`: make a project to start from."""
    _, (typed,) = parse_words(arguments, USAGE, {})
    folder = Path(typed)
    package = _package(folder.resolve().name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        state = "has files in it" if folder.is_dir() else "is a file"
        raise UserError(happened=f"{folder} exists already and {state}", expected="a new folder, or an empty one", fix=_FIX)
    _write(folder, package)
    schema = subprocess.run([sys.executable, "-m", "ddp_train", "schema", ".schema"], cwd=folder, check=False)  # imports the new package
    if schema.returncode != DONE:  # its error is on the terminal
        print(f"{folder} has no schemas for editors yet; in it, write them with: ddp-train schema .schema")
    print(f"{folder} is a project; its README.md describes the files. Try:")
    print(f"  cd {shlex.quote(str(folder))}\n  ddp-train debug=fast\n  ddp-train")
    return DONE


def _write(folder: Path, package: str) -> None:
    """Copy the starter's files, with the package's name in them."""
    source = starter()
    for file in sorted(source.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        copy = folder / str(file.relative_to(source)).replace(_PACKAGE, package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text().replace(_PACKAGE, package).replace(_DISTRIBUTION, package.replace("_", "-")))


def _package(name: str) -> str:
    """Return the name of the package for a folder's name. UserError: Python does not allow it, or another module has it."""
    package = re.sub(r"[-. ]", "_", name).lower()
    if keyword.iskeyword(package) or not package.isidentifier() or package.startswith("__"):
        expected = "letters, digits, '-' and '_', a letter first, and no Python keyword"
        raise UserError(happened=f"{name} is not a valid name of a Python package", expected=expected, fix=_FIX)
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:  # None: a folder
        where = "" if spec.origin in ("built-in", "frozen") else f": {spec.origin}"
        raise UserError(happened=f"there is a module {package} already{where}", expected="a new name", fix=_FIX)
    return package


def starter() -> Path:
    """Return the starter: inside the installed package, or at the top of a checkout. The source copy of a run has none."""
    return next(path.resolve() for path in (FOLDER / "starter", FOLDER.parent / "starter") if path.is_dir())
