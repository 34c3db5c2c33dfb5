"""docs/components.md has the constants that components' classes may declare, as ddp_train/traits.py has them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_train import traits
from ddp_train.traits import Constants
from tests.docs.pages import ROOT

_SOURCE = (ROOT / "ddp_train" / "traits.py").read_text()
_HEAD = "| class of | constant | meaning |\n|---|---|---|\n"
_OF = {"Any": "any component", "Data": "a data set", "Optimizer": "an optimizer", "Objective": "an objective"}


def declared() -> Iterator[tuple[type, str, str, str]]:
    """Yield the class of constants, and the name, type and default, and meaning of each that it declares."""
    for kind in (each for each in vars(traits).values() if isinstance(each, type) and issubclass(each, Constants)):
        for name in (name for name in vars(kind) if not name.startswith("_")):
            line = re.search(rf"^    {name}: (.+) = (.+?)  # (.+)$", _SOURCE, re.MULTILINE)
            assert line, f"{kind.__name__}.{name} needs its type, its default and a comment in one line"
            annotation = re.sub(r"^ClassVar\[(.*)\]$", r"\1", line[1]).replace(" | ", " or ")
            yield kind, name, f"`{name}: {annotation} = {line[2]}`", line[3]


def test_the_table_of_constants_is_that_of_the_code() -> None:
    rows = []
    for kind, _, declaration, meaning in declared():
        owner = kind.__name__.removesuffix("Constants") or "Any"
        rows.append(f"| {_OF.get(owner, f'a {owner.lower()}')} | {declaration} | {meaning} |\n")
    assert _HEAD + "".join(rows) in (ROOT / "docs" / "components.md").read_text(), "the rows should be:\n" + "".join(rows)


def test_every_constant_is_declared_by_a_class_of_ours_and_read() -> None:
    texts = [file.read_text() for file in (ROOT / "ddp_train").rglob("*.py") if file.name != "traits.py"]
    for _, name, _, _ in declared():
        assert any(re.search(rf"^    {name}(: ClassVar[^=]*)? = ", text, re.MULTILINE) for text in texts), (
            f"no class of ours declares {name}"
        )
        assert any(re.search(rf"\.{name}\b", text) for text in (*texts, _SOURCE)), f"nothing reads {name}"
