"""The pictures of README and docs, from real runs: `make pictures`. Never by hand; a picture is as old as its commit.

Terminals by rich's SVG export, the drawing of the composition from the groups in conf/, TensorBoard by a Chromium without a window.
"""

from __future__ import annotations

import html
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from tests.docs.pages import ROOT
from tests.unit.archive.report.browser import chromium

PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 100
MAX_BYTES = 200_000
TERMINALS = {
    "run": (["ddp-train", "model=convnet", "trainer.max_epochs=2"], 0),
    "failed": (["ddp-train", "model=mlp", "debug=faults", "debug.faults=[{kind:exception,rank:1,step:30}]"], 1),
    "wrong_key": (["ddp-train", "trainer.max_stepz=3", "model=convet"], 2),
    "sweep": (["ddp-train", "-m", "model=mlp,convnet", "optimizer.lr=0.003,0.01", "trainer.max_epochs=3"], 0),
}
"""Name of a picture -> what is typed, and the exit code that belongs to it."""

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (words, code) in TERMINALS.items():
            (PICTURES / f"{name}.svg").write_text(terminal(words, Path(scratch), code))
        (PICTURES / "composition.svg").write_text(composition())
        browser = next((path for each in _BROWSERS if (path := shutil.which(each))), None)
        if browser is None:
            print(f"tensorboard.png stays as it is: none of {', '.join(_BROWSERS)} is installed")
        else:
            tensorboard(Path(scratch), browser)
            report(Path(scratch))
    for picture in sorted(PICTURES.iterdir()):
        print(f"{picture.relative_to(ROOT)}  {picture.stat().st_size / 1000:.0f} kB")
        assert picture.stat().st_size < MAX_BYTES


def terminal(words: list[str], folder: Path, code: int) -> str:
    """Run a command in `folder` and return what a person sees of it, as SVG."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": str(COLUMNS)}
    ended = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.returncode == code, ended.stdout
    typed = " ".join(f"'{word}'" if set(word) & set("[{") else word for word in words)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "bold green"), (typed, "bold")))
    console.print(Text.from_ansi(ended.stdout.replace(f"{folder}/", "").replace(f"{ROOT}/", "").rstrip() + "\n"))
    return console.export_svg(title="ddp-train")


def composition() -> str:
    """Draw how a run comes about: the groups of conf/, one composition, the ranks."""
    groups = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("__pycache__", "hydra"))
    width, columns, row = 960, 5, 30
    column = (width - 40) // columns
    drawn = [
        _text(20, 34, "conf/: one YAML of each group", "head"),
        _text(width - 20, 34, "what is typed: key=value, group=option", "head", anchor="end"),
    ]
    for number, group in enumerate(groups):
        drawn.append(_box(20 + number % columns * column, 50 + number // columns * (row + 8), column - 8, row, group, "group"))
    top = 50 + -(-len(groups) // columns) * (row + 8) + 34
    drawn += [
        _arrow(width / 2, top - 34, width / 2, top - 4),
        _box(160, top, width - 320, 40, "Hydra composes once, in one process; all mistakes are shown before anything starts", "step"),
        _arrow(width / 2, top + 42, width / 2, top + 66),
        _box(160, top + 70, width - 320, 40, "one run folder: config.yaml; torchrun's agents: here, on machines, SLURM, ssh", "step"),
    ]
    for number in range(4):
        x = 60 + number * 220
        drawn += [
            _arrow(width / 2, top + 112, x + 90, top + 142),
            _box(x, top + 146, 180, 44, f"rank {number}: parts by _target_", "rank"),
        ]
    bottom = top + 212
    drawn += [
        f'<path class="line" d="M60 {bottom} H{width - 60}"/>',
        _text(width / 2, bottom + 22, "gradients: all-reduce over NCCL or gloo", "small", anchor="middle"),
        _text(width / 2, bottom + 46, "metrics.jsonl   tensorboard/   checkpoints/   logs/   result.json", "small", anchor="middle"),
    ]
    style = (
        "text{font:14px ui-sans-serif,system-ui,sans-serif;fill:#1f2937}.head{font-weight:600}.small{fill:#4b5563}"
        "rect{rx:6;stroke:#94a3b8;fill:#f8fafc}.step rect{fill:#e0e7ff;stroke:#6366f1}.rank rect{fill:#dcfce7;stroke:#16a34a}"
        ".line{stroke:#64748b;fill:none}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 64}" role="img" aria-label="How a run is composed">'
    tip = '<path d="M0 0 L6 3 L0 6 z" fill="#64748b"/>'
    arrow = f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">{tip}</marker></defs>'
    background = f'<rect x="0" y="0" width="{width}" height="{bottom + 64}" style="fill:#ffffff;stroke:none"/>'
    return "\n".join([head, f"<style>{style}</style>", arrow, background, *drawn, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, label: str, kind: str) -> str:
    text = _text(x + width / 2, y + height / 2 + 5, label, "", anchor="middle")
    return f'<g class="{kind}"><rect x="{x}" y="{y}" width="{width}" height="{height}"/>{text}</g>'


def _text(x: float, y: float, label: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(label)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="line" marker-end="url(#tip)" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>'


def tensorboard(folder: Path, browser: str) -> None:
    """Show the runs in `folder` as TensorBoard does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "tensorboard", "--logdir", folder / "outputs/default/sweeps", "--port", str(port)]
    served = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1280,800",
            "--virtual-time-budget=20000",
        ]
        picture = f"--screenshot={PICTURES / 'tensorboard.png'}"
        address = f"http://127.0.0.1:{port}/#scalars&tagFilter=loss%7Caccuracy%24"
        subprocess.run([browser, *options, picture, address], check=True, stderr=subprocess.DEVNULL, timeout=120)
    finally:
        served.terminate()
        served.wait()


def report(folder: Path) -> None:
    """Show the newest sweep in `folder` as `ddp-train report` does."""
    sweep = max(path.parent for path in (folder / "outputs/default/sweeps").glob("*/sweep.json"))
    subprocess.run([Path(sys.executable).parent / "ddp-train", "report", sweep, f"--out={folder / 'report.html'}"], check=True)
    with chromium(folder / "profile") as browser:
        browser.open(folder / "report.html", width=1280, height=1240)
        browser.run("document.querySelector('.top').style.position = 'static'")
        browser.screenshot(PICTURES / "report.png")
    Image.open(PICTURES / "report.png").convert("RGB").quantize(96).save(PICTURES / "report.png", optimize=True)  # half of the bytes


if __name__ == "__main__":
    main()
