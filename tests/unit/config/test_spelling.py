"""What is advised can be pasted: values as Hydra reads them back, and names that are close."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_train.cli import main as command_line
from ddp_train.config.spelling import LEAVE_IT_OUT, field_words, nearest, text_of
from tests.docs.conftest import problems_of
from tests.fake_runner import FakeRunner


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        "adamw",
        "null",
        "True",
        "two words",
        "a=b,c",
        'a "quoted" word',
        "",
        [1, "x y", None],
        {"a": [1, {"b": "é"}]},
    ],
)
def test_hydra_reads_a_value_back_as_it_was(value: Any) -> None:
    assert OverridesParser.create().parse_override(f"key={text_of(value)}").value() == value


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainer.max_step", "trainer.max_steps"),
        ("trainer.num_workers", "loader.num_workers"),
        ("trainer.gradient_clip_val", "trainer.clip_grad_norm"),
        ("optimzer.lr", "optimizer.lr"),
        ("trainer.something_else", ""),
    ],
)
def test_the_name_that_was_meant_is_found_in_its_section_first(name: str, meant: str) -> None:
    names = ["trainer.max_steps", "trainer.clip_grad_norm", "loader.num_workers", "loader.drop_last", "optimizer.lr"]
    assert nearest(name, names) == meant


TYPED = {
    **dict.fromkeys(("lr", "learning_rate", "base_lr", "weight_decay", "wd", "momentum", "label_smoothing", "ema_decay"), "0.1"),
    **dict.fromkeys(("dataset", "datamodule"), "synthetic_images"),
    **dict.fromkeys(("arch", "net"), "mlp"),
    **dict.fromkeys(("optim",), "sgd"),
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "sync_batchnorm", "sync_bn", "drop_last"), "false"
    ),
    **dict.fromkeys(("dataloader_drop_last", "benchmark", "cudnn_benchmark"), "true"),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), "mine"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "default_root_dir"), "outputs/mine"),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "resume_from"), "auto"),
    **dict.fromkeys(("master_addr",), "node1"),
    **dict.fromkeys(("rdzv_endpoint",), "node1:29400"),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "2"),
    "node_rank": "1",
    "machine_rank": "1",
    "lr_scheduler_type": "constant",
    **dict.fromkeys(("report_to", "logger", "loggers"), "csv"),
    **dict.fromkeys(("criterion", "loss"), "classification"),
}
"""What is typed behind a word; of all others 2."""

OTHER_DATA = ("data_dir", "data_root")  # `data.root`, which the default data does not have
NEEDS_GPU = re.compile("this machine shows 0|fp16 was chosen for a run on CPU")


def values_of(word: str) -> list[str]:
    by_value = list(field_words()[word])
    typed = TYPED.get(word.lower())  # variables of torchrun are in capitals
    return [typed or "2"] if by_value == [""] else [value or typed or "true" for value in by_value]


CASES = [(word, value) for word in field_words() for value in values_of(word)]


def advice(word: str, value: str) -> str:
    """Return what the table says of a word."""
    by_value = field_words()[word]
    return by_value.get(value, by_value.get("", "")).format(shlex.quote(value))


@pytest.fixture(autouse=True)
def version_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    version.setbase("1.3")
    return iter([None])


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, str]:
    """Return what is advised for each key, of one command with all of the words."""
    monkeypatch.setattr(sys, "argv", ["ddp-train", *words])
    code = command_line.run(words, FakeRunner())
    shown = capsys.readouterr().err
    assert code == 2, shown
    problems = (block.splitlines() for block in shown.split("\n\n")[1:])
    return {lines[0].partition(": ")[0]: lines[-1].strip().removeprefix("fix: ") for lines in problems}


@pytest.mark.parametrize("section", ["", "trainer."])
def test_each_word_is_answered_with_what_is_typed_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    wrong, left = [], [(f"{section}{word}", value, advice(word, value)) for word, value in CASES]
    left = [(key, value, here) for key, value, here in left if f"{key}={value}" not in here.split()]  # else it is ours, too
    while left:  # a key stands once in a command; one that is a group's has several values
        now = {key: (value, here) for key, value, here in left}
        left = [(key, value, here) for key, value, here in left if now[key] != (value, here)]
        found = refused(monkeypatch, capsys, [f"{key}={value}" for key, (value, _) in now.items()])
        meant = {key: here if here.startswith(LEAVE_IT_OUT) else f"did you mean {here}?" for key, (_, here) in now.items()}
        wrong += [f"{key}={now[key][0]}: {found.get(key)}, not {here}" for key, here in meant.items() if found.get(key) != here]
    assert not wrong, "\n".join(wrong)


def test_what_is_advised_can_be_typed() -> None:
    batches = list[list[str]]()  # of advices that have no section in common: composed together
    for here in dict.fromkeys(advice(word, value) for word, value in CASES if word not in OTHER_DATA):
        if not here.startswith(LEAVE_IT_OUT):
            words = shlex.split(here)
            sections = {word.partition("=")[0].partition(".")[0] for word in words}
            batch = next((batch for batch in batches if not sections & {word.partition("=")[0].partition(".")[0] for word in batch}), None)
            if batch is None:
                batches.append(words)
            else:
                batch += words
    problems = [f"{batch}\n{problem}" for batch in batches for problem in problems_of(batch) if not NEEDS_GPU.search(problem)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--nnodes=2", "cluster=machines cluster.nodes=2 cluster.rendezvous_endpoint=node0:29400"),
        ("--nproc-per-node=4", "cluster.processes_per_node=4"),
        ("--epochs", "trainer.max_epochs=VALUE"),
        ("loader.batch_size=32", "loader.micro_batch_size=32"),
        ("data.batch_size=32", "loader.micro_batch_size=32"),
        ("datamodule.batch_size=32", "loader.micro_batch_size=32"),
        ("training_args.learning_rate=0.1", "optimizer.lr=0.1"),
        ("train.precision=16-mixed", "amp=fp16"),
        ("optimizer.learning_rate=0.1", "optimizer.lr=0.1"),
        ("optimizer.momentum=0.9", "optimizer=sgd optimizer.momentum=0.9"),
        ("+batch_size=32", "loader.micro_batch_size=32"),
        ("bf16-mixed", "amp=bf16"),
        ("fp16", "amp=fp16"),
    ],
)
def test_a_word_is_known_as_an_option_and_in_another_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert list(refused(monkeypatch, capsys, [typed]).values()) == [f"did you mean {meant}?"]
