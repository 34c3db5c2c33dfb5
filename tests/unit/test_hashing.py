"""Numbers that look random and follow from what they are of."""

import numpy as np

from ddp_train.hashing import random_bits


def test_bits_follow_splitmix64():
    # The published first outputs of SplitMix64 seeded with 1234567: output n mixes seed + n * gamma, which is our draw n - 1.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_bits(np.asarray([1234567], np.uint64), np.arange(4, dtype=np.uint64)).tolist() == expected
