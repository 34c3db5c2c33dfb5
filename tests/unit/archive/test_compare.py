"""What differs between runs, and where each value came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.compare import origin_of
from tests.unit.archive.finished import finished, saved

CHOICES = {"model": "mlp", "optimizer": "sgd", "cluster": "local"}


def by_hydra(run: Path, *overrides: str, source: Path, experiment: str | None = None) -> None:
    """Write what Hydra leaves in a run."""
    (run / ".hydra").mkdir()
    (run / ".hydra/overrides.yaml").write_text(yaml.dump([*overrides]))
    runtime = {"choices": {**CHOICES, "experiment": experiment}, "config_sources": [{"path": str(source), "schema": "file"}]}
    (run / ".hydra/hydra.yaml").write_text(yaml.dump({"hydra": {"runtime": runtime}}))


def test_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    finished(tmp_path / "r", 0.5, "optimizer.lr=0.1")
    (tmp_path / "conf/experiment").mkdir(parents=True)
    experiment = {"defaults": [{"override /optimizer": "sgd"}], "trainer": {"max_steps": 100}}
    (tmp_path / "conf/experiment/e.yaml").write_text(yaml.dump(experiment))
    by_hydra(tmp_path / "r", "+experiment=e", "model=mlp", "optimizer.lr=0.1", source=tmp_path / "conf", experiment="e")
    origin = origin_of(ArchivedRun(tmp_path / "r"))
    assert origin("optimizer.lr") == "typed" and origin("model.width") == "typed: model=mlp"
    assert origin("trainer.max_steps") == "experiment=e" and origin("optimizer.weight_decay") == "experiment=e"
    assert origin("loader.micro_batch_size") == "default"
    (tmp_path / "conf/experiment/e.yaml").unlink()
    assert "no longer there" in origin_of(ArchivedRun(tmp_path / "r"))("loader.micro_batch_size")
    finished(tmp_path / "bare", 0.5, "optimizer.lr=0.1")
    origin = origin_of(ArchivedRun(tmp_path / "bare"))
    assert origin("optimizer.lr") == "typed" and origin("loader.micro_batch_size") == ""  # no file says it


def test_a_value_that_a_resume_has_changed_is_told(tmp_path: Path) -> None:
    run_folder = finished(tmp_path / "r", 0.5, "optimizer.lr=0.1")
    by_hydra(tmp_path / "r", "optimizer.lr=0.1", source=tmp_path)
    run_folder.record_config(run_folder.config.read_text().replace("max_steps: 100", "max_steps: 200"))
    origin = origin_of(ArchivedRun(tmp_path / "r"))
    assert origin("trainer.max_steps") == "changed by a resume" and origin("optimizer.lr") == "typed"


def test_what_differs_is_named_by_subject(tmp_path: Path) -> None:
    data = {"order": {"seed": 0}, "data": {"data.samples": 10}}
    for name, rate, more in (("a", "0.1", {}), ("b", "0.2", {"packages": {"numpy": "2.1"}})):
        run_folder = finished(tmp_path / name, 0.5 if name == "a" else 0.75, f"optimizer.lr={rate}", **more)
        saved(run_folder, identity=data if name == "a" else {**data, "order": {"seed": 1}})
    first, second = ArchivedRun(tmp_path / "a"), ArchivedRun(tmp_path / "b")
    found = first.compare(second)
    differing = {title: {item.name: item.values for item in items} for title, items in found.differences.items()}
    assert differing["config"] == {"optimizer.lr": [0.1, 0.2]} and found.differences["config"][0].origins == ["typed", "typed"]
    assert differing["data"] == {"order: seed": [0, 1]} and differing["environment"] == {"package numpy": ["2.0", "2.1"]}
    assert found.results["eval/accuracy"][1] == {"last": 0.75, "difference": 0.25, "best": 0.75, "best_step": 100}
    assert next(iter(found.results)) == "eval/accuracy"
    assert json.loads(json.dumps(asdict(found)))["differences"]["config"][0]["name"] == "optimizer.lr"


def test_a_list_is_one_setting_and_the_time_is_a_result(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.5, "debug.faults=[{kind:kill,rank:0,step:5}]")
    finished(tmp_path / "b", 0.5, seconds=8.0)
    found = ArchivedRun(tmp_path / "a").compare(ArchivedRun(tmp_path / "b"))
    assert [(item.name, item.origins[0]) for item in found.differences["config"]] == [("debug.faults", "typed")]
    assert [result["last"] for result in found.results["seconds"]] == [5.0, 8.0] and found.results["seconds"][1]["difference"] == 3.0


def test_commits_and_the_files_that_no_commit_has_are_compared_and_all_files_of_an_engines_copy(tmp_path: Path) -> None:
    def made(name: str, *commits: str | None, changed: tuple[str, ...] = (), **kept: str) -> ArchivedRun:
        folders = [{"name": "x", "folder": "/x", "commit": commit and 40 * commit, "changed": [], "kept": {}} for commit in commits]
        folders[0] |= {"changed": [*changed], "kept": kept}
        finished(tmp_path / name, 0.5).code_list.write_text(json.dumps({"folders": folders}))
        return ArchivedRun(tmp_path / name)

    def differing(left: ArchivedRun, right: ArchivedRun) -> dict[str, list[Any]]:
        return {each.name: each.values for each in left.compare(right).differences["code"]}

    finished(tmp_path / "old", 0.5)
    a = made("a", "a", "1", mine="12")
    assert differing(a, made("same", "a", "1", mine="12")) == differing(a, ArchivedRun(tmp_path / "old")) == {}
    assert differing(a, made("other", "a", "2", mine="12")) == {"commits": [f"{'1' * 12}, {'a' * 12}", f"{'2' * 12}, {'a' * 12}"]}
    for b in (made("b", "a", "1", mine="13"), made("d", "a", "1", changed=("gone",), mine="12")):
        [(name, values)] = differing(a, b).items()
        assert name == "files that no commit has" and values[0].endswith(") mine") and values[0][:9] != values[1][:9]
    copied = made("copied", None, mine="12")
    assert differing(copied, a) == {} and [*differing(copied, made("edited", None, mine="13"))] == ["files"]


def test_data_is_compared_where_both_tell_it(tmp_path: Path) -> None:
    for name, samples in (("a", 10), ("b", 20), ("unsaved", 0)):
        run_folder = finished(tmp_path / name, 0.5)
        if samples:
            saved(run_folder, identity={"data": {"data.samples": samples}})
    a, b, unsaved = (ArchivedRun(tmp_path / name) for name in ("a", "b", "unsaved"))
    assert [difference.values for difference in a.compare(b).differences["data"]] == [[10, 20]]
    assert a.compare(unsaved).differences["data"] == []
