from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.archive.report.browser import NAMES, Browser, browser_path, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A tab of a browser; afterwards the console has no error, and nothing was loaded from anywhere."""
    if browser_path() is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []
