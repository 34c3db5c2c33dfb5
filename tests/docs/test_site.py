"""The site of `make docs` shows every page, each once. `make docs` itself ends at a broken link or anchor."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from tests.docs.pages import PAGES, ROOT, blocks

FREE = {"docs/decisions"}  # reached from the pages that name them, and by the search
NO_CODE = {
    "docs/architecture.md": 2,
    "docs/clusters.md": 1,
    "docs/compute.md": 1,
    "docs/concepts.md": 2,
    "docs/profiling.md": 1,
    "docs/runs.md": 4,
    "docs/sweeps.md": 1,
    "docs/time.md": 2,
}
"""How many blocks of a page are drawings and output. All other blocks are read by tests: commands, files, YAML, Python."""


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for page in entry.values():
            if isinstance(page, str):
                yield page
            else:
                yield from pages_of(page)


def test_every_page_is_in_one_list() -> None:
    nav = tomllib.loads((ROOT / "docs/zensical.toml").read_text())["project"]["nav"]
    shown = list(pages_of(nav))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    names = {str(page.relative_to(ROOT)) for page in pages}
    assert sorted(shown) == sorted(name for name in names if name.rpartition("/")[0] not in FREE)
    assert [next(iter(entry)) for entry in nav] == ["Home", "Learn", "How to", "Reference", "Operate"]


def test_every_block_is_read_by_a_test_or_is_no_code() -> None:
    shown: dict[str, int] = {}
    for block in (block for page in PAGES for block in blocks(page)):
        if not (block.file or block.is_yaml or block.is_refused or block.is_python or any(block.commands())):
            name = str(block.page.relative_to(ROOT))
            shown[name] = shown.get(name, 0) + 1
    assert shown == NO_CODE


def test_llms_txt_names_every_page_by_a_link_that_leads_somewhere() -> None:
    index = ROOT / "docs/llms.txt"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", index.read_text())}
    assert [str(path) for path in linked if not path.exists()] == []
    nav = tomllib.loads((ROOT / "docs/zensical.toml").read_text())["project"]["nav"]
    assert [page for page in pages_of(nav) if ROOT / page not in linked] == []
