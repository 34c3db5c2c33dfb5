"""What only GPUs can show, most valuable first. docs/gpu.md says how to run it, and what to send in."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from ddp_train.checkpoint import codec
from ddp_train.checkpoint.read import damage_of, newest_good, read_shared
from ddp_train.training.record import throughput
from tests.conftest import finish, metrics, our_processes
from tests.distributed.test_checkpoint_policy import steps_saved
from tests.distributed.test_failure import children, pid_of
from tests.distributed.test_sweep import jobs, statuses
from tests.gpu.conftest import Rig
from tests.gpu.judges import Sync, growth, not_obeyed, stray
from tests.gpu.parts import WARM_UP_STEPS, WRONG_LABEL

pytestmark = pytest.mark.gpu

_CLOCK = ("time", *throughput.NAMES)
_LATE_S = 2
_STEP_TIMEOUT_S = 10


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return all that a run has computed, without what depends on the clock."""
    return [{name: value for name, value in record.items() if name not in _CLOCK} for record in metrics(run)]


def tensors(run: Path) -> dict[str, Tensor]:
    """Return what all ranks have of a run's newest checkpoint: weights, buffers, the optimizer's state."""
    newest = newest_good(run / "checkpoints")
    assert newest is not None and newest == max((run / "checkpoints").glob("step_*"))  # none is passed over
    return codec.encode(read_shared(newest), "")[1]


def same_bits(one: Path, other: Path) -> None:
    """Check that two runs have computed the same, to the last bit of every number and every weight."""
    assert numbers(one) == numbers(other)
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name].view(-1), second[name].view(-1))]


def last_step(run: Path) -> int:
    """Return the last step that was logged."""
    try:
        return max((int(record["step"]) for record in metrics(run, "train")), default=0)
    except (OSError, ValueError):  # not there yet, or half a line
        return 0


def log_of(run: Path, rank: int) -> str:
    path = run / f"logs/rank_{rank:05d}.log"
    return path.read_text() if path.exists() else ""


def faults(*each: str) -> list[str]:
    return ["debug=faults", f"debug.faults=[{','.join(each)}]"]


def late(step: int) -> str:
    """Return the fault that holds up rank 0's host before a step, while the others run ahead."""
    return f"{{kind:sleep,rank:0,step:{step},seconds:{_LATE_S}}}"


def test_thirty_stops_take_one_step_on_all_ranks_and_lose_none(rig: Rig) -> None:
    """SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C, 30 times, to the launcher or to one rank; each third time while rank 0 is 2 s late. Each time
    all ranks must save the same step and end with 75 (Ctrl-C: 130), with nothing left behind; continued to its end the run must be,
    bit for bit, the one that never stopped."""
    stops = 30 if rig.is_cuda else 6
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    rig.note(f"seed {seed}")
    command = [*rig.convnet, "deterministic=true", "trainer.log_every_steps=20", "hydra.run.dir=run"]
    run, step, longest = rig.folder("run"), 0, 0.0
    for number in range(stops):
        is_late = number % 3 == 2
        process = rig.start(*command, "trainer.max_steps=1000000", *faults(*([late(step + 50)] if is_late else [])))
        heard = len(log_of(run, 0))
        if is_late:
            rig.wait(process, lambda at=heard: "debug.faults: sleep" in log_of(run, 0)[at:])  # type: ignore[misc]
        else:
            rig.wait(process, lambda than=step + 20: last_step(run) > than)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.6 * _LATE_S if is_late else 0.3))
        kind = draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
        rank = None if kind == signal.SIGINT or draw.random() < 0.3 else draw.randrange(rig.ranks)
        os.kill(process.pid if rank is None else pid_of(rank, children(process.pid)[0]), kind)
        sent = time.monotonic()
        done = finish(process, timeout=60)
        longest = max(longest, time.monotonic() - sent)
        assert done.returncode == (130 if kind == signal.SIGINT else 75), done.output
        result = json.loads((run / "result.json").read_text())
        step = int(result["step"])
        assert result["status"] == ("interrupted" if kind == signal.SIGINT else "preempted")
        assert [steps_saved(run, each)[-1] for each in range(rig.ranks)] == [step] * rig.ranks
        assert not (run / "failure.json").exists()
        assert not our_processes(rig.project.folder)
        to = "the launcher" if rank is None else f"rank {rank}"
        rig.say(f"      stop {number + 1} of {stops}: {kind.name} to {to}{', rank 0 late' if is_late else ''}: step {step}")
    rig.note(f"{stops} stops; the longest took {longest:.1f} s from the signal to the end")
    rig.train("resume", "run", f"trainer.max_steps={step + 20}", "debug.faults=[]")
    rig.train(*command[:-1], "hydra.run.dir=whole", f"trainer.max_steps={step + 20}")
    same_bits(run, rig.folder("whole"))


