"""Rules across sections: the batch's identity, the run's length, the device. Each yields the problems that it finds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.batch_sizes import MICRO_BATCH, BatchSizes, accumulation_of, derive_batch_sizes
from ddp_train.config.cluster import check_environment, max_restarts, meeting, most_nodes
from ddp_train.config.evaluation_split import evaluation_sets
from ddp_train.config.schema import (
    EVALUATION_METRICS,
    EVALUATION_SETS,
    ActivationCheckpointingConfig,
    CheckpointConfig,
    ClusterConfig,
    CompileConfig,
    DebugConfig,
    EvaluationConfig,
    HealthConfig,
    LoaderConfig,
    PrecisionConfig,
    ProfileConfig,
    TrainerConfig,
    batch_changes,
    host_and_processes,
    length_changes,
    node_range,
    seconds_of,
)
from ddp_train.errors import ConfigError
from ddp_train.system import devices
from ddp_train.system.torchrun_env import is_torchrun_worker

_OF_ROWS = ("ddp_train.strategy.fsdp.FSDP", "ddp_train.strategy.zero1.Zero1")
_OF_DDP = ("ddp_train.strategy.ddp.", "ddp_train.strategy.zero1.")
_REDUCES_IN_BACKWARD = ("ddp_train.strategy.fsdp.FSDP",)
_LOCAL_SGD = "ddp_train.strategy.local_sgd.LocalSGD"
_OF_MATRICES = ("muon", "Muon", "Adafactor", "LBFGS")


def check_rules(sections: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[BatchSizes | None, list[ConfigError]]:
    """Check what concerns several keys, and derive the sizes of the batch.

    Args:
        sections: those of our own that are valid by themselves, typed.
    """
    cluster, loader, trainer = sections.get("cluster"), sections.get("loader"), sections.get("trainer")
    health, evaluation, checkpoint, debug = (sections.get(name) for name in ("health", "evaluation", "checkpoint", "debug"))
    profile = sections.get("profile")
    is_evaluated = bool(evaluation_sets(tree))
    batch, errors = None, list[ConfigError]()
    if trainer and loader and cluster:
        try:
            batch = derive_batch_sizes(trainer, loader, cluster)
        except ConfigError as error:
            errors.append(error)
    if loader:
        errors += _check_loader(loader)
    if trainer:
        errors += _check_steps(trainer, tree.get("scheduler"))
    if health and checkpoint:
        errors += _check_health(health, checkpoint, is_evaluated=is_evaluated)
    if batch and trainer and loader:
        most = batch.grad_accum_steps
        if trainer.batch_size_schedule:
            sizes = [size for _, size in batch_changes(trainer.batch_size_schedule)]
            most = max(most, *(accumulation_of(size, loader, batch.world_size) for size in sizes))
            errors += _check_batch_sizes(trainer, loader, debug, sizes=sizes, world_size=batch.world_size)
        errors += _check_strategy(tree.get("strategy"), tree.get("optimizer"), most, world_size=batch.world_size)
        if trainer.optimizer_in_backward:
            errors += _check_early_step(sections, tree, 2 if batch.is_open else most, world_size=batch.world_size)
        if trainer.length_schedule:
            errors += _check_lengths(trainer, tree.get("data"))
        if batch.is_open:
            errors += _check_open_micro_batch(tree, world_size=batch.world_size)
        errors += _check_local_sgd(tree, trainer, world_size=batch.world_size)
    if evaluation:
        errors += _check_evaluation(evaluation, is_evaluated=is_evaluated)
    if checkpoint and evaluation:
        errors += _check_checkpoints(checkpoint, evaluation, is_evaluated=is_evaluated)
    if cluster:
        errors += _check_device(cluster, tree.get("amp"), tree.get("strategy"))
        if batch and batch.world_size > 1:
            errors += _check_of_gpus(cluster, tree.get("strategy"))
        errors += _check_machines(cluster)
    if precision := sections.get("precision"):
        errors += _check_precision(precision, tree.get("strategy"), is_deterministic=tree.get("deterministic") is True)
    if checkpointing := sections.get("activation_checkpointing"):
        errors += _check_activation_checkpointing(checkpointing)
    if compiling := sections.get("compile"):
        errors += _check_compile(compiling)
    if debug:
        errors += _check_debug(debug)
    if profile:
        errors += _check_profile(profile, trainer, batch)
    if debug and loader:
        errors += _check_faults(debug, loader, batch)
    return batch, errors


def _check_batch_sizes(
    trainer: TrainerConfig, loader: LoaderConfig, debug: DebugConfig | None, *, sizes: list[int], world_size: int
) -> Iterator[ConfigError]:
    """Refuse batch sizes that change together with what needs one size."""
    key = "trainer.batch_size_schedule"
    if min(sizes) < world_size:
        yield ConfigError(
            key=key, happened=f"has a size of {min(sizes)} for {world_size} ranks", expected="a sample for each rank at least"
        )
    if trainer.grad_accum_steps is not None:
        yield ConfigError(
            key="trainer.grad_accum_steps",
            happened=f"is {trainer.grad_accum_steps}, and {key} changes the global batch",
            expected="null: it follows from the size, loader.micro_batch_size and the number of ranks",
            fix="trainer.grad_accum_steps=null trainer.global_batch_size=SIZE",
        )
    fixed = {"loader.drop_last": (loader.drop_last, "false"), "loader.bucket_batches": (loader.bucket_batches, "null")}
    if debug is not None:
        fixed["debug.overfit"] = (debug.overfit, "false")
    for name, (value, without) in fixed.items():
        if value:
            yield ConfigError(key=name, happened=f"is {value}, and {key} is given", expected="one of the two", fix=f"{name}={without}")


def _check_strategy(strategy: Any, optimizer: Any, grad_accum_steps: int, *, world_size: int) -> Iterator[ConfigError]:
    """Refuse what a strategy cannot do: DDP's static graph with accumulation (pytorch issue 143580), whole matrices where rows are kept."""
    if world_size == 1 or not isinstance(strategy, dict):
        return
    if grad_accum_steps > 1 and strategy.get("static_graph"):
        yield ConfigError(
            key="strategy.static_graph",
            happened=f"is true, with {grad_accum_steps} micro-batches a step",
            expected="one of the two",
            fix="strategy.static_graph=false",
        )
    replicas = strategy.get("replicas", 1)
    if isinstance(replicas, int) and (replicas < 1 or world_size % replicas):
        yield ConfigError(
            key="strategy.replicas", happened=f"is {replicas}, on {world_size} ranks", expected="a number that divides that of the ranks"
        )
    name = str(optimizer.get("_target_")).rpartition(".")[2] if isinstance(optimizer, dict) else ""
    if strategy.get("_target_") in _OF_ROWS and name in _OF_MATRICES:
        yield ConfigError(
            key="optimizer",
            happened=f"is {name}, which needs whole matrices, and with this strategy a rank steps some rows of them",
            expected="an optimizer that steps each number by itself (AdamW, SGD)",
            fix="optimizer=adamw, or strategy=ddp",
        )


