"""A fixture for the tests of people's own projects. pytest knows it wherever ddp_train is installed."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from ddp_train.cli.from_python import RunResult, run


@pytest.fixture
def ddp_train_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., RunResult]:
    """Return a function that trains in the test's own folder, and returns the result: `ddp_train_run("experiment=first", "debug=fast")`.

    The working directory is that of the project's pyproject.toml. Two CPU processes, unless the words say something else. Raises
    `ddp_train.RunFailed`, as `ddp_train.run` does.
    """
    monkeypatch.chdir(request.config.rootpath)
    numbers = count(1)

    def train(*overrides: str) -> RunResult:
        cluster = [] if any(word.startswith(("cluster=", "cluster.device=")) for word in overrides) else ["cluster=cpu"]
        return run([*cluster, f"hydra.run.dir='{tmp_path}/runs/{next(numbers)}'", *overrides])

    return train
