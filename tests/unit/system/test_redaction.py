"""Secrets: known by name and by value, and nothing that is none."""

from __future__ import annotations

import json

import pytest

from ddp_train.system import redaction

SECRET = "s3cr3t'\"value\\1"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_seen", {})
    monkeypatch.setattr(redaction, "_scanned", {})
    monkeypatch.setenv("UNIT_API_KEY", SECRET)
    monkeypatch.setenv("UNIT_DATABASE", "postgres://me:pa55word@host/x")
    monkeypatch.setenv("UNIT_KEY_FILE", "/")  # a path, and short


@pytest.mark.parametrize("key", ["wandb.api_key", "db.password", "hf_token", "x.apiKey", "token", "key", "s3.secret-key"])
def test_names_of_secrets(key: str) -> None:
    assert redaction.is_secret_key(key)
    assert redaction.variable_for_secret(key, "0123456789")


@pytest.mark.parametrize("key", ["data.pad_token", "image_key", "num_tokens", "token_files", "tokenizer", "monkey", "sort_key", "key.of"])
def test_words_of_machine_learning_are_no_secrets(key: str) -> None:
    assert not redaction.is_secret_key(key)
    assert redaction.variable_for_secret(key, "0123456789") is None


def test_a_value_is_hidden_in_every_way_to_write_it() -> None:
    for text in (SECRET, json.dumps({"a": SECRET}), repr(SECRET), f"x={SECRET}!"):
        assert "s3cr3t" not in redaction.redact(text)
    assert redaction.redact("connect postgres://me:pa55word@host/x") == "connect postgres://me:***@host/x"
    assert redaction.redact("the word pa55word") == "the word ***"
    assert redaction.redact_all({"a": [SECRET, 1, None]}) == {"a": ["***", 1, None]}
    assert redaction.redact_code('db_password = "hunter2222"') == 'db_password = "***"'
    assert redaction.redact("nothing here, / neither") == "nothing here, / neither"


@pytest.mark.parametrize(
    "name", ["API_KEY", "my_accesskey_2", "secretWord", "passwd", "Password", "passphrase", "credential", "authToken", "access_token"]
)
def test_what_is_assigned_to_a_name_like_a_secrets_is_hidden(name: str) -> None:
    assert redaction.redact_code(f"x = 1; {name} = 'hunter2222'") == f"x = 1; {name} = '***'"
    assert redaction.redact_code(f'{{"{name}": "hunter2222"}}') == f'{{"{name}": "***"}}'
    assert redaction.redact_code("{'tokens': 'hunter2222'}") == "{'tokens': 'hunter2222'}"


def test_what_looks_like_a_key_or_a_token_is_hidden_in_code() -> None:
    shapes = ["hf_" + "aB" * 17, "ghp_" + "aB3" * 12, "sk-proj-" + "aB3" * 12, "AKIA" + "AB34" * 4, "xoxb-" + "1234-abcd" * 3]
    for shape in shapes:
        assert redaction.redact_code(f"use('{shape}')") == "use('***')"
    block = "-----BEGIN RSA {0}-----\nMIIabc\nxyz=\n-----END RSA {0}-----\n".format("PRIVATE KEY")
    assert redaction.redact_code(block).splitlines()[1:3] == ["***", "***"] and redaction.redact_code(block).count("\n") == 4
    assert redaction.redact_code('my_token = "abcdef123456"') == 'my_token = "***"'
    assert redaction.redact_code("a:\n  db_password: hunter2222  # mine\n") == "a:\n  db_password: ***  # mine\n"
    for text in ("pad_token = '<|endoftext|>'", "task-sk-learn", "password: SecretStr\n", "api_key: ${oc.env:KEY_1}\n", "hf_model_name"):
        assert redaction.redact_code(text) == text


def test_a_secret_that_left_the_environment_is_still_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    redaction.redact("")
    monkeypatch.delenv("UNIT_API_KEY")
    assert redaction.redact(SECRET) == "***"


def test_the_environment_is_looked_through_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, is_secret = [], redaction.is_secret_variable
    monkeypatch.setattr(redaction, "is_secret_variable", lambda name: looked.append(name) or is_secret(name))
    record = {"split": "train", "samples_per_s": 1.0, "note": SECRET}
    for _ in range(3):
        assert redaction.redact_all(record)["note"] == "***"
    assert looked.count("PATH") == 1
    monkeypatch.setenv("UNIT_API_KEY", "another_s3cr3t")
    assert redaction.redact("another_s3cr3t and " + SECRET) == "*** and ***"


def test_who_asks_while_the_environment_is_looked_through_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, is_secret = [], redaction.is_secret_variable

    def look(name: str) -> bool:
        if not shown:
            shown.append("")
            shown.append(redaction.redact(SECRET))  # as another thread does
        return is_secret(name)

    monkeypatch.setattr(redaction, "is_secret_variable", look)
    secrets = iter(redaction._secrets())
    assert shown[1] == "***"
    monkeypatch.setenv("UNIT_OTHER_KEY", "another_s3cr3t")
    redaction.redact("")
    assert SECRET in list(secrets)  # though there is one more by now


def test_a_reference_is_no_secret_and_is_revealed_where_it_is_needed() -> None:
    url = "https://${oc.env:UNIT_USER}:${oc.env:UNIT_API_KEY}@host"
    assert redaction.variable_for_secret("data.url", url) is None
    assert redaction.redact(url) == url
    assert redaction.reveal({"a": ["${oc.env:UNIT_API_KEY}"]}) == {"a": [SECRET]}
    assert redaction.variable_for_secret("note", f"see {SECRET}") == "UNIT_API_KEY"
    assert redaction.variable_for_secret("data.url", "https://me:plain@host") == "URL_PASSWORD"