def _check_lengths(trainer: TrainerConfig, data: Any) -> Iterator[ConfigError]:
    """Refuse pieces into which a window cannot be cut evenly, where the config says how long it is."""
    whole = data.get("context_length") if isinstance(data, dict) else None
    if not isinstance(whole, int):
        return  # the data says it itself, to a rank
    if uneven := [length for _, length in length_changes(trainer.length_schedule) if whole % length]:
        yield uneven_length(uneven[0], whole)


def uneven_length(length: int, whole: int) -> ConfigError:
    """Return what is wrong with a length that does not divide that of the windows."""
    near = max(each for each in range(1, min(length, whole) + 1) if whole % each == 0)
    return ConfigError(
        key="trainer.length_schedule",
        happened=f"has a length of {length}, and windows have {whole} tokens (data.context_length)",
        expected=f"lengths that divide it, as {near}",
    )


def _check_early_step(sections: Mapping[str, Any], tree: Mapping[str, Any], micro_steps: int, *, world_size: int) -> Iterator[ConfigError]:
    """Refuse to step in backward with what needs all gradients of a step at a time, or where nothing would be saved."""
    trainer, health = sections["trainer"], sections.get("health")
    strategy, optimizer, amp = (each if isinstance(each := tree.get(name), dict) else {} for name in ("strategy", "optimizer", "amp"))
    target, strategy_name = str(optimizer.get("_target_")), str(strategy.get("_target_"))
    with_it = "and trainer.optimizer_in_backward is true"
    if trainer.clip_grad_norm is not None:
        yield ConfigError(
            key="trainer.clip_grad_norm",
            happened=f"is {trainer.clip_grad_norm}, which takes the norm of all gradients before the first step, {with_it}",
            expected="one of the two",
            fix="trainer.clip_grad_norm=null",
        )
    if micro_steps > 1:
        yield ConfigError(
            key="loader.micro_batch_size",
            happened=f"a step has several micro-batches, whose gradients add up, {with_it}",
            expected="one micro-batch a step on each rank",
            fix="a larger loader.micro_batch_size, or a smaller trainer.global_batch_size",
        )
    if health is not None and health.on_nonfinite == "skip":
        yield ConfigError(
            key="health.on_nonfinite",
            happened=f"is skip, which looks at all gradients before a step is taken, {with_it}",
            expected="one of the two",
            fix="health.on_nonfinite=rewind",
        )
    if amp.get("dtype") == "float16":
        yield ConfigError(
            key="amp", happened=f"is fp16, which looks at all gradients before a step is taken, {with_it}", fix="amp=bf16 or amp=off"
        )
    if not target.startswith(("torch.optim.", "ddp_train.optimizer.adamw.")) or target.endswith("LBFGS"):
        yield ConfigError(
            key="optimizer",
            happened=f"is {target}, which may need all parameters in a step, {with_it}",
            expected="one of torch's, which step each parameter by itself (AdamW, SGD)",
            fix="optimizer=adamw",
        )
    if world_size > 1 and strategy_name not in _REDUCES_IN_BACKWARD:
        yield ConfigError(
            key="strategy",
            happened=f"is {strategy_name.rpartition('.')[2]}, {with_it}",
            expected="strategy=fsdp, or one process: there a gradient is whole within backward, and its memory can be given back",
            fix="strategy=fsdp",
        )
    for name in (name for name, value in strategy.items() if "offload" in name and value):
        yield ConfigError(
            key=f"strategy.{name}",
            happened=f"is {strategy[name]}: gradients leave the device by themselves, {with_it}",
            expected="one of the two",
            fix="trainer.optimizer_in_backward=false",
        )


