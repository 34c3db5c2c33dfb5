"""What people get who install the package: everything that the pages promise, from the wheel and from the sdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from ddp_train import FOLDER, __version__

ROOT = FOLDER.parent
for package in ("hatchling", "hatch_fancy_pypi_readme"):
    pytest.importorskip(package, reason="needs what builds the package: make train installs it")


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel as pip does, in a process of its own: hatchling reads the current folder."""
    code = f"import hatchling.build, sys; hatchling.build.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True)
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the sdist, as pip builds it of what it has downloaded."""
    folder = tmp_path_factory.mktemp("package")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", next(path for path in folder.iterdir() if path.is_dir()), folder)


def test_the_wheel_has_conf_starter_pages_and_types(wheel: Path) -> None:
    files = set(ZipFile(wheel).namelist())
    wanted = {"ddp_train/examples/airbench94/README.md", "hydra_plugins/ddp_train_launcher/__init__.py"}
    wanted |= {"ddp_train/py.typed", "ddp_train/__init__.pyi", "ddp_train/config/field_words.yaml"}
    page = ("page.css", "page.html", "page.js", "uplot/LICENSE", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
    wanted |= {f"ddp_train/archive/report/{name}" for name in page}
    for folder in ("conf", "docs", "starter"):
        paths = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        wanted |= {f"ddp_train/{path}" for path in paths}
    modules = (path.relative_to(ROOT) for path in FOLDER.rglob("*.py"))
    assert {str(path) for path in modules if path.parts[1] != "conf"} | wanted <= files
    assert not [name for name in files if name.startswith(("tests/", "outputs/")) or "__pycache__" in name]


def test_the_page_of_the_package_is_readme_with_commands_in_the_place_of_links_into_the_repository(wheel: Path) -> None:
    archive = ZipFile(wheel)
    metadata = message_from_bytes(archive.read(f"ddp_train-{__version__}.dist-info/METADATA"))
    page = str(metadata.get_payload())
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("MIT", ">=3.11")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# ddp_train" in page
    assert [link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith("http")] == []
    pages = re.findall(r"`ddp-train help (docs/[^`]+)`", page)
    assert len(pages) > 20
    assert [name for name in pages if f"ddp_train/{name}" not in archive.namelist()] == []


def test_a_release_passes_the_check_of_the_package_index(wheel: Path) -> None:
    pytest.importorskip("twine", reason="needs twine: make dist installs it")
    files = [str(path) for path in wheel.parent.iterdir() if path.is_file()]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


def test_help_shows_every_page_and_file_that_a_message_names(wheel: Path, tmp_path: Path) -> None:
    assert wheel.stat().st_size < 1_600_000
    with ZipFile(wheel) as content:
        content.extractall(tmp_path / "there")
    there = tmp_path / "there/ddp_train"
    named = {
        name
        for file in (*there.rglob("*.py"), *(there / "conf").rglob("*.yaml"))
        for name in re.findall(r"(?<![\w/-])docs/[\w/-]+\.md", file.read_text())
    }
    assert len(named) > 10 and [name for name in sorted(named) if not (there / name).exists()] == []
    words = [sys.executable, "-m", "ddp_train", "help"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PYTHONPATH": str(there.parent)}
    page, key = (
        subprocess.run([*words, asked], cwd=tmp_path, env=kept, capture_output=True, text=True, check=True).stdout
        for asked in ("docs/data.md", "optimizer.lr")
    )
    assert page == (there / "docs/data.md").read_text()
    assert "defined in there/ddp_train/conf/optimizer/adamw.yaml:" in key
