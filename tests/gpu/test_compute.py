"""How a step is computed, on GPUs: compiled, in less precision, in less memory, cut among ranks. Each against the plain run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_train.system import process_env
from tests.conftest import metrics
from tests.gpu.conftest import Rig, asked_of_driver
from tests.gpu.judges import memory_line

pytestmark = pytest.mark.gpu

GROUP_OF_ONE = {process_env.ONE_GPU: "group"}
"""One rank with a process group of its own: what DDP and FSDP2 do between ranks, over NCCL, on one GPU."""
_STEPS = ["trainer.max_steps=30", "trainer.log_every_steps=5", "amp=off"]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run, "train")]


def config_of(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


def beyond(rig: Rig, name: str, *arguments: str) -> int:
    """Run some steps, and return what came on top of what lasts, at most, in bytes of rank 0's device."""
    done = rig.train(*arguments, f"hydra.run.dir={name}")
    parts = memory_line(done.stdout)
    rig.note(f"{name}: {parts['activations and all else'] / 2**20:.0f} MiB beside what lasts, at most {parts['at most'] / 2**20:.0f}")
    return parts["activations and all else"]


def test_strategies_compute_what_ddp_computes(rig: Rig) -> None:
    """`strategy=fsdp` and `zero1` over NCCL, and one that goes on with what another has saved: the losses of ddp, and less memory. On
    one GPU nothing is cut: there they must be ddp's to the bit."""
    command = [*rig.gpt, *_STEPS, "deterministic=true"]
    rig.train(*command, "hydra.run.dir=ddp")
    expected = losses(rig.folder("ddp"))
    for name in ("fsdp", "zero1"):
        rig.train(*command, f"strategy={name}", "hydra.run.dir=" + name)
        assert losses(rig.folder(name)) == (expected if rig.ranks == 1 else pytest.approx(expected, rel=1e-4)), name
    rig.train(*command, "trainer.max_steps=15", "hydra.run.dir=changing", "scheduler=constant")
    done = rig.train("resume", "changing", "trainer.max_steps=30", "strategy=fsdp")
    assert "resumed  after step 15" in done.stdout, done.output
    assert losses(rig.folder("changing")) == pytest.approx(expected, rel=1e-4)
    if rig.is_cuda:
        rig.note(f"peak of the last record: {', '.join(f'{name} {_peak(rig, name):.2f} GiB' for name in ('ddp', 'zero1', 'fsdp'))}")
        assert rig.ranks == 1 or _peak(rig, "fsdp") < _peak(rig, "zero1") < _peak(rig, "ddp")


def _peak(rig: Rig, name: str) -> float:
    return float(metrics(rig.folder(name), "train")[-1]["device/memory_gib"])


def test_compiled_runs_follow_the_run_as_it_is_written(rig: Rig) -> None:
    """`compile=default`, `reduce_overhead` and `max_autotune`, with a ragged last batch: the losses must be those of the plain run within
    rounding, graphs must be counted, and recompiles stay few. The time of a step is in the table. (A rehearsal has the first alone.)"""
    if not rig.is_cuda and shutil.which("g++") is None:
        pytest.skip("compiling for a CPU needs g++")
    modes = ["default", "reduce_overhead", "max_autotune"] if rig.is_cuda else ["default"]
    arguments = [*rig.gpt, *_STEPS, "evaluation.every_steps=15", "cluster.step_timeout_s=900", "cluster.start_timeout_s=900"]
    rig.train(*arguments, "hydra.run.dir=off")
    expected = losses(rig.folder("off"))
    rig.note(f"off: {metrics(rig.folder('off'), 'train')[-1]['step_ms']:.1f} ms a step")
    for mode in modes:
        rig.train(*arguments, f"compile={mode}", f"hydra.run.dir={mode}")
        last = metrics(rig.folder(mode), "train")[-1]
        assert losses(rig.folder(mode)) == pytest.approx(expected, rel=1e-2), mode
        assert last["compile/graphs"] >= 1, mode
        assert last["compile/recompiles"] <= 3, mode
        rig.note(f"{mode}: {last['step_ms']:.1f} ms a step, {last['compile/graphs']:.0f} graphs in {last['compile/seconds']:.0f} s")


