"""Trackers: what they have after a run is what metrics.jsonl has, also after a stop and a resume; and what callbacks show."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY, Project, metrics
from tests.thirdparty.conftest import needs

SHORT = [*TINY, "trainer.max_steps=6"]
SHOWN = ["callbacks=sample_images", "evaluation.every_steps=3"]  # one image, and at both evaluations a text
PNG = b"\x89PNG"


def test_csv(train: Callable[..., Path]) -> None:
    run = train(*SHORT, "metrics=csv")
    with (run / "csv/train.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [record["loss"] for record in metrics(run, "train")]


@needs("wandb")
def test_wandb_offline(train: Callable[..., Path]) -> None:
    run = train(*SHORT, *SHOWN, "metrics=wandb", "metrics.wandb.mode=offline", "metrics.wandb.close_timeout_s=300")
    known = json.loads((run / "trackers/wandb.json").read_text())
    assert known["step"] == 6
    (file,) = run.glob(f"wandb/offline-run-*/run-{known['id']}.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"eval/accuracy" in content and b"optimizer" in content
    (image,) = run.glob("wandb/offline-run-*/files/media/images/samples/inputs_3_*.png")
    assert image.read_bytes().startswith(PNG)
    texts = sorted(run.glob("wandb/offline-run-*/files/media/html/samples/predictions_*.html"))
    assert [path.name.split("_")[1] for path in texts] == ["3", "6"] and "| predicted |" in texts[0].read_text()


@needs("mlflow")
def test_mlflow_on_a_local_folder_is_one_run_also_after_a_resume(train: Callable[..., Path], project: Project) -> None:
    store = ["metrics=[csv,mlflow]", "metrics.mlflow.tracking_uri=sqlite:///mlflow.db", "metrics.mlflow.close_timeout_s=300"]
    run = train(*SHORT, *SHOWN, *store, "checkpoint.every_steps=4")
    done = project.run("resume", str(run / "checkpoints/step_00000004"), "trainer.max_steps=8", timeout=600)
    assert done.returncode == 0, done.output
    with sqlite3.connect(project.folder / "mlflow.db") as database:
        found = database.execute("select run_uuid, step, value from metrics where key = 'train/loss' order by step").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    assert len({run_id for run_id, _, _ in found}) == 1
    assert [step for _, step, _ in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    losses = [record["loss"] for record in metrics(run, "train")]
    assert [value for _, _, value in found][:4] == losses[:4]
    assert [value for _, _, value in found][6:] == losses[6:]  # of steps 5 and 6 it keeps what it was told first, with another schedule
    assert params["model.width"] == "16"
    (folder,) = project.folder.glob(f"mlruns/*/{found[0][0]}/artifacts")
    assert [path.read_bytes()[:4] for path in folder.glob("images/samples~inputs*step*3*.png")] == [PNG]
    texts = sorted((folder / "texts").iterdir())
    assert [path.name for path in texts] == [f"samples~predictions~{step:08}.md" for step in (3, 6, 8)]  # as steps have numbers: each once
    assert "| predicted |" in texts[0].read_text()
    with (run / "csv/train.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5, 6, 7, 8]


@needs("trackio")
def test_trackio_on_this_machine(train: Callable[..., Path], project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    store = project.folder / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(store))
    run = train(*SHORT, *SHOWN, "metrics=trackio", "metrics.trackio.close_timeout_s=300")
    with sqlite3.connect(store / "default.db") as database:
        found = database.execute("select step from metrics where cast(metrics as text) like '%train/loss%' order by step")
        steps = [step for (step,) in found]
        (text,) = database.execute("select metrics from metrics where step = 3 and cast(metrics as text) like '%trackio.markdown%'")
    assert steps == [record["step"] for record in metrics(run, "train")]
    assert "| predicted |" in str(text)
    assert [path.read_bytes()[:4] for path in store.glob("media/default/*/3/*.png")] == [PNG]
