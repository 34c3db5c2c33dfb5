"""docs/reference.md is what conf/ and the schema say today."""

from __future__ import annotations

from tests.docs.reference import FILE, page


def test_the_reference_is_that_of_conf() -> None:
    assert FILE.read_text() == page(), "`make reference` writes it anew"