def test_saves_by_time_are_of_one_step_on_all_ranks(rig: Rig) -> None:
    """`checkpoint.every_minutes` while rank 0 is late three times: all ranks must save after the same steps, as the clock of rank 0 says,
    and every checkpoint that is there must be whole."""
    late_at = [late(step) for step in (40, 90, 140)]
    process = rig.start(
        *rig.convnet,
        *["trainer.max_steps=1000000", "trainer.log_every_steps=50", "checkpoint.every_minutes=0.015", "checkpoint.keep_last=3"],
        *["hydra.run.dir=run", *faults(*late_at)],
    )
    run = rig.folder("run")
    rig.wait(process, lambda: log_of(run, 0).count("debug.faults: sleep") == 3 and len(steps_saved(run, 0)) >= 8)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 75, done.output
    saved = [steps_saved(run, rank) for rank in range(rig.ranks)]
    assert saved == [saved[0]] * rig.ranks
    assert [damage_of(path) for path in sorted((run / "checkpoints").glob("step_*"))] == [None] * 3
    rig.note(f"{len(saved[0])} saves")


@pytest.mark.parametrize("workload", ["convnet", "gpt"])
def test_deterministic_runs_are_the_same_three_times(rig: Rig, workload: str) -> None:
    """`deterministic=true` with bf16, three times in processes of their own: every number and every weight must be the same bits."""
    arguments = [*getattr(rig, workload), "amp=bf16", "deterministic=true", "trainer.max_steps=40", "trainer.log_every_steps=1"]
    for number in range(3):
        rig.train(*arguments, f"hydra.run.dir={number}")
    for number in (1, 2):
        same_bits(rig.folder("0"), rig.folder(str(number)))


def test_a_killed_run_that_is_resumed_is_the_run_that_never_stopped(rig: Rig) -> None:
    """Dropout, Muon and (on a GPU) fp16 with its loss scaler; killed with -9 after its second checkpoint and typed again: the result must
    be, bit for bit, the uninterrupted run's."""
    arguments = [*rig.gpt, "optimizer=muon", f"amp={'fp16' if rig.is_cuda else 'bf16'}", "model.dropout=0.1", "deterministic=true"]
    arguments += ["trainer.max_steps=80", "trainer.log_every_steps=4", "checkpoint.every_steps=10", "evaluation.every_steps=30"]
    process = rig.start(*arguments, "hydra.run.dir=run")
    run = rig.folder("run")
    rig.wait(process, lambda: len(list((run / "checkpoints").glob("step_*/COMPLETE"))) >= 2)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (run / "result.json").exists()
    assert "resumed  after step" in rig.train(*arguments, "hydra.run.dir=run").stdout
    rig.train(*arguments, "hydra.run.dir=whole")
    same_bits(run, rig.folder("whole"))


HANGS: dict[str, tuple[Callable[[Rig], list[str]], str, int]] = {
    "convnet": (lambda rig: rig.convnet, "data", -1),
    "deep gpt": (lambda rig: rig.gpt, "step", -1),
    "muon": (lambda rig: [*rig.gpt, "optimizer=muon"], "data", 0),
}
"""Workload -> what is trained, in which phase one rank sleeps, and which (-1: the last)."""


