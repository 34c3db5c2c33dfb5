"""Rules across keys and sections: each yields the problems that it finds. Imports no torch."""

from __future__ import annotations

from ddp_train.errors import ConfigError


def conflict(key: str, happened: str, to: object, *, expected: str = "one of the two") -> ConfigError:
    """Return what is wrong with a key whose value excludes another one: `key=to` would do."""
    return ConfigError(key=key, happened=happened, expected=expected, fix=f"{key}={to}")
