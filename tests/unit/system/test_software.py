"""environment.json names what is installed, as the packages call themselves, and where it comes from."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ddp_train.system.software import software


def test_the_packages_have_the_names_and_versions_of_their_own_metadata() -> None:
    packages = software()["packages"]
    assert packages == {each.name: each.version for each in reversed([*metadata.distributions()])}
    assert "torch" in packages


def test_a_package_that_comes_from_no_index_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = {
        "local": {"url": "file:///a", "dir_info": {"editable": True}},
        "hub": {"url": "https://x.org/hub", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        "broken": None,
    }
    for name, origin in origins.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n\nText: 3")
        (folder / "direct_url.json").write_text(json.dumps(origin) if origin else "{")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = software()
    assert {name: found["packages"][name] for name in origins} == dict.fromkeys(origins, "1.0")
    assert found["package_sources"] | {"local": "editable file:///a", "hub": "git+https://x.org/hub@abc"} == found["package_sources"]
    assert "broken" not in found["package_sources"]


def test_the_processor_and_the_variables_of_math_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("LD_PRELOAD_NOT", "x")
    found = software()
    assert found["variables"]["MKL_CBWR"] == "AVX2" and "LD_PRELOAD_NOT" not in found["variables"]
    assert found["cpu"]["model"] and found["cpu"]["cores"]
