"""environment.json names what is installed, as the packages call themselves."""

from __future__ import annotations

from importlib import metadata

from ddp_train.rank import environment


def test_the_packages_have_the_names_and_versions_of_their_own_metadata() -> None:
    environment._packages.cache_clear()  # other tests import what looks for packages elsewhere, too
    found = environment._packages()
    assert found == {each.name: each.version for each in metadata.distributions()}
    assert "torch" in found