@pytest.mark.parametrize("workload", HANGS)
def test_a_rank_that_hangs_is_named_and_no_other(rig: Rig, workload: str) -> None:
    """One rank sleeps for ever, and the others fill their device's queue and wait wherever that leaves them: failure.json must name that
    rank alone, within the time-out and two seconds."""
    build, phase, which = HANGS[workload]
    guilty = which % rig.ranks
    arguments = [*build(rig), "trainer.max_steps=1000000", "trainer.log_every_steps=100000", f"cluster.step_timeout_s={_STEP_TIMEOUT_S}"]
    process = rig.start(*arguments, *faults(f"{{kind:sleep,rank:{guilty},phase:{phase},step:30}}"), "hydra.run.dir=run")
    run = rig.folder("run")
    rig.wait(process, lambda: "debug.faults: sleep" in log_of(run, guilty))
    hung = time.time()
    done = finish(process)
    assert done.returncode == 1, done.output
    found = json.loads((run / "failure.json").read_text())
    seconds = (run / "failure.json").stat().st_mtime - hung
    assert (found["error"], found["rank"]) == ("Hang", guilty), done.output
    assert "so do ranks" not in found["message"], done.output
    assert seconds < _STEP_TIMEOUT_S + 2, done.output
    rig.note(f"rank {guilty} named after {seconds:.1f} s; the others: {'; '.join(found['others']) or '-'}")


def test_a_run_goes_on_with_half_the_ranks_and_with_all_of_them_again(rig: Rig) -> None:
    """20 steps on all ranks, 20 on half of them, 20 on all again (8, 4, 8): the same samples and, but for rounding, the same losses as in a
    run that all ranks do from start to end."""
    rig.needs(2, "it halves their number")
    all_ranks, half = rig.ranks - rig.ranks % 2, rig.ranks // 2
    arguments = [*rig.convnet, f"trainer.global_batch_size={16 * all_ranks}", "amp=off", "trainer.log_every_steps=1", "optimizer.lr=0.0003"]
    rig.train(*arguments, "trainer.max_steps=20", "hydra.run.dir=run", ranks=all_ranks)
    for steps, ranks in ((40, half), (60, all_ranks)):
        done = rig.train("resume", "run", f"trainer.max_steps={steps}", ranks=ranks)
        assert f"resumed  after step {steps - 20}," in done.stdout, done.output
    rig.train(*arguments, "trainer.max_steps=60", "hydra.run.dir=whole", ranks=all_ranks)
    changing, whole = (metrics(rig.folder(name), "train") for name in ("run", "whole"))
    assert [(record["step"], record["samples"]) for record in changing] == [(record["step"], record["samples"]) for record in whole]
    near = {"rel": 1e-2, "abs": 5e-3} if rig.is_cuda else {"rel": 1e-5}  # TF32 has ten bits; other samples would be 5 to 10% away
    assert [record["loss"] for record in changing] == pytest.approx([record["loss"] for record in whole], **near)


def test_strategies_train_as_ddp_does(rig: Rig) -> None:
    """20 steps in float32 under ddp, zero1 and fsdp, fsdp with two blocks asked for ahead, and with its shards in the host's memory: but
    for rounding the same losses. Killed with -9 and resumed under fsdp it is, bit for bit, the run that nothing happened to."""
    rig.needs(2, "they cut among the ranks")
    ways = {"ddp": ["strategy=ddp"], "zero1": ["strategy=zero1"], "fsdp": ["strategy=fsdp"]}
    ways |= {"ahead": [*ways["fsdp"], "strategy.prefetch=2"]}
    ways |= {"host": [*ways["fsdp"], "strategy.cpu_offload=true"]} if rig.is_cuda else {}
    command = [*rig.gpt, "amp=off", "deterministic=true", "trainer.max_steps=20", "trainer.log_every_steps=1", "trainer.clip_grad_norm=1.0"]
    losses = {}
    for name, overrides in ways.items():
        rig.train(*command, *overrides, f"hydra.run.dir={name}")
        losses[name] = [record["loss"] for record in metrics(rig.folder(name), "train")]
        assert losses[name] == pytest.approx(losses["ddp"], rel=1e-3 if rig.is_cuda else 1e-5), name
    again = [*command, *ways["fsdp"], "checkpoint.every_steps=5", "cluster.max_restarts=1", *faults("{kind:kill,rank:1,step:12}")]
    done = rig.train(*again, "hydra.run.dir=killed")
    assert "rank 1 failed (SIGKILL); restart 1 of 1" in done.output
    assert [record["loss"] for record in metrics(rig.folder("killed"), "train")] == losses["fsdp"]
    same_bits(rig.folder("killed"), rig.folder("fsdp"))


