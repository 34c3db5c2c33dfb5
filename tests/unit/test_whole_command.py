"""tests/benchmark/whole_command: its arithmetic, its probe, the commands that it types, and one short round of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from ddp_train import CONF
from ddp_train.config.check import check_config
from tests.benchmark.whole_command import figures, turns
from tests.benchmark.whole_command.run import SCRIPTS, Ran, Stamps, stamps_in
from tests.benchmark.whole_command.ways import WORKLOADS, Case, ours

ROOT = Path(__file__).parents[2]


def stamps(pid: int, *, late_s: float = 0.0, steps: int = 9) -> Stamps:
    """A rank whose steps take 2 ms, and 3 ms of CPU time; its first forward is 1 s after the command."""
    rows = [(101.5 + late_s + 0.002 * step, 0.003 * step) for step in range(steps)]
    return Stamps(pid, 101.0 + late_s, 1, rows)


def ran(*ranks: Stamps) -> Ran:
    return Ran(started=100.0, ended=102.0, cpu_s=5.0, ranks=ranks, memory_mib={1: 10.0, 2: 300.0, 3: 200.0, 4: 20.0})


def test_the_numbers_of_a_command_come_from_its_stamps() -> None:
    found = figures.numbers(ran(stamps(2), stamps(3, late_s=0.1)), processes=2, threads=1, steps=10)
    assert found == pytest.approx(
        {
            "first_forward_s": 1.1,  # of the rank that is last
            "first_step_s": 1.6,
            "wall_ms": 2.0,
            "cpu_ms": 3.0,
            "end_s": 102.0 - (101.6 + 9 * 0.002),
            "rank_mib": 300.0,
            "others_mib": 30.0,
            "command_cpu_s": 5.0,
            "command_s": 2.0,
        }
    )


def test_a_step_costs_what_its_slow_ones_cost_and_not_what_the_warm_up_does() -> None:
    rank = stamps(2)
    warm_up = [(at - 1.0, cpu) for at, cpu in rank.steps[:2]]
    slow_end = [(at + 0.014, cpu) for at, cpu in rank.steps[-1:]]  # 16 ms instead of 2, as a log step may
    slow = Stamps(2, rank.first_forward, 1, [*warm_up, *rank.steps[2:-1], *slow_end])
    assert figures.numbers(ran(slow), processes=1, threads=1, steps=10)["wall_ms"] == pytest.approx((5 * 2 + 16) / 6)


@pytest.mark.parametrize("ranks", [[stamps(2)], [stamps(2), stamps(3, steps=8)], [stamps(2), Stamps(3, 101.0, 2, stamps(3).steps)]])
def test_a_missing_rank_or_step_and_other_threads_are_no_measurement(ranks: list[Stamps]) -> None:
    with pytest.raises(RuntimeError, match="2 ranks with 9 stamps and 1 threads expected"):
        figures.numbers(ran(*ranks), processes=2, threads=1, steps=10)


def result(number: int, way: str, wall_ms: float) -> dict[str, object]:
    names = ("first_forward_s", "first_step_s", "wall_ms", "cpu_ms", "end_s", "rank_mib", "others_mib", "command_cpu_s")
    row = {"workload": "W1", "tier": "user", "processes": 2, "threads": 1}
    return {"round": number, "way": way, **row, "numbers": dict.fromkeys(names, 1.0) | {"wall_ms": wall_ms}}


def test_ratios_are_of_the_same_round() -> None:
    """The machine is twice as slow in the second round; the third has no reference."""
    results = [result(1, "torch", 2.0), result(1, "ours", 3.0), result(2, "ours", 6.0), result(2, "torch", 4.0), result(3, "ours", 99.0)]
    assert figures.ratios(results, "ours", "torch", "wall_ms") == [1.5, 1.5]
    assert "| W1 user, 2 x 1 | ours | 3 | 1.00 (1.00 to 1.00) | 1.50 (1.50 to 1.50) |" in figures.table(results, "torch")


def test_a_spread_is_the_median_with_its_quartiles() -> None:
    assert figures.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == "3.00 (2.00 to 4.00)"
    assert figures.spread([1.234], 1) == "1.2"
    assert figures.spread([]) == "-"


def test_a_turn_counts_the_steps_within_it_alone() -> None:
    stopped = [(at + 9.0, cpu) for at, cpu in stamps(2, steps=3).steps]  # the next turn of this way; nothing of the time between is its own
    rank = Stamps(2, 101.0, 1, [*stamps(2).steps, *stopped])
    assert turns.step_of([rank], 101.503, 102.0) == pytest.approx({"wall_ms": 2.0, "cpu_ms": 3.0})
    with pytest.raises(RuntimeError, match="rank 2 took no whole step"):
        turns.step_of([rank], 103.0, 104.0)


def test_a_ratio_of_turns_is_that_of_their_sums() -> None:
    assert figures.ratio_of_sums({1: 3.0, 2: 6.0, 3: 99.0}, {1: 2.0, 2: 4.0}) == (
        1.5,
        0.0,
    )  # twice as slow in the second; the third has no reference
    found, error = figures.ratio_of_sums({1: 1.0, 2: 3.0}, {1: 2.0, 2: 2.0})
    assert (found, error) == pytest.approx((1.0, 0.5))  # deviations -1 and 1, of two turns of 2


@pytest.mark.parametrize(("room", "noted"), [(10, 4), (3, 3)])  # four of five steps are followed by a forward
def test_the_probe_counts_steps_and_not_forwards(room: int, noted: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("PROBE", str(tmp_path))
    monkeypatch.setenv("PROBE_STEPS", str(room))
    from probe import Probe

    weight = nn.Parameter(torch.ones(2, 2))
    probe = Probe(weight)
    assert stamps_in(tmp_path) == []  # no step yet
    for _ in range(5):
        probe()
        probe()  # of a batch that is only tried
        with torch.no_grad():
            weight.add_(1)
    (found,) = stamps_in(tmp_path)
    assert len(found.steps) == noted
    assert found.first_forward <= found.steps[0][0] <= found.steps[1][0]
    assert found.threads == torch.get_num_threads()


@pytest.mark.parametrize("tier", ["equal", "user"])
@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_what_it_types_is_a_valid_command(workload: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    overrides = [word for word in ours(Case(workload, tier, processes=2, threads=1, steps=10), []) if not word.startswith("hydra.")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        checked = check_config(compose("config", overrides))
    assert checked.batch.micro_batch_size == WORKLOADS[workload].batch_size


@pytest.mark.long
@pytest.mark.distributed
def test_turns_print_a_row_for_each_way() -> None:
    options = ["--workloads", "W1", "--tiers", "user", "--processes", "2", "--ways", "torch", "ddp-train", "--pairs", "3"]
    command = [sys.executable, "-m", "tests.benchmark.whole_command", "turns", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=340)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| W1 user, 2 x \d+ \| ddp-train \| 3 \| [0-9.]+ ± [0-9.]+ \|", done.stdout)


@pytest.mark.long
@pytest.mark.distributed
def test_a_round_prints_a_row_for_each_way(tmp_path: Path) -> None:
    options = ["--workloads", "W1", "--tiers", "user", "--processes", "2", "--ways", "torch", "ddp-train", "--pairs", "1", "--steps", "60"]
    command = [sys.executable, "-m", "tests.benchmark.whole_command", *options, "--save", str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=340)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert re.search(r"\| W1 user, 2 x \d+ \| ddp-train \| 1 \| [0-9.]+ \| [0-9.]+ \|", done.stdout)