def _check_open_micro_batch(tree: Mapping[str, Any], *, world_size: int) -> Iterator[ConfigError]:
    """Refuse to let the device decide on a micro-batch where results depend on it, or where it may need accumulation that cannot be."""
    objective, strategy = tree.get("objective"), tree.get("strategy")
    if isinstance(objective, dict) and str(objective.get("_target_")).endswith(".Contrastive"):
        yield ConfigError(
            key=MICRO_BATCH,
            happened="is auto, and the objective compares the samples of a micro-batch: the gradient would depend on the device",
            expected="a number",
            fix=f"{MICRO_BATCH}=32",
        )
    if world_size > 1 and isinstance(strategy, dict) and strategy.get("static_graph"):
        yield ConfigError(
            key="strategy.static_graph",
            happened=f"is true, and {MICRO_BATCH} is auto, which may come to several micro-batches a step",
            expected="one of the two",
            fix="strategy.static_graph=false",
        )


def _check_local_sgd(tree: Mapping[str, Any], trainer: TrainerConfig, *, world_size: int) -> Iterator[ConfigError]:
    """Refuse ranks that take steps of their own with a loss scale of their own, and where a step is to be what it is not."""
    strategy = tree.get("strategy")
    if not isinstance(strategy, dict) or strategy.get("_target_") != _LOCAL_SGD:
        return
    every, lr, momentum = strategy.get("every_steps"), strategy.get("outer_lr"), strategy.get("outer_momentum")
    if isinstance(every, int) and every < 1:
        yield ConfigError(key="strategy.every_steps", happened=f"is {every}", expected="at least 1")
    if isinstance(lr, (int, float)) and lr <= 0:
        yield ConfigError(key="strategy.outer_lr", happened=f"is {lr}", expected="above 0")
    if isinstance(momentum, (int, float)) and not 0 <= momentum < 1:
        yield ConfigError(key="strategy.outer_momentum", happened=f"is {momentum}", expected="at least 0 and below 1")
    if world_size == 1:
        return
    amp, optimizer = tree.get("amp"), tree.get("optimizer")
    if isinstance(amp, dict) and amp.get("dtype") == "float16":
        yield ConfigError(
            key="amp.dtype",
            happened="is float16, and with strategy=local_sgd each rank would skip steps by a loss scale of its own",
            expected="a type that needs no loss scale",
            fix="amp=bf16",
        )
    name = str(optimizer.get("_target_")).rpartition(".")[2] if isinstance(optimizer, dict) else ""
    if every == 1 and (name != "SGD" or trainer.clip_grad_norm is not None):
        what = f"the optimizer is {name}" if name != "SGD" else "trainer.clip_grad_norm is given"
        yield ConfigError(
            key="strategy.every_steps",
            happened=f"is 1, and {what}: as much would travel as with ddp, and the mean of the ranks' steps is not the step of the mean",
            expected="2 or more; 1 is the same as ddp for SGD without clipping",
            fix="strategy=ddp",
        )


