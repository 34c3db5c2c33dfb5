"""A store with the semantics of torch's that counts what each rank asks of it, and ranks that are threads.

A rank is a thread of a few KiB that waits on a lock of its own: four thousand of them meet in seconds, where a store with one condition
for all would wake every one at each message.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store

_STACK_BYTES = 256 << 10
_TIMEOUT_S = 120.0

Value = TypeVar("Value")


class CountedStore(Store):
    """A store in this process's memory; `rank` of the thread that calls is set by `all_ranks`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[int] = Counter()  # by rank
        self.bytes: Counter[int] = Counter()
        self.polls = 0  # looks at a counter: as many as there is time for
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()

    def clone(self) -> CountedStore:
        return self

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self._put(key, value)

    def get(self, key: str) -> bytes:
        self._await([key], _TIMEOUT_S)
        self._count(key, self._values[key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        if amount:
            self._count(key, 8)
        else:
            self.polls += 1
        with self._lock:
            found = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(found).encode()
        self._wake(key)
        return found

    def append(self, key: str, value: Any) -> None:
        self._count(key, value)
        with self._lock:
            self._values[key] = self._values.get(key, b"") + _bytes(value)
        self._wake(key)

    def check(self, keys: Sequence[str]) -> bool:
        self._count(*keys)
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._count(*keys)
        self._await(keys, timeout.total_seconds() if timeout is not None else _TIMEOUT_S)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._await(keys, _TIMEOUT_S)
        found = [self._values[key] for key in keys]
        self._count(*keys, *found)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._count(*keys, *values)
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def deleteKey(self, key: str) -> bool:  # torch calls it so
        self._count(key)
        return self._values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True

    def _put(self, key: str, value: Any) -> None:
        self._values[key] = _bytes(value)
        self._wake(key)

    def _wake(self, key: str) -> None:
        with self._lock:
            waiting = self._waiting.pop(key, [])
        for event in waiting:
            event.set()

    def _await(self, keys: Sequence[str], within_s: float) -> None:
        for key in keys:
            event = threading.Event()
            with self._lock:
                if key in self._values:
                    continue
                self._waiting.setdefault(key, []).append(event)
            if not event.wait(within_s):
                raise DistStoreError(f"wait timeout after {within_s:.0f} s for {key}")

    def _count(self, *parts: Any) -> None:
        rank = getattr(_thread, "rank", -1)
        self.requests[rank] += 1  # a rank is one thread
        self.bytes[rank] += sum(part if isinstance(part, int) else len(part) for part in parts)


def all_ranks(size: int, act: Callable[[int], Value]) -> list[Value]:
    """Do something as every rank at once, and return what came of it, by rank; the first error is raised."""
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _thread.rank = rank
        try:
            found[rank] = act(rank)
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


_thread = threading.local()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
