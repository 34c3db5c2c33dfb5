"""Files in memory that are found by a process's pid and their name."""

from __future__ import annotations

import os

import pytest

from ddp_train.system import shared_memory


@pytest.mark.skipif(not shared_memory.IS_SUPPORTED, reason="needs Linux")
def test_a_file_is_found_by_its_whole_name_until_it_is_closed() -> None:
    ours = shared_memory.create("numbers")
    os.write(ours, b"1 2 3")
    assert shared_memory.open_of(os.getpid(), "number") is None
    found = shared_memory.open_of(os.getpid(), "numbers")
    assert found is not None and os.read(found, 9) == b"1 2 3"
    for descriptor in (ours, found):
        os.close(descriptor)
    assert shared_memory.open_of(os.getpid(), "numbers") is None
