"""Secrets: how to recognise one, keep it out of a config, and remove it from text. Lowest layer: everything that writes uses this.

A secret is known by the name of its key, or by its value: that of an environment variable with such a name. A config holds `${oc.env:NAME}`
in its place; the value stays in the environment until `reveal` puts it into an argument, in the rank that needs it.
"""

import json
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "***"

_SHORTEST = 8  # a shorter value would hide half of every log
_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "authtoken"}
_LAST_WORDS = {"key", "token"}  # in a config these are words of machine learning too
_BEFORE_LAST = {
    *("", "api", "access", "account", "auth", "bearer", "deploy", "encryption", "gh", "github", "gitlab", "hf", "hub"),
    *("neptune", "comet", "mlflow", "openai", "private", "refresh", "session", "signing", "ssh", "storage", "wandb"),
}
_URL = re.compile(r"(?P<start>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@'\"]*:)(?P<password>[^\s/@'\"]+)@")
_NAMES = r"(?:api_?key|access_?key|secret|passw(?:or)?d|passphrase|credentials?|auth_?token|access_?token)"
_NAMED = re.compile(_NAMES, re.IGNORECASE)  # a tenth of the time of the whole pattern, which tries each word from each letter
_ASSIGNED = re.compile(rf"(?P<start>\b\w*{_NAMES}\w*[\"']?\s*[:=]\s*[bru]?[\"'])(?P<value>[^\"'\s]{{6,}})(?=[\"'])", re.IGNORECASE)
_TOKEN = re.compile(r"(?P<start>token[\"']?\s*[:=]\s*[bru]?[\"'])(?=[^\"']*\d)[\w.~+/=-]{10,}(?=[\"'])", re.I)  # no "<eos>"
_UNQUOTED = r"(?=\S*\d)[^\s\"'#${}\[\](),]{6,}(?=[ \t]*(?:#.*)?$)"  # no type of Python's, which has no digit
_YAML = re.compile(rf"(?P<start>^[+-]?[ \t]*(?:- )?\w*{_NAMES}\w*:[ \t]+){_UNQUOTED}", re.I | re.M)
_SHAPE = re.compile(
    r"\b(?:(?:hf_|gh[pousr]_)[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-(?=[\w-]{0,40}\d)[\w-]{20,}"
    r"|AKIA[A-Z0-9]{16}\b|xox[a-z]-(?=[\w-]{0,20}\d)[\w-]{10,})"
)
_PRIVATE_KEY = re.compile(r"(?P<start>-----BEGIN [A-Z ]*PRIVATE KEY-----)(?P<key>[^\0]{1,20000}?)(?=-----END)")
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")
_seen: dict[str, str] = {}  # value -> variable; kept when a variable is removed from the environment
_scanned: dict[bytes, bytes] = {}  # the environment when it was last looked through


def is_secret_key(key: str) -> bool:
    """Tell whether the last part of a config key names a secret: `wandb.api_key`, `db.password`; not `pad_token`, `image_key`."""
    *words, before, last = ["", "", *_words(key.rpartition(".")[2])]
    return bool(_WORDS & {*words, before, last}) or (last in _LAST_WORDS and before in _BEFORE_LAST)


@lru_cache(maxsize=4096)
def is_secret_variable(name: str) -> bool:
    """Tell whether an environment variable is named like a secret: `HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`."""
    return bool((_WORDS | _LAST_WORDS) & set(_words(name)))


def is_secret_reference(name: str) -> bool:
    """Tell whether a config must keep `${oc.env:NAME}` instead of the variable's value."""
    return is_secret_variable(name) or bool(_URL.search(os.environ.get(name, "")))


def reference(name: str) -> str:
    """Return the text that replaces a secret in a config."""
    return f"${{oc.env:{name}}}"


def references(value: str) -> list[str]:
    """Return the variables that a config value refers to."""
    return list(dict.fromkeys(_REFERENCE.findall(value)))