def test_precision_is_what_the_gpu_has_and_the_curve_stays(rig: Rig) -> None:
    """`amp=auto` must come to bfloat16 exactly where the GPU computes it, and be in config.yaml; with TF32, `channels_last` and
    `cudnn_benchmark` the losses stay near those of plain float32."""
    has_it = rig.is_cuda and all(float(each) >= 8.0 for each in asked_of_driver("compute_cap"))
    arguments = [*rig.convnet, "trainer.max_steps=30", "trainer.log_every_steps=5", "optimizer.lr=0.0003"]
    rig.train(*arguments, "amp=off", "hydra.run.dir=plain")
    rig.train(*arguments, "amp=auto", "hydra.run.dir=auto")
    fast = ["precision.float32_matmul_precision=high", "precision.channels_last=true", "precision.cudnn_benchmark=true"]
    rig.train(*arguments, "amp=off", *fast, "hydra.run.dir=fast")
    assert config_of(rig.folder("auto"))["amp"]["dtype"] == ("bfloat16" if has_it else None)
    for name in ("auto", "fast"):
        assert losses(rig.folder(name)) == pytest.approx(losses(rig.folder("plain")), rel=5e-2, abs=1e-2), name  # abs: where it is nearly 0
    for name in ("plain", "auto", "fast"):
        rig.note(f"{name}: {metrics(rig.folder(name), 'train')[-1]['step_ms']:.1f} ms a step")


def test_what_saves_memory_saves_it(rig: Rig) -> None:
    """Activation checkpointing, full and selective, logits in chunks, and steps within backward: each must take less beside what lasts than
    the plain run, full less than selective, with the same losses within rounding."""
    rig.needs_cuda("torch counts a GPU's memory alone")
    arguments = [*rig.gpt, *_STEPS, "trainer.max_steps=5", "trainer.log_every_steps=1", "model.vocab_size=50304"]
    plain = beyond(rig, "plain", *arguments)
    full, selective, chunks = (
        beyond(rig, name, *arguments, setting)
        for name, setting in (
            ("full", "activation_checkpointing=full"),
            ("selective", "activation_checkpointing=selective"),
            ("chunks", "objective.chunk_tokens=512"),
        )
    )
    assert full < selective < plain
    assert chunks < plain
    for name in ("full", "selective", "chunks"):
        assert losses(rig.folder(name)) == pytest.approx(losses(rig.folder("plain")), rel=1e-3), name
    way, most = ["strategy=fsdp"] if rig.ranks > 1 else [], {}
    for name, setting in {"after backward": "false", "within": "true"}.items():
        done = rig.train(*arguments, *way, f"trainer.optimizer_in_backward={setting}", f"hydra.run.dir={name.partition(' ')[0]}")
        most[name] = memory_line(done.stdout)["at most"]
        rig.note(f"steps {name}: at most {most[name] / 2**20:.0f} MiB")
    assert most["within"] < most["after backward"]
    assert losses(rig.folder("within")) == pytest.approx(losses(rig.folder("after")), rel=1e-3)


def test_gradients_that_travel_in_fewer_bytes_train_as_whole_ones_do(rig: Rig) -> None:
    """`strategy.reduce_dtype` under ddp and zero1, and `strategy=power_sgd` from step 10 on: near the losses of whole gradients, and not
    theirs, which would mean that the setting does nothing."""
    rig.needs(2, "one exchanges nothing")
    ways = {"float16": ["strategy.reduce_dtype=float16"], "zero1": ["strategy=zero1", "strategy.reduce_dtype=float16"]}
    ways |= {"bfloat16": ["strategy.reduce_dtype=bfloat16"]} if rig.is_cuda else {}
    thin = ["strategy=power_sgd", "strategy.rank=2", "strategy.from_step=10"]
    arguments = [*rig.gpt, *_STEPS, "trainer.log_every_steps=1", "deterministic=true", "optimizer.lr=0.0003"]
    for name, way in {"whole": [], **ways, "thin": thin}.items():
        rig.train(*arguments, *way, f"hydra.run.dir={name}")
        rig.note(f"{name}: loss {losses(rig.folder(name))[-1]:.4f}, {metrics(rig.folder(name), 'train')[-1]['step_ms']:.1f} ms a step")
    whole = losses(rig.folder("whole"))
    for name in ways:
        assert losses(rig.folder(name)) == pytest.approx(whole, rel=2e-2), name
        assert losses(rig.folder(name)) != whole, name
    found = losses(rig.folder("thin"))
    assert found[:10] == pytest.approx(whole[:10], rel=1e-3)
    assert found[11:] == pytest.approx(whole[11:], rel=0.2)
    assert found[11:] != pytest.approx(whole[11:], rel=1e-5)


def test_batch_norms_take_the_samples_of_all_ranks(rig: Rig) -> None:
    """`strategy.sync_batchnorm=true`: on all ranks the losses of one rank with all samples, from which norms of each rank alone part."""
    rig.needs(2, "one has all samples anyway")
    rig.needs_cuda("torch's SyncBatchNorm runs on GPUs only")
    batch = f"trainer.global_batch_size={8 * rig.ranks}"
    arguments = [*rig.images, "model=mini_resnet", batch, "amp=off", "trainer.max_steps=20", "trainer.log_every_steps=1"]
    arguments += ["deterministic=true", "precision.float32_matmul_precision=highest", "optimizer.lr=0.0003"]
    rig.train(*arguments, f"loader.micro_batch_size={8 * rig.ranks}", "hydra.run.dir=one", ranks=1)
    for name, setting in {"together": "true", "apart": "false"}.items():
        rig.train(*arguments, "loader.micro_batch_size=8", f"strategy.sync_batchnorm={setting}", f"hydra.run.dir={name}")
    one, together, apart = (losses(rig.folder(name)) for name in ("one", "together", "apart"))
    assert together == pytest.approx(one, rel=1e-2)
    assert apart != pytest.approx(one, rel=1e-2)


