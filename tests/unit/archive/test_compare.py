"""What differs between runs, and where each value came from."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import yaml

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.compare import compare, origin_of
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
    assert origin("trainer.max_steps") == "experiment=e" and origin("optimizer.momentum") == "experiment=e"
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
    for name, rate, more in (("a", "0.1", {}), ("b", "0.2", {"packages": {"numpy": "2.1"}, "git": {"commit": "abc", "dirty": True}})):
        run_folder = finished(tmp_path / name, 0.5 if name == "a" else 0.75, f"optimizer.lr={rate}", **more)
        saved(run_folder, identity=data if name == "a" else {**data, "order": {"seed": 1}})
    (tmp_path / "b/code.diff").write_text("--- a/m.py\n+++ b/m.py\n@@\n-1\n+2\n")
    first, second = ArchivedRun(tmp_path / "a"), ArchivedRun(tmp_path / "b")
    found = first.compare(second)
    differing = {title: {item.name: item.values for item in items} for title, items in found.differences.items()}
    assert differing["config"] == {"optimizer.lr": [0.1, 0.2]} and found.differences["config"][0].origins == ["typed", "typed"]
    assert differing["code"]["commit"] == [None, "abc"] and differing["code"]["uncommitted changes"][1].startswith("m.py (")
    assert differing["data"] == {"order: seed": [0, 1]} and differing["environment"] == {"package numpy": ["2.0", "2.1"]}
    assert found.results["eval/accuracy"][1] == {"last": 0.75, "difference": 0.25, "best": 0.75, "best_step": 100}
    assert next(iter(found.results)) == "eval/accuracy"
    assert found.remarks == ["their samples come in a different order (seed)"]
    assert json.loads(json.dumps(found.as_dict()))["differences"]["config"][0]["name"] == "optimizer.lr"


def test_a_reader_is_told_what_keeps_runs_from_being_compared(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.5, "seed=1")
    finished(tmp_path / "b", 0.6, "seed=2")
    finished(tmp_path / "c", 0.6, "seed=2")
    (tmp_path / "c/result.json").write_text("{")
    (tmp_path / "c/metrics.jsonl").write_text('{"split": "train", "step": 7, "loss": 1.0}\n')
    runs = [ArchivedRun(tmp_path / name) for name in "abc"]
    assert compare(runs[:2]).remarks == ["they differ by seed alone: the difference of their results is chance"]
    assert [remark.startswith("their configurations are the same") for remark in compare([runs[1], runs[1]]).remarks] == [True]
    remarks = compare(runs).remarks
    assert remarks[0].endswith("c is broken, at step 7") and "result.json cannot be read" in remarks[1]
    assert "judged by different metrics: eval/accuracy, eval/accuracy, train/loss" in remarks[2]


def archived(run: Path, **files: str) -> None:
    """Write the code.tar.gz of a run."""
    with tarfile.open(run / "code.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{run.name}/{name}.py")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def test_code_that_no_commit_has_and_other_repositories_are_compared(tmp_path: Path) -> None:
    code = {"git": {"commit": "abc"}, "code": [{"commit": "abc", "deleted": []}, {"commit": "1", "deleted": []}]}
    other = {**code, "code": [{"commit": "abc", "deleted": []}, {"commit": "2", "deleted": []}]}
    for name, text, facts in (("a", "1", code), ("same", "1", code), ("b", "2", code), ("c", "1", other)):
        finished(tmp_path / name, 0.5, f"seed={len(text + name)}", **facts)
        archived(tmp_path / name, untracked=text)
    finished(tmp_path / "old", 0.5, git={"commit": "abc"})
    a, same, b, c, old = (ArchivedRun(tmp_path / name) for name in ("a", "same", "b", "c", "old"))
    assert a.compare(same).differences["code"] == a.compare(old).differences["code"] == []
    [difference] = a.compare(b).differences["code"]
    assert difference.name == "files that no commit has" and difference.values[0].startswith("untracked.py (")
    assert [difference.values for difference in a.compare(c).differences["code"]] == [["1, abc", "2, abc"]]


def test_chance_is_said_where_nothing_else_differs_and_data_where_both_tell_it(tmp_path: Path) -> None:
    for name, seed, more in (("a", 1, {}), ("b", 2, {"hosts": ["b"]}), ("c", 3, {"packages": {"numpy": "9"}}), ("d", 4, {})):
        run_folder = finished(tmp_path / name, 0.5, f"seed={seed}", **more)
        if name != "d":
            saved(run_folder, identity={"order": {"seed": seed, "the first samples": str(seed)}, "data": {"data.samples": 10}})
    a, b, c, d = (ArchivedRun(tmp_path / name) for name in "abcd")
    chance = "they differ by seed alone: the difference of their results is chance"
    assert a.compare(b).remarks[-1] == chance
    assert a.compare(c).remarks[-1] == "they differ by seed, and their environment differs, too"
    assert a.compare(d).remarks == [chance] and a.compare(d).differences["data"] == []