def _check_loader(loader: LoaderConfig) -> Iterator[ConfigError]:
    """Refuse workers for data that is on the device; check that there are weights where samples are drawn by weight, and nowhere else."""
    if loader.on_device and loader.num_workers:
        yield ConfigError(
            key="loader.num_workers",
            happened=f"is {loader.num_workers}, but loader.on_device=true leaves nothing to read",
            fix="loader.num_workers=0",
        )
    if loader.sampler is not None and loader.sampling != "shuffled":
        yield ConfigError(
            key="loader.sampling",
            happened=f"is {loader.sampling}, and loader.sampler says which sample comes when",
            expected="one of the two",
            fix="loader.sampling=shuffled, which leaves it to the sampler",
        )
    is_weighted = loader.sampling == "weighted"
    if is_weighted != (loader.sample_weights is not None):
        yield ConfigError(
            key="loader.sample_weights",
            happened="is not given" if is_weighted else f"is given, but loader.sampling is {loader.sampling}",
            expected="a file of weights with loader.sampling=weighted, and none without",
            fix="loader.sample_weights=FILE.npy" if is_weighted else "loader.sampling=weighted",
        )


def _check_steps(trainer: TrainerConfig, scheduler: Any) -> Iterator[ConfigError]:
    """Check that the run ends, and that the scheduler's phases fit into it (by epochs, a rank checks when it knows the data)."""
    if trainer.max_steps is None and trainer.max_epochs is None:
        yield ConfigError(key="trainer.max_steps", happened="neither max_steps nor max_epochs is given", fix="trainer.max_steps=1000")
    elif isinstance(scheduler, dict):
        phases = {name: scheduler[name] for name in ("warmup_steps", "decay_steps") if isinstance(scheduler.get(name), int)}
        negative = [name for name, value in phases.items() if value < 0]
        for name in negative:
            yield ConfigError(key=f"scheduler.{name}", happened=f"is {phases[name]}", expected="at least 0")
        spelled = " + ".join(f"{name} {value}" for name, value in phases.items())
        if not negative and trainer.max_steps is not None and sum(phases.values()) > trainer.max_steps:
            yield ConfigError(
                key="scheduler.warmup_steps" if "warmup_steps" in phases else "scheduler.decay_steps",
                happened=f"{spelled}: more than the run's {trainer.max_steps} steps",
                expected="a schedule that fits into trainer.max_steps",
                fix=f"scheduler.warmup_steps={trainer.max_steps // 10}, or a longer run",
            )


def _check_health(health: HealthConfig, checkpoint: CheckpointConfig, *, is_evaluated: bool) -> Iterator[ConfigError]:
    """Check that there is something to go back to where a run may have to, and that spikes which lead to it are looked for."""
    if health.on_spike == "rewind" and health.spike_zscore is None:
        yield ConfigError(
            key="health.on_spike",
            happened="is rewind, but health.spike_zscore is null: spikes are not looked for",
            expected="both or none",
            fix="health.spike_zscore=8",
        )
    rewinding = [key for key in ("on_nonfinite", "on_spike") if getattr(health, key) == "rewind"]
    saves_evaluations = checkpoint.every_evaluation and is_evaluated
    if rewinding and checkpoint.every_steps is None and checkpoint.every_minutes is None and not saves_evaluations:
        yield ConfigError(
            key=f"health.{rewinding[0]}",
            happened="is rewind, but nothing is saved by steps, minutes or evaluations: there is no checkpoint before the end",
            expected="checkpoints to go back to",
            fix="checkpoint.every_steps=1000",
        )


