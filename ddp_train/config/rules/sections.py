"""Rules across sections: the batch's identity, the run's length, the device. Each yields the problems that it finds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.batch_sizes import BatchSizes, accumulation_of, derive_batch_sizes
from ddp_train.config.cluster import most_nodes
from ddp_train.config.rules.machines import check_machines
from ddp_train.config.rules.strategy import (
    check_cuda_graphs,
    check_early_step,
    check_local_sgd,
    check_of_gpus,
    check_open_micro_batch,
    check_power_sgd,
    check_strategy,
    cuts_weights,
)
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
    length_changes,
)
from ddp_train.config.targets.evaluation_split import evaluation_sets
from ddp_train.config.targets.target import class_of, is_a
from ddp_train.config.tree import at
from ddp_train.errors import ConfigError
from ddp_train.system import devices, handover
from ddp_train.system.torchrun_env import is_torchrun_worker
from ddp_train.traits import loss_unit


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
        errors += check_strategy(tree.get("strategy"), tree.get("optimizer"), most, world_size=batch.world_size)
        errors += check_cuda_graphs(sections.get("compile"), tree.get("strategy"), most, world_size=batch.world_size)
        if trainer.optimizer_in_backward:
            errors += check_early_step(sections, tree, 2 if batch.is_open else most, world_size=batch.world_size)
        if trainer.length_schedule:
            errors += _check_lengths(trainer, tree.get("data"))
        if batch.is_open:
            errors += check_open_micro_batch(tree, world_size=batch.world_size)
        errors += check_local_sgd(tree, trainer, world_size=batch.world_size)
        errors += check_power_sgd(tree, world_size=batch.world_size)
    if trainer and evaluation and (name := _open_stream(tree.get("data"))):
        errors += without_epochs(name, trainer, evaluation, is_evaluated)
    if loader:
        errors += _check_own_loss(tree, loader)
    if evaluation:
        errors += _check_evaluation(evaluation, is_evaluated=is_evaluated)
    if checkpoint and evaluation:
        errors += _check_checkpoints(checkpoint, evaluation, is_evaluated=is_evaluated)
    if cluster:
        errors += _check_device(cluster, tree.get("amp"), tree.get("strategy"))
        if batch and batch.world_size > 1:
            errors += check_of_gpus(cluster, tree.get("strategy"))
        errors += check_machines(cluster)
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


def without_epochs(name: str, trainer: TrainerConfig, evaluation: EvaluationConfig, is_evaluated: bool) -> Iterator[ConfigError]:
    """Refuse to count in epochs where the data has none."""
    needed = [("trainer.max_steps", trainer.max_steps, 1000)]
    needed += [("evaluation.every_steps", evaluation.every_steps, 100)] if is_evaluated else []
    for key, value, example in needed:
        if value is None:
            yield ConfigError(
                key=key,
                happened=f"is null, and {name} does not say how many samples it has: there are no epochs",
                expected="a number of steps",
                fix=f"{key}={example}",
            )


def _open_stream(data: Any) -> str | None:
    """Return the name of the data's class where it is a stream of unknown length; None where the class alone does not tell."""
    path = str(data.get("_target_")) if isinstance(data, Mapping) else ""
    is_stream = is_a(path, ("torch.utils.data.dataset.IterableDataset",)) and not hasattr(class_of(path), "__len__")
    return path.rpartition(".")[2] if is_stream else None


def _check_own_loss(tree: Mapping[str, Any], loader: LoaderConfig) -> Iterator[ConfigError]:
    """Refuse for models that return their own loss what gives no dict with labels, and a class that does not say what its loss is."""
    dataset, path, objective = (str(at(tree, f"{name}._target_")) for name in ("data", "model", "objective"))
    if objective != "ddp_train.objective.transformers.Transformers":
        return
    is_pair = dataset.startswith("ddp_train.data.") and dataset != "ddp_train.data.mixture.Mixture"
    if loader.collate is None and (is_pair or loader.fields is not None):
        yield ConfigError(
            key="data" if is_pair else "loader.fields",
            happened=f"{dataset.rpartition('.')[2]} gives pairs" if is_pair else f"is {loader.fields}, which makes tuples of dicts",
            expected="for objective=transformers a dict of the model's arguments, with `labels`",
            fix="objective=classification or language_modeling" if is_pair else "loader.fields=null",
        )
    kind = class_of(path)
    if at(tree, "objective.unit") in (None, "auto") and kind.__name__ == path.rpartition(".")[2]:  # a function may give another class
        try:
            loss_unit(kind)
        except ConfigError as error:
            yield error


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
    is_here = cluster.launcher in ("local", "machines")
    if device == "cuda" and is_here and not is_torchrun_worker() and most_nodes(cluster) == 1:
        gpus, wanted = len(devices.gpus()), devices.processes_per_node(cluster.processes_per_node, "cuda")
        if gpus < (min(wanted, 1) if os.environ.get(handover.ONE_GPU) == "shared" else wanted):
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


def _check_precision(precision: PrecisionConfig, strategy: Any, *, is_deterministic: bool) -> Iterator[ConfigError]:
    """Refuse to let cuDNN choose by the clock where each run is to give the same bits, and weights that lie in a way that is not cut."""
    if precision.channels_last and cuts_weights(strategy):
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