def variable_for_secret(key: str, value: object) -> str | None:
    """Return the name of an environment variable for a secret that a config value contains in plain text; None: it contains none."""
    if not isinstance(value, str):
        return None
    name = next((name for secret, name in _secrets().items() if secret in value), None)
    if name is not None:
        return name
    plain = _REFERENCE.sub("", value)
    last = re.sub(r"\W", "_", key.rpartition(".")[2]).upper() or "SECRET"
    if _URL.search(plain):
        return f"{last}_PASSWORD"
    has_value = bool(plain) and "${" not in plain and plain not in ("auto", "???", HIDDEN, "null", "None")
    is_long = len(plain) >= _SHORTEST or bool(_WORDS & set(_words(key.rpartition(".")[2])))
    return last if has_value and is_long and is_secret_key(key) else None


def reveal(value: Any) -> Any:
    """Return a config value with the secrets of this process's environment in it. Raises KeyError with the name of one that it lacks."""
    if isinstance(value, str):
        for name in references(value):
            if len(secret := os.environ[name]) >= _SHORTEST:
                _seen[secret] = name  # it stands where a secret does, whatever the variable is called
        return _REFERENCE.sub(lambda match: os.environ[match[1]], value)
    if isinstance(value, Mapping):
        return {name: reveal(inner) for name, inner in value.items()}
    return [reveal(inner) for inner in value] if isinstance(value, list) else value


def redact(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Return text without the values of secret environment variables (`secrets`) and the passwords of URLs."""
    secrets = _secrets() if secrets is None else secrets
    if secrets:
        text = _pattern(tuple(secrets)).sub(HIDDEN, text)
    return _URL.sub(lambda match: match[0] if "${" in match[0] else f"{match['start']}{HIDDEN}@", text) if "://" in text else text


def redact_code(text: str) -> str:
    """Redact source code and tracebacks: also what looks like a key or a token, and what is assigned to a secret name."""
    text = _TOKEN.sub(rf"\g<start>{HIDDEN}", _SHAPE.sub(HIDDEN, redact(text)))
    text = _PRIVATE_KEY.sub(lambda match: match["start"] + re.sub(r"[^\n]+", HIDDEN, match["key"]), text)  # as many lines as before
    return _YAML.sub(rf"\g<start>{HIDDEN}", _ASSIGNED.sub(rf"\g<start>{HIDDEN}", text)) if _NAMED.search(text) else text


def redact_all(value: Any, secrets: Mapping[str, str] | None = None) -> Any:
    """Redact every text in plain containers, keys too."""
    if isinstance(value, (int, float)):  # most of a record
        return value
    secrets = _secrets() if secrets is None else secrets
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, Mapping):
        return {redact_all(name, secrets): redact_all(inner, secrets) for name, inner in value.items()}
    return [redact_all(inner, secrets) for inner in value] if isinstance(value, (list, tuple)) else value


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]


def _secrets() -> Mapping[str, str]:
    """Return the values that the environment has, or had, under names of secrets, and the passwords of URLs in it."""
    global _scanned
    # Called for every text that is written: comparing the dict behind os.environ takes microseconds, reading os.environ decodes everything.
    environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    if environment != _scanned:
        now = dict(environment)
        for name, value in ((os.fsdecode(name), os.fsdecode(value)) for name, value in now.items()):
            if len(value) < _SHORTEST or value in _seen:
                continue
            if is_secret_variable(name) and not (value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value))):
                _seen[value] = name  # but not the path of a file that holds one
            elif "://" in value and (match := _URL.search(value)) and len(match["password"]) >= _SHORTEST:
                _seen[match["password"]] = name
        _scanned = now  # last: another thread that calls meanwhile scans too
    return _seen.copy()  # a copy: other threads may add more


@lru_cache(maxsize=8)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Match secrets as they are, and as JSON, Python, a URL and a shell would write them."""
    written = set(secrets)
    for secret in secrets:
        written |= {json.dumps(secret)[1:-1], repr(secret)[1:-1], secret.replace("'", "'\"'\"'")}
        written |= {urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)}
    return re.compile("|".join(re.escape(form) for form in sorted(written, key=len, reverse=True)))


class Redacting(logging.Formatter):
    """Formats records, their tracebacks too, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_code(super().format(record))