def _check_evaluation(evaluation: EvaluationConfig, *, is_evaluated: bool) -> Iterator[ConfigError]:
    """Refuse to save the predictions of evaluations that never are, and sets without a name for records and folders."""
    if evaluation.save_predictions and not is_evaluated:
        yield ConfigError(
            key="evaluation.save_predictions",
            happened="is true, but data.eval is null: nothing is evaluated",
            expected="an evaluation split",
            fix="evaluation.save_predictions=false, or data.eval with the arguments that differ for the evaluation split",
        )
    for name, changes in evaluation.sets.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name, re.ASCII) or name.startswith("step_"):
            yield ConfigError(
                key=f"{EVALUATION_SETS}.{name}",
                happened="is no name for an evaluation set: its metrics are eval/NAME/loss, its predictions in predictions/NAME",
                expected="letters, digits, '_' and '-', 64 at most, a letter or digit first, and not step_",
            )
        if not isinstance(changes, Mapping | None):
            yield ConfigError(
                key=f"{EVALUATION_SETS}.{name}",
                happened=f"is {changes!r}",
                expected="what differs from the training data, {} for nothing; or null",
                fix=f"'evaluation.sets.{name}={{split: test}}'",
            )
    for metric in (name for name in evaluation.metrics if "/" in name):
        yield ConfigError(key=f"{EVALUATION_METRICS}.{metric}", happened="has a slash, as the metrics of evaluation sets", expected="none")


def _check_debug(debug: DebugConfig) -> Iterator[ConfigError]:
    """Refuse to resume where nothing is left to be trained."""
    if debug.resume_after_steps is not None and (debug.max_steps is None or debug.resume_after_steps >= debug.max_steps):
        yield ConfigError(
            key="debug.resume_after_steps",
            happened=f"is {debug.resume_after_steps}, and debug.max_steps is {'null' if debug.max_steps is None else debug.max_steps}",
            expected="fewer steps than debug.max_steps",
            fix=f"debug.max_steps={2 * debug.resume_after_steps}",
        )


def _check_profile(profile: ProfileConfig, trainer: TrainerConfig | None, batch: BatchSizes | None) -> Iterator[ConfigError]:
    """Refuse ranks that there are not, and steps that do not come."""
    ranks = profile.ranks
    # Elastic ranks may be fewer than before: those that are left record.
    most = batch.world_size - 1 if batch is not None and not is_torchrun_worker() else None
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0 or (most is not None and max(ranks) > most):
        yield ConfigError(
            key="profile.ranks",
            happened=f"is {list(ranks)}",
            expected="ranks of this run, each once" + (f": 0 to {most}" if most is not None else ""),
            fix="profile.ranks=[0]",
        )
    last = trainer.max_steps if trainer is not None else None
    if profile.kind != "off" and last is not None and profile.start_step >= last:
        yield ConfigError(
            key="profile.start_step",
            happened=f"is {profile.start_step}, and trainer.max_steps is {last}: no step would be recorded",
            expected="fewer than the run's steps",
            fix=f"profile.start_step={last // 2}",
        )


def _check_faults(debug: DebugConfig, loader: LoaderConfig, batch: BatchSizes | None) -> list[ConfigError]:
    """Refuse faults that could not happen."""
    errors = []
    for place, fault in enumerate(debug.faults):
        kind, has_seconds = fault.kind, fault.seconds is not None

        def refuse(name: str, happened: str, expected: str, place: int = place) -> None:
            errors.append(ConfigError(key=f"debug.faults.{place}.{name}", happened=happened, expected=expected))

        # Elastic ranks may be fewer than before: there a fault of one that has gone does not happen.
        if batch is not None and fault.rank >= batch.world_size and not is_torchrun_worker():
            refuse("rank", f"is {fault.rank}", f"a rank of this run: 0 to {batch.world_size - 1}")
        if kind.startswith("worker_") and not loader.num_workers:
            refuse("kind", f"is {kind}, and loader.num_workers is 0", "loader workers: loader.num_workers=1")
        if kind in ("nan", "spike") and fault.phase not in ("data", "step"):
            refuse("phase", f"is {fault.phase}", f"data or step: {kind} is of a training step")
        if fault.phase == "start" and fault.step is not None:
            refuse("step", f"is {fault.step}, with phase start", "null: the start comes before all steps")
        if kind == "slow" and not has_seconds:
            refuse("seconds", "is not given", "how long each step is held up, in seconds")
        if has_seconds and kind not in ("sleep", "slow", "no_space", "read_only"):
            refuse("seconds", f"is {fault.seconds}", f"none: {kind} takes no time")
        if kind == "read_only" and os.geteuid() == 0:
            refuse("kind", "is read_only, and you are root, for whom no folder is", "another user; or mount the file system read-only")
    return errors