def test_a_group_of_one_rank_computes_what_the_plain_run_does(rig: Rig) -> None:
    """DDP's wrap and FSDP2's streams, casts, shards in the host's memory and checkpoints, over NCCL with one rank: the losses of the run
    without a group, and each goes on from the plain run's checkpoint."""
    arguments = [*rig.gpt, *_STEPS, "deterministic=true", "trainer.grad_accum_steps=2", "checkpoint.every_steps=15", "scheduler=constant"]
    rig.train(*arguments, "hydra.run.dir=plain", ranks=1)
    expected = losses(rig.folder("plain"))
    ways = {
        "ddp": ["strategy=ddp"],
        "fsdp": ["strategy=fsdp"],
        "ahead": ["strategy=fsdp", "strategy.prefetch=2"],
        "zero1": ["strategy=zero1"],
    }
    ways |= {"host": ["strategy=fsdp", "strategy.cpu_offload=true"]} if rig.is_cuda else {}
    for name, way in ways.items():
        rig.train(*arguments, *way, f"hydra.run.dir={name}", ranks=1, env=GROUP_OF_ONE)
        assert losses(rig.folder(name)) == pytest.approx(expected, rel=1e-5), name
    shutil.copytree(rig.folder("plain"), rig.folder("going on"))
    done = rig.train("resume", "going on", "trainer.max_steps=40", "strategy=fsdp", ranks=1, env=GROUP_OF_ONE)
    assert "resumed  after step 30" in done.stdout, done.output
    half = [*arguments, "strategy=fsdp", "strategy.param_dtype=bfloat16", "strategy.reduce_dtype=float32"]
    rig.train(*half, "hydra.run.dir=half", ranks=1, env=GROUP_OF_ONE)
    assert losses(rig.folder("half")) == pytest.approx(expected, rel=5e-2)


def test_compiling_goes_with_evaluation_accumulation_and_fsdp(rig: Rig) -> None:
    """12 steps of a GPT of two layers, compiled, with an evaluation every four steps: with accumulation, and under fsdp. The losses must be
    those of the run as it is written."""
    if not rig.is_cuda and shutil.which("g++") is None:
        pytest.skip("compiling for a CPU needs g++")
    arguments = [*rig.gpt, "amp=off", "model.num_layers=2", "trainer.max_steps=12", "trainer.log_every_steps=4", "evaluation.every_steps=4"]
    arguments += ["cluster.step_timeout_s=900", "cluster.start_timeout_s=900"]
    ways = {"accumulation": ["compile=default", "trainer.grad_accum_steps=2"], "fsdp": ["compile=default", "strategy=fsdp"]}
    ways |= {"graphs": ["compile=reduce_overhead"]} if rig.is_cuda else {}
    for name, way in ways.items():
        given = way[1:] if name != "fsdp" else []
        rig.train(*arguments, *given, f"hydra.run.dir={name}_off", ranks=1)
        rig.train(*arguments, *way, f"hydra.run.dir={name}", ranks=1, env=GROUP_OF_ONE if name == "fsdp" else None)
        for split in ("train", "eval"):
            found, plain = ([each["loss"] for each in metrics(rig.folder(run), split)] for run in (name, f"{name}_off"))
            assert found == pytest.approx(plain, rel=1e-2), (name, split)


def test_the_memory_of_batches_that_wait_does_not_grow_with_the_micro_batches_of_a_step(rig: Rig) -> None:
    """The same micro-batch, once and 16 times a step: what a step takes at most must stay the same, but for two micro-batches and the
    gradients that are kept. Copied ahead of a step, all 16 would lie on the device."""
    rig.needs_cuda("batches lie where they are computed with")
    size = 256 * 3 * 32 * 32 * 4
    taken = {}
    for number in (1, 16):
        done = rig.train(*rig.convnet, f"trainer.grad_accum_steps={number}", "trainer.max_steps=10", f"hydra.run.dir={number}", ranks=1)
        taken[number] = memory_line(done.stdout)["at most"]
        rig.note(f"{number} micro-batches a step: at most {taken[number] / 2**20:.0f} MiB")
    assert taken[16] - taken[1] <= 2 * size + memory_line(done.stdout)["gradients"] + (2 << 20)
