"""docs/glossary.md is held by code, configuration and docs alike: its terms are used, and the words that they have replaced are not."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_TERMS = 40
TEXT = (".py", ".yaml", ".md", ".sh", ".sbatch", ".toml")
FOLDERS = ("ddp_train", "hydra_plugins", "conf", "docs", "launch", "starter", "examples")


def rows(page: Path) -> list[list[str]]:
    """Return the rows of a page's table, cell by cell."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TERMS = [term for term, _ in rows(GLOSSARY)]
RETIRED = [re.findall("`([^`]+)`", old) for old, _ in rows(Path(__file__).with_name("retired_words.md"))]


@cache
def texts() -> dict[Path, str]:
    """Return what a person reads: code, configuration and pages; not CHANGELOG.md and history.md, which speak of their day."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in FOLDERS:
        files += [file for file in sorted((ROOT / folder).rglob("*")) if file.suffix in TEXT and file.is_file()]
    return {
        file: file.read_text() for file in files if file != GLOSSARY and not {"outputs", "history.md"} & set(file.relative_to(ROOT).parts)
    }


def test_terms_are_few_and_stand_once() -> None:
    assert len(TERMS) <= MAX_TERMS
    assert len(set(TERMS)) == len(TERMS)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used(term: str) -> None:
    word = re.compile(r"(?<![A-Za-z])" + "[ _-]?".join(map(re.escape, re.split("[ -]", term))), re.IGNORECASE)
    assert sum(bool(word.search(text)) for text in texts().values()) >= 2, f"'{term}' is in no page and no module: is it the word in use?"


@pytest.mark.parametrize("words", RETIRED, ids=lambda words: words[0])
def test_a_retired_word_is_gone(words: list[str]) -> None:
    for word in words:
        ending = "(?:s|ed|ing)?" if re.fullmatch("[a-z]+", word) else ""
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}{ending}(?![A-Za-z0-9])")
        places = [
            f"{file.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            for file, text in texts().items()
            for match in pattern.finditer(text)
        ]
        assert not places, f"'{word}' is a retired word; it stands in {', '.join(places[:8])}"