def _check_checkpoints(checkpoint: CheckpointConfig, evaluation: EvaluationConfig, *, is_evaluated: bool) -> Iterator[ConfigError]:
    """Refuse to keep every n-th checkpoint where most of them are never saved."""
    every, keeps = checkpoint.every_steps, checkpoint.keep_every_steps
    evaluated = evaluation.every_steps if checkpoint.every_evaluation and is_evaluated else None
    if keeps is not None and all(period is None or keeps % period != 0 for period in (every, evaluated)):
        yield ConfigError(
            key="checkpoint.keep_every_steps",
            happened=f"is {keeps}, and checkpoint.every_steps is {'null' if every is None else every}: few such steps are saved, or none",
            expected="a multiple of checkpoint.every_steps, or of evaluation.every_steps where every evaluation is saved",
            fix=f"checkpoint.every_steps={keeps}" if every is None else f"checkpoint.keep_every_steps={-(-keeps // every) * every}",
        )


def _check_device(cluster: ClusterConfig, amp: Any, strategy: Any) -> Iterator[ConfigError]:
    device = devices.resolve_device(cluster.device)
    is_here = cluster.launcher in ("local", "torchrun")
    if device == "cuda" and is_here and not is_torchrun_worker() and most_nodes(cluster) == 1:
        gpus, wanted = len(devices.gpus()), devices.processes_per_node(cluster.processes_per_node, "cuda")
        if gpus < wanted:
            why = "" if gpus else devices.why_none()
            yield ConfigError(
                key="cluster.processes_per_node" if gpus else "cluster.device",
                happened=f"{wanted} processes want a GPU each; this machine shows {gpus}{why and f': {why}'}",
                fix=f"cluster.processes_per_node={gpus}" if gpus else "cluster=cpu",
            )
    if device == "cpu" and isinstance(amp, dict) and amp.get("dtype") == "float16":
        yield ConfigError(
            key="amp",
            happened="fp16 was chosen for a run on CPU, where it is slower than fp32 and overflows",
            expected="amp=off or amp=bf16 on CPU",
            fix="amp=bf16",
        )
    if device == "cpu" and isinstance(strategy, dict) and strategy.get("cpu_offload") is True:
        yield ConfigError(
            key="strategy.cpu_offload",
            happened="is true for a run on CPU, where all lies in the host's memory",
            expected="GPUs, whose memory it spares",
            fix="strategy.cpu_offload=false",
        )


def _check_of_gpus(cluster: ClusterConfig, strategy: Any) -> Iterator[ConfigError]:
    """Refuse on a CPU what torch's DDP does on GPUs alone."""
    if not isinstance(strategy, dict) or devices.resolve_device(cluster.device) != "cpu":
        return
    if strategy.get("sync_batchnorm") is True:
        yield ConfigError(
            key="strategy.sync_batchnorm",
            happened="is true, and torch's SyncBatchNorm computes on GPUs alone",
            expected="false on a CPU",
            fix="strategy.sync_batchnorm=false",
        )
    if str(strategy.get("_target_")).startswith(_OF_DDP) and strategy.get("reduce_dtype") == "bfloat16":
        yield ConfigError(
            key="strategy.reduce_dtype",
            happened="is bfloat16, in which torch's DDP reduces on GPUs alone",
            expected="null or float16 on a CPU",
            fix="strategy.reduce_dtype=null",
        )


def _check_precision(precision: PrecisionConfig, strategy: Any, *, is_deterministic: bool) -> Iterator[ConfigError]:
    """Refuse to let cuDNN choose by the clock where each run is to give the same bits, and weights that lie in a way that is not cut."""
    if precision.channels_last and isinstance(strategy, dict) and str(strategy.get("_target_")).endswith(".FSDP"):
        yield ConfigError(
            key="precision.channels_last",
            happened="is true, and strategy=fsdp cuts weights that lie in their order alone",
            expected="one of the two",
            fix="precision.channels_last=false",
        )
    if precision.cudnn_benchmark and is_deterministic:
        yield ConfigError(
            key="precision.cudnn_benchmark",
            happened="is true, and deterministic is true: cuDNN would choose by what it measures",
            expected="one of the two",
            fix="precision.cudnn_benchmark=false",
        )