def test_ways_that_need_no_nccl_train_as_ddp_does(rig: Rig) -> None:
    """ddp, zero1 and local_sgd on ranks that may share one GPU: zero1's losses are ddp's but for rounding, local_sgd learns."""
    rig.needs(2, "they cut among the ranks, or add over them")
    command = [*rig.gpt, "amp=off", "trainer.max_steps=20", "trainer.log_every_steps=1", "optimizer.lr=0.001"]
    losses = {}
    for name in ("ddp", "zero1", "local_sgd"):
        rig.train(*command, f"strategy={name}", f"hydra.run.dir={name}")
        losses[name] = [record["loss"] for record in metrics(rig.folder(name), "train")]
    assert losses["zero1"] == pytest.approx(losses["ddp"], rel=1e-3 if rig.is_cuda else 1e-5)
    assert losses["local_sgd"][-1] < losses["local_sgd"][0]


def test_sweeps_one_by_one_and_packed_compute_what_single_runs_compute(rig: Rig) -> None:
    """Four jobs one after another in the same processes, two at a time on half the devices each, and as runs of their own: the same losses,
    bit for bit, and every job with its own devices."""
    each = max(1, rig.ranks // 2)
    arguments = [*rig.convnet, "deterministic=true", "trainer.max_steps=30", "trainer.log_every_steps=1", "cluster.threads_per_process=1"]
    swept = ["-m", *arguments, "optimizer.lr=0.001,0.0003", "seed=1,2"]
    rig.train(*swept, "hydra.sweep.dir=single", ranks=each)
    ways = ["single"]
    if rig.is_cuda and rig.ranks == 1:
        refused = rig.train(*swept, "hydra.sweep.dir=packed", "sweep.parallel_jobs=2", ranks=1, code=2)
        assert "2 processes at a time need a GPU each" in refused.output
        rig.note("packed needs two GPUs; with one it is refused, as it must be")
    else:
        rig.train(*swept, "hydra.sweep.dir=packed", "sweep.parallel_jobs=2", ranks=each)
        ways.append("packed")
    for number, (rate, seed) in ((0, (0.001, 1)), (3, (0.0003, 2))):
        rig.train(*arguments, f"optimizer.lr={rate}", f"seed={seed}", f"hydra.run.dir=single_{number}", ranks=each)
        for way in ways:
            assert numbers(rig.folder(way) / str(number)) == numbers(rig.folder(f"single_{number}")), way
    for way in ways:
        assert statuses(rig.folder(way)) == ["completed"] * 4
    assert numbers(rig.folder("single/1")) == numbers(rig.folder(f"{ways[-1]}/1")) != numbers(rig.folder("single/0"))


def test_a_step_with_a_nan_is_skipped_under_every_amp_and_optimizer(rig: Rig) -> None:
    """`amp` off, bf16 and fp16 with SGD, AdamW and Muon, under `health.on_nonfinite=skip`, with one NaN on the last rank: each job must
    skip that step on all ranks, end with a loss that is a number, and learn."""
    precisions = ["off", "bf16", "fp16"] if rig.is_cuda else ["off", "bf16"]
    arguments = [
        *rig.images,
        "model=mlp",
        "optimizer.lr=0.01",
        "health.on_nonfinite=skip",
        "trainer.max_steps=60",
        "trainer.log_every_steps=10",
    ]
    nan = faults(f"{{kind:nan,rank:{rig.ranks - 1},step:30}}")
    rig.train("-m", *arguments, *nan, f"amp={','.join(precisions)}", "optimizer=sgd,adamw,muon", "hydra.sweep.dir=sweep")
    sweep = rig.folder("sweep")
    assert statuses(sweep) == ["completed"] * 3 * len(precisions)
    for job in jobs(sweep):
        run, name = sweep / job["folder"], " ".join(text for text in job["overrides"] if text.startswith(("amp=", "optimizer=")))
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        records = metrics(run, "train")
        assert [event["kind"] for event in events if event["step"] == 31] == ["skipped"], name
        assert sum(record["skipped_steps"] for record in records) >= 1, name
        assert [record["step"] for record in records] == list(range(10, 61, 10)), name
        assert records[-1]["loss"] < 0.95 * records[0]["loss"], name
        rig.say(f"      {name}: loss {records[0]['loss']:.3f} to {records[-1]['loss']:.3f}, {len(events)} events")


def test_the_host_waits_for_the_device_only_at_logs_saves_and_evaluations(rig: Rig) -> None:
    """`torch.cuda.set_sync_debug_mode("warn")` over a run, with clipping: torch must warn of waiting after steps with a log, a save or an
    evaluation, and after no other one. (In a rehearsal a read of any tensor counts.)"""
    periods = {"log": 10, "save": 15, "evaluate": 25}
    arguments = [*rig.convnet, "model._target_=tests.gpu.parts.Synced", "trainer.clip_grad_norm=1.0", "amp=bf16", "trainer.max_steps=100"]
    rig.train(
        *[*arguments, f"trainer.log_every_steps={periods['log']}", f"checkpoint.every_steps={periods['save']}"],
        *[f"evaluation.every_steps={periods['evaluate']}", "hydra.run.dir=run"],
    )
    for rank in range(rig.ranks):
        lines = rig.folder(f"syncs_{rank}.jsonl").read_text().splitlines()
        syncs = [sync for sync in (Sync(**json.loads(line)) for line in lines) if sync.step > WARM_UP_STEPS]
        assert {20, 30, 40} <= {sync.step for sync in syncs}, "the logs have not been seen"
        assert stray(syncs, every_steps=list(periods.values()), last=100) == []
        rig.note(f"rank {rank}: {len(syncs)} waits in 100 steps")


def test_evaluations_keep_no_memory(rig: Rig) -> None:
    """64 evaluations in one run, each with batches of its own on the copy stream: what the allocator has reserved must not grow after the
    first 16."""
    arguments = [*rig.convnet, "model._target_=tests.gpu.parts.Weighed", "trainer.max_steps=128", "trainer.log_every_steps=64"]
    rig.train(*arguments, "evaluation.every_steps=2", "evaluation.batch_size=250", "hydra.run.dir=run")
    batches = len(rig.folder("memory_0.jsonl").read_text().split()) // 64
    assert len(metrics(rig.folder("run"), "eval")) == 64
    for rank in range(rig.ranks):
        held = [int(line) for line in rig.folder(f"memory_{rank}.jsonl").read_text().split()]
        more = growth(held, settled_after=16 * batches)
        assert more <= 20 << 20, held[::batches]  # the allocator's large unit; one cache kept per evaluation would be more
        rig.note(f"rank {rank}: {held[-1] / 2**20:.0f} MiB, grown by {more / 2**20:.0f}")


def test_what_is_measured_and_recorded_is_of_the_gpu(rig: Rig) -> None:
    """A run with `profile=trace`, and one with `profile=memory`: kernels below the names of a step's parts, a table by the GPU's time with
    communication overlapped with it, torch's snapshot of allocations; and in each record memory and, of a known GPU, MFU up to 1."""
    arguments = [*rig.convnet, "amp=bf16", "trainer.max_steps=30", "trainer.log_every_steps=10", "profile.start_step=12"]
    trace = rig.train(*arguments, "profile=trace", "hydra.run.dir=trace")
    rig.train(*arguments, "profile=memory", "hydra.run.dir=memory")
    (found,) = rig.folder("trace/profile").glob("rank_00000_*.pt.trace.json.gz")
    with gzip.open(found, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    assert {"data", "forward", "backward", "optimizer"} <= {event["name"] for event in events if event.get("cat") == "user_annotation"}
    record = metrics(rig.folder("trace"), "train")[-1]
    if rig.is_cuda:
        assert any(event.get("cat") == "kernel" for event in events)
        assert "GPU ms" in trace.stdout and ("overlapped with computing" in trace.stdout or rig.ranks == 1)
        assert len(list(rig.folder("memory/profile").glob("rank_00000_*_memory.pickle"))) == 1
        assert 0 < record["device/memory_gib"] <= record["device/reserved_gib"]
    assert "mfu" not in record or 0 < record["mfu"] <= 1
    rig.note(f"MFU {record.get('mfu', 'is not known')}, {len(events)} events")


def test_memory_that_is_not_there_is_named(rig: Rig) -> None:
    """A rank asks for a petabyte in its sixth step: the screen must name that rank, say that memory is short, and what helps; and no other
    rank must be blamed."""
    guilty = rig.ranks - 1
    greedy = ["model._target_=tests.gpu.parts.Greedy", f"+model.rank={guilty}", "+model.step=6", "trainer.log_every_steps=100000"]
    done = rig.train(*rig.convnet, *greedy, "trainer.max_steps=1000000", "hydra.run.dir=run", code=1)
    found = json.loads((rig.folder("run") / "failure.json").read_text())
    assert found["rank"] == guilty, done.output
    assert done.output.count("The run failed: ") == 1, done.output
    if rig.is_cuda:
        assert found["error"] == "OutOfMemoryError", done.output
        assert "loader.micro_batch_size" in found["fix"], done.output
    else:
        assert "can't allocate memory" in found["message"], done.output


def test_memory_that_a_library_finds_short_is_named(rig: Rig) -> None:
    """A rank fills its device, and a library asks for memory outside torch's allocator: the screen must say that memory is short, and what
    helps. What the library said is in the table: a case for tests/unit/training/check/test_memory.py."""
    crowded = ["model._target_=tests.gpu.parts.Crowded", "trainer.max_steps=100", "hydra.run.dir=run"]
    done = rig.train(*rig.convnet, *crowded, ranks=1, code=1)
    found = json.loads((rig.folder("run") / "failure.json").read_text())
    rig.note(found["message"][:250].replace("\n", " "))
    assert "out of memory in " in found["message"], done.output
    assert "loader.micro_batch_size" in found["fix"], done.output


def test_streams_that_are_held_up_change_no_bit(rig: Rig) -> None:
    """The same run as it is, with a device that waits for each kernel, with forwards that hold up the main stream, and under torch's
    sanitizer of streams: the same bits each time, and the sanitizer finds nothing."""
    steps = ["trainer.max_steps=40", "trainer.log_every_steps=5", "checkpoint.every_steps=7", "evaluation.every_steps=13"]
    command = [*rig.convnet, "deterministic=true", "callbacks=[ema]", *steps]
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        "plain": ([], {}),
        "waits": ([], {"CUDA_LAUNCH_BLOCKING": "1"}),
        "late": (["model._target_=tests.gpu.parts.Late"], {}),
    }
    ways |= {"sanitized": ([], {"TORCH_CUDA_SANITIZER": "1"})} if rig.is_cuda else {}
    for name, (changes, env) in ways.items():
        done = rig.train(*command, *changes, f"hydra.run.dir={name}", env=env)
        logs = "".join(log_of(rig.folder(name), rank) for rank in range(rig.ranks))
        assert "data race" not in done.output + logs, name
        same_bits(rig.folder(name), rig.folder("plain"))


def test_the_largest_micro_batch_that_fits_is_found(rig: Rig) -> None:
    """Some 17 samples of a model fill the device: `loader.micro_batch_size=auto` must find a number near that, the run take its steps with
    it, and one that goes on take the same number."""
    rig.needs_cuda("a process that runs out of memory on CPU is killed without an error")
    hungry = [*rig.convnet, "model._target_=tests.gpu.parts.Hungry", "loader.micro_batch_size=auto", "trainer.grad_accum_steps=null"]
    arguments = [*hungry, f"trainer.global_batch_size={64 * rig.ranks}", "hydra.run.dir=run"]
    rig.train(*arguments, "trainer.max_steps=5")
    config = yaml.safe_load((rig.folder("run") / "config.yaml").read_text())
    found = config["loader"]["micro_batch_size"]
    assert 8 <= found <= 18, found
    rig.note(f"a micro-batch of {found}")
    done = rig.project.run("resume", "run", "trainer.max_steps=10", timeout=300)
    assert done.returncode == 0, done.output
    assert f"micro-batch {found} x" in done.output, done.output


def test_a_label_out_of_range_is_named(rig: Rig) -> None:
    """One sample's label is no class. A GPU would stop at an assertion of its own, which every later call reports as its error; the screen
    must say the label, the sample and the number of classes, as the data has its labels."""
    wrong = ["+data.wrong_label_of=77", "trainer.log_every_steps=100000", "trainer.max_steps=1000000"]
    done = rig.project.run(*rig.convnet, *wrong, "hydra.run.dir=run", *rig.on(), timeout=300)
    assert done.returncode in (1, 2), done.output
    screen = done.output[done.output.index("The run failed: ") :]
    assert re.search(rf"\b{WRONG_LABEL}\b", screen), done.output
    assert re.search(r"\b77\b", screen), done.output
    assert re.search(r"\b10 classes\b", screen), done.output
    assert "device-side assert" not in screen, done.output


def test_the_loop_costs_what_a_hand_written_one_costs(rig: Rig) -> None:
    """tests/benchmark/loop_overhead.py on this device: both loops must end with the same weights, and ours must add less than half a
    millisecond to a step: some 0.1 ms of the host's time, and no wait for the device. What it adds is in the table."""
    script = Path(__file__).parents[1] / "benchmark" / "loop_overhead.py"
    counts = sorted({1, rig.ranks})
    pairs = 20 if rig.is_cuda else 3
    rig.on(1), rig.on()
    command = [sys.executable, str(script), "--device", rig.device, "--pairs", str(pairs), "--processes", *map(str, counts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \(", done.stdout)
    assert len(rows) == (3 if rig.is_cuda else 2) * len(counts), done.stdout
    for name, processes, raw, ours, ratio in rows:
        rig.note(f"{name}, {processes} processes: {ours} ms a step, hand-written {raw}, ratio {ratio}")
    assert not rig.is_cuda or all(float(ours) - float(raw) < 0.5 for _, _, raw, ours, _ in rows)


def test_nccl_has_the_environment_that_the_config_says(rig: Rig) -> None:
    """`cluster.env` and what `deterministic=true` adds must be what NCCL says it was given, in the log of every rank."""
    rig.needs_cuda("gloo says nothing of the kind")
    rig.needs(2, "one rank opens no NCCL")
    rig.needs_nccl()
    wanted = {"NCCL_BUFFSIZE": "2097152", "NCCL_ALGO": "^NVLS", "NCCL_SOCKET_IFNAME": "lo"}
    says = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "'INIT,ENV,TUNING'", "NCCL_BUFFSIZE": wanted["NCCL_BUFFSIZE"]}
    given = [*(f"+cluster.env.{name}={value}" for name, value in says.items()), "deterministic=true"]
    rig.train(*rig.convnet, *given, "trainer.max_steps=2", "hydra.run.dir=run")
    run = rig.folder("run")
    for rank in range(rig.ranks):
        assert not_obeyed(wanted, log_of(run, rank)) == [], f"rank {rank}"
    facts = json.loads((run / "environment.json").read_text())
    rig.note(f"NCCL {facts['nccl']}: {', '.join(f'{name}={value}' for name, value in wanted.items())}")
