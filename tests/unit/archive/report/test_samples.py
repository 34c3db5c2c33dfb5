from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.samples import samples_of
from tests.unit.archive.report.run_files import write_run


def test_images_and_texts_are_read_from_tensorboard_s_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", callbacks={"sample_images": {}})
    with SummaryWriter(str(run / "tensorboard")) as writer:
        writer.add_text("config", "not this one")
        for step in range(30):
            writer.add_scalar("train/loss", 1.0, step)
            writer.add_image("samples/inputs", torch.rand(3, 16, 16), step)
            writer.add_text("samples/text", f"text of step {step}", step)
    file = next((run / "tensorboard").glob("events*"))
    file.write_bytes(file.read_bytes() + b"\x20\0\0\0\0\0\0\0half a record")
    shown = {entry["name"]: entry for entry in samples_of(ArchivedRun(run), max_bytes=20_000)}
    assert list(shown) == ["samples/inputs", "samples/text"]
    images, texts = shown["samples/inputs"]["shown"], shown["samples/text"]["shown"]
    assert images[0]["value"].startswith("data:image/png;base64,") and 1 < len(images) < 30 == shown["samples/inputs"]["of"]
    assert (images[0]["step"], images[-1]["step"], texts[-1]) == (0, 29, {"step": 29, "value": "text of step 29"})
    assert sum(len(image["value"]) for image in images) <= 10_000
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("sample_images: {}", ""))
    assert samples_of(ArchivedRun(run), max_bytes=20_000) == []


def test_a_damaged_record_is_left_out_and_few_images_are_in_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", callbacks={"sample_images": {}})
    with SummaryWriter(str(run / "tensorboard")) as writer:
        for step in range(40):
            writer.add_image("samples/inputs", torch.rand(3, 200, 200), step)
    file = next((run / "tensorboard").glob("events*"))
    content = bytearray(file.read_bytes())
    content[content.index(b"samples/inputs") - 1] = 0xFF  # the length of its name
    file.write_bytes(content)
    tracemalloc.start()
    (inputs,) = samples_of(ArchivedRun(run), max_bytes=500_000)
    assert tracemalloc.get_traced_memory()[1] < len(content) / 2
    tracemalloc.stop()
    assert inputs["of"] == 39 and [image["step"] for image in inputs["shown"]] == [1, 20, 39]
