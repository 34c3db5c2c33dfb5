from __future__ import annotations

import base64
import zlib

import numpy as np

from ddp_train.archive.report.packed import Numbers


def test_numbers_come_back_as_float32() -> None:
    numbers = Numbers()
    places = [numbers.add([1.5, float("nan")]), numbers.add([]), numbers.add(np.arange(3))]
    assert places == [(0, 2), (2, 0), (2, 3)]
    shuffled = np.frombuffer(zlib.decompress(base64.b64decode(numbers.text())), np.uint8)
    np.testing.assert_array_equal(shuffled.reshape(4, -1).T.copy().view("<f4").ravel(), np.array([1.5, np.nan, 0, 1, 2], np.float32))
    assert Numbers().text() != ""
