"""A page of README or docs as a project: its files, and what a reader would type.

How pages are written, so that this can read them:

- What is indented by four spaces, or fenced, is a block. A block whose first lines name a file in a comment (`# my_package.py`,
  `# my_conf/data/digits.yaml, used as ...`) is that file; all files of a page lie in one folder.
- A line of a block that begins with a program (`ddp-train`, `torchrun`, `make`, ...) is a command, also behind `$ `. A line that ends
  with `\\` goes on. What follows two blanks and `#` is a remark.
- A block that is nothing of all this is Python, which tests/docs/test_python.py runs, or output and drawings, which tests/docs/test_site.py
  lists.
- `RUN` and `SWEEP` are folders of runs, and words in capitals are the reader's own (`FOLDER`, `FILE`).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)]

_PROGRAMS = (
    *(
        "ddp-train",
        "torchrun",
        "python",
        "make",
        "pip",
        "git",
        "cd",
        "export",
        "eval",
        "cat",
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "pytest",
    ),
    *("srun", "sbatch", "salloc", "launch/multinode.sh", "accelerate"),
)
_NAMED_FILE = re.compile(r"^# ([\w./-]+\.(?:py|yaml|csv|toml))\b")
_VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]*=\S*$")


@dataclass(frozen=True)
class Block:
    """Lines that are shown as they are."""

    page: Path
    line: int  # of its first line, from 1
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is; None where it is none."""
        found = [match[1] for line in self.text.splitlines()[:2] if (match := _NAMED_FILE.match(line))]
        return found[0] if found else None

    @property
    def is_yaml(self) -> bool:
        """Whether it is a piece of a configuration."""
        if self.file is not None:
            return self.file.endswith(".yaml")
        lines = [line for line in self.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        return bool(lines) and all(re.match(r"^\s*(- |[\w.+~/ @]+:( |$))", line) for line in lines)

    @property
    def is_python(self) -> bool:
        """Whether it is Python that stands in no file."""
        try:
            lines = ast.parse(self.text).body
        except SyntaxError:
            return False
        return self.file is None and not self.is_yaml and any(not isinstance(line, ast.Expr) for line in lines)

    @property
    def is_refused(self) -> bool:
        """Whether it shows what a mistake is answered."""
        return "in the configuration; nothing was started" in self.text

    def commands(self) -> Iterator[Command]:
        """Yield what is typed in it."""
        if self.file is not None or self.is_yaml:
            return
        lines = enumerate(self.text.splitlines(), self.line)
        for number, line in lines:
            text = line.removeprefix("$ ") if line.startswith("$ ") else line
            while text.endswith("\\"):
                text = text[:-1].rstrip() + " " + next(lines)[1].strip()
            for part in re.split(r"\s{2,}(?=\$? ?(?:ddp-train) )", re.sub(r"\s{2,}(#|<-).*$", "", text)):
                words = _words(part)
                while words and _VARIABLE.match(words[0]):
                    words = words[1:]
                if words and words[0].removeprefix(".venv/bin/") in _PROGRAMS:
                    yield Command(self.page, number, [words[0].removeprefix(".venv/bin/"), *words[1:]])


@dataclass(frozen=True)
class Command:
    """A line that is typed."""

    page: Path
    line: int
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"

    def typed_at_ddp_train(self) -> list[str] | None:
        """Return what follows `ddp-train`, or `torchrun -m ddp_train`, also behind `srun`; None where it is another program's."""
        words = self.words
        if words[0] == "launch/multinode.sh":
            return words[1:]
        if words[0] in ("torchrun", "python", "srun") and "ddp_train" in words:
            return words[words.index("ddp_train") + 1 :]
        if words[0] == "srun" and "ddp-train" in words:
            return words[words.index("ddp-train") + 1 :]
        return words[1:] if words[0] == "ddp-train" else None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    found: list[Block] = []
    gathered: list[str] = []
    start, fence = 0, ""
    lines = page.read_text().splitlines()

    def end() -> None:
        nonlocal gathered
        while gathered and not gathered[-1].strip():
            gathered.pop()
        if gathered:
            found.append(Block(page, start, "\n".join(gathered) + "\n"))
        gathered = []

    is_in_list = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            end()
            fence, start = ("" if fence else "```"), number + 1
        elif fence:
            gathered.append(line)
        elif line.startswith("    ") and (gathered or (not lines[number - 2].strip() and not is_in_list)):
            if not gathered:
                start = number
            gathered.append(line[4:])
        elif not line.strip() and gathered:
            gathered.append("")
        else:
            end()
            if line.strip():
                is_in_list = bool(re.match(r"^(\d+\.|[-*]) ", line)) or (is_in_list and line.startswith("  "))
    end()
    return found


def commands(page: Path) -> list[Command]:
    """Return all that a page's blocks let a reader type, but for mistakes."""
    return [command for block in blocks(page) if not block.is_refused for command in block.commands()]


def inline(page: Path) -> Iterator[Command]:
    """Yield the commands of a page that stand within its text."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("    "):
            for text in re.findall(rf"`((?:{'|'.join(_PROGRAMS)}) [^`]+)`", line):
                yield Command(page, number, _words(text))


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the files of a page into a folder, and return them."""
    found = []
    for block in blocks(page):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            is_table = path.suffix == ".csv"  # whose first line is its columns
            path.write_text(block.text.partition("\n")[2] if is_table else block.text)
            found.append(path)
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a line of output with one quote
        return []