def _check_activation_checkpointing(config: ActivationCheckpointingConfig) -> Iterator[ConfigError]:
    """Refuse to choose among blocks where there are none."""
    for name, is_given, without in (("every", config.every != 1, "1"), ("save_ops", bool(config.save_ops), "[]")):
        if config.blocks is None and is_given:
            yield ConfigError(
                key=f"activation_checkpointing.{name}",
                happened="is given, and activation_checkpointing.blocks is null",
                expected="both or none",
                fix=f"activation_checkpointing.blocks=auto, or activation_checkpointing.{name}={without}",
            )


def _check_compile(config: CompileConfig) -> Iterator[ConfigError]:
    """Refuse a mode that the backend does not have."""
    if config.mode not in (None, "default") and config.backend != "inductor":
        yield ConfigError(
            key="compile.mode",
            happened=f"is {config.mode}, and compile.backend is {config.backend}",
            expected="default: the other modes are inductor's",
            fix="compile=default, or compile.backend=inductor",
        )


def _check_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check where the machines meet, on each of them, how long they have, and what their processes' environment is to be."""
    yield from check_environment(cluster)
    if cluster.walltime is not None and seconds_of(cluster.walltime) <= cluster.grace_s:
        yield ConfigError(
            key="cluster.walltime",
            happened=f"is {cluster.walltime}, and cluster.grace_s is {cluster.grace_s:g} s: the run would stop before it begins",
            expected="a walltime that is longer than the time to save",
            fix="a smaller cluster.grace_s",
        )
    if cluster.launcher in ("slurm", "ssh") and not is_torchrun_worker():
        yield from _check_other_machines(cluster)
    if cluster.hosts is not None or cluster.launcher == "ssh":
        yield from _check_hosts(cluster)
    if cluster.launcher == "torchrun" and not is_torchrun_worker():
        try:
            found, restarts = meeting(cluster, os.environ), max_restarts(cluster, os.environ)
        except ConfigError as error:
            yield error
            return
        if found.min_nodes < found.max_nodes and restarts == 0:
            yield ConfigError(
                key="cluster.max_restarts",
                happened=f"is 0 with {found.min_nodes} to {found.max_nodes} machines: the first one that leaves would end the run",
                expected="at least 1",
                fix="cluster.max_restarts=10",
            )


def _check_other_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check that nothing of their shape is left open: the machines are others than this one, which cannot ask them."""
    if cluster.device == "auto":
        yield ConfigError(
            key="cluster.device",
            happened="is auto, and the run's machines are not this one",
            expected="cuda: a GPU for each process; or cpu",
            fix="cluster.device=cuda",
        )
    has_open = not cluster.hosts or None in [host_and_processes(host)[1] for host in cluster.hosts]
    if cluster.device == "cuda" and cluster.processes_per_node is None and has_open:
        yield ConfigError(
            key="cluster.processes_per_node",
            happened="is not given, and this machine cannot know the GPUs of the others",
            expected="how many GPUs each machine of the job has for it: one process each",
            fix="cluster.processes_per_node=4",
        )


def _check_hosts(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check the machines of a run over SSH."""
    if cluster.launcher != "ssh":
        yield ConfigError(key="cluster.hosts", happened=f"is given with cluster.launcher={cluster.launcher}", expected="cluster=ssh")
    elif not cluster.hosts:
        yield ConfigError(
            key="cluster.hosts", happened="is not given", expected="the machines, as ssh knows them", fix="'cluster.hosts=[a,b:4,c]'"
        )
    else:
        if cluster.nodes is not None and node_range(cluster.nodes)[1] != len(cluster.hosts):
            yield ConfigError(
                key="cluster.nodes",
                happened=f"is {cluster.nodes}, with {len(cluster.hosts)} in cluster.hosts",
                expected="null, or the fewest that the run goes on with and all of them",
                fix="cluster.nodes=null",
            )
        if not cluster.wait:
            yield ConfigError(
                key="cluster.wait", happened="is false with cluster=ssh", expected="true: the run ends with the command that started it"
            )
