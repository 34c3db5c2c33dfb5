"""Rules on our own sections: health, evaluation, callbacks, checkpoint, debug, profile, device, precision, compile, cluster."""

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddp_train.config import schema
from ddp_train.config.cluster import ENGINES, check_environment, engine_name_of, max_restarts, most_nodes, rendezvous_of
from ddp_train.config.rules.strategy import given
from ddp_train.config.run_config import PartialConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.targets.locate import class_constants, look_up_or_none
from ddp_train.config.targets.target import check_events
from ddp_train.config.values import node_range
from ddp_train.errors import ConfigError, conflict
from ddp_train.system import devices, process_env
from ddp_train.system.process_env import is_torchrun_worker, slurm_step
from ddp_train.traits import CallbackConstants, StrategyConstants

_OURS = "ddp-train cluster=machines"
_BY_HAND = f"{_OURS} cluster.nodes=MACHINES cluster.rendezvous_endpoint=FIRST_MACHINE:29400"
# The number of copies | a second variable, where the number proves nothing | what they say | what was meant
_SIGNS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun has started {} of this command", f"srun --ntasks-per-node=1 {_OURS} ..."),
    ("OMPI_COMM_WORLD_SIZE", "", "mpirun has started {} of this command", f"mpirun --map-by ppr:1:node {_BY_HAND} ..."),
    ("PMI_SIZE", "", "mpiexec has started {} of this command", f"mpiexec -ppn 1 {_BY_HAND} ..."),
    ("PET_NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("WORLD_SIZE", "RANK", "{} of this command run, one for each RANK", f"{_OURS} cluster.nodes=$WORLD_SIZE cluster.node_rank=$RANK ..."),
)


def check_health(config: PartialConfig) -> Iterator[ConfigError]:
    """Check that there is a checkpoint where a run may have to go back to one, and that spikes which lead to it are looked for."""
    health, checkpoint = config.health, config.checkpoint
    if health.on_spike == "rewind" and health.spike_zscore is None:
        happened = "is rewind, but health.spike_zscore is null: spikes are not detected"
        yield ConfigError(key="health.on_spike", happened=happened, expected="both or none", fix="health.spike_zscore=8")
    rewinding = [key for key in ("on_nonfinite", "on_spike") if getattr(health, key) == "rewind"]
    saves_evaluations = checkpoint.every_evaluation and config.is_evaluated
    if rewinding and checkpoint.every_steps is None and checkpoint.every_minutes is None and not saves_evaluations:
        happened = "is rewind, but nothing is saved by steps, minutes or evaluations: there is no checkpoint before the end"
        expected = "checkpoints to go back to"
        yield ConfigError(key=f"health.{rewinding[0]}", happened=happened, expected=expected, fix="checkpoint.every_steps=1000")


def check_evaluation(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to save the predictions of evaluations that never are, and sets without a name for records and folders."""
    evaluation = config.evaluation
    if evaluation.save_predictions and not config.is_evaluated:
        happened = "is true, but data.eval is null: nothing is evaluated"
        yield conflict("evaluation.save_predictions", happened, "false", expected="an evaluation split: data.eval with what differs for it")
    for name, changes in evaluation.sets.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name, re.ASCII) or name.startswith("step_"):
            happened = "is not a valid name of an evaluation set: its metrics are eval/NAME/loss, its predictions in predictions/NAME"
            expected = "letters, digits, '_' and '-', 64 at most, a letter or digit first, and not step_"
            yield ConfigError(key=f"{schema.EVALUATION_SETS}.{name}", happened=happened, expected=expected)
        if not isinstance(changes, Mapping | None):
            expected, fix = "what differs from the training data, {} for nothing; or null", f"'evaluation.sets.{name}={{split: test}}'"
            yield ConfigError(key=f"{schema.EVALUATION_SETS}.{name}", happened=f"is {changes!r}", expected=expected, fix=fix)
    for metric in (name for name in evaluation.metrics if "/" in name):
        happened = "has a slash, as the metrics of evaluation sets"
        yield ConfigError(key=f"{schema.EVALUATION_METRICS}.{metric}", happened=happened, expected="none")


def check_callbacks(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse a class that would never be called, and one that waits for evaluations which never are."""
    callbacks = config.tree.get("callbacks")
    if isinstance(callbacks, Mapping):
        for name, callback_config in callbacks.items():
            path = callback_config.get("_target_") if isinstance(callback_config, Mapping) else None
            is_ours = str(path).startswith("ddp_train.")  # a callback, and importing it would import torch
            target = None if is_ours else look_up_or_none(path)
            if inspect.isclass(target):
                kinds = [kind for kind in inspect.getmro(target) if kind.__module__ != "ddp_train.interfaces.run"]  # not our `Callback`
                methods = {method for kind in kinds for method in vars(kind) if callable(getattr(target, method))}
                yield from check_events(str(path), methods, key=f"callbacks.{name}._target_")
            has_no_evaluation = not config.is_evaluated and "data" in config.tree
            if has_no_evaluation and path and class_constants(callback_config, CallbackConstants).needs_evaluation:
                happened = "follows a metric of the evaluation, and data.eval is null: there is none"
                yield ConfigError(key=f"callbacks.{name}", happened=happened, expected="evaluation data", fix=f"~callbacks.{name}")


def check_profile(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse ranks that there are not, and steps that do not come."""
    profile, ranks, most = config.profile, config.profile.ranks, config.batch.world_size - 1
    # Elastic ranks may be fewer than before: those that are left record.
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0 or (max(ranks) > most and not is_torchrun_worker()):
        yield conflict("profile.ranks", f"is {list(ranks)}", "[0]", expected=f"ranks of this run, each once: 0 to {most}")
    last = config.trainer.max_steps
    if profile.kind != "off" and last is not None and profile.start_step >= last:
        happened = f"is {profile.start_step}, and trainer.max_steps is {last}: no step would be recorded"
        yield conflict("profile.start_step", happened, last // 2, expected="fewer than the run's steps")


def check_faults(config: PartialConfig) -> Iterator[ConfigError]:
    def refused(place: int, name: str, happened: str, expected: str) -> ConfigError:
        return ConfigError(key=f"debug.faults.{place}.{name}", happened=happened, expected=expected)

    world_size = config.batch.world_size
    for place, fault in enumerate(config.debug.faults):
        kind, has_seconds = fault.kind, fault.seconds is not None
        # Elastic ranks may be fewer than before: there a fault of one that has gone does not happen.
        if fault.rank >= world_size and not is_torchrun_worker():
            yield refused(place, "rank", f"is {fault.rank}", f"a rank of this run: 0 to {world_size - 1}")
        if kind.startswith("worker_") and not config.loader.num_workers:
            yield refused(place, "kind", f"is {kind}, and loader.num_workers is 0", "loader workers: loader.num_workers=1")
        if kind in ("nan", "spike") and fault.phase not in ("data", "step"):
            yield refused(place, "phase", f"is {fault.phase}", f"data or step: {kind} is of a training step")
        if fault.phase == "start" and fault.step is not None:
            yield refused(place, "step", f"is {fault.step}, with phase start", "null: the start comes before all steps")
        if kind == "slow" and not has_seconds:
            yield refused(place, "seconds", "is not given", "the delay of each step, in seconds")
        if has_seconds and kind not in ("sleep", "slow"):
            yield refused(place, "seconds", f"is {fault.seconds}", f"none: {kind} takes no time")
        if kind == "read_only" and os.geteuid() == 0:
            yield refused(place, "kind", "is read_only, and you are root, who can write anywhere", "another user; or a read-only mount")


def check_checkpoints(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to keep every n-th checkpoint where most of them are never saved."""
    every, keeps = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    evaluated = config.evaluation.every_steps if config.checkpoint.every_evaluation and config.is_evaluated else None
    if keeps is not None and all(period is None or keeps % period != 0 for period in (every, evaluated)):
        happened = f"is {keeps}, and checkpoint.every_steps is {'null' if every is None else every}: few such steps are saved, or none"
        expected = "a multiple of checkpoint.every_steps, or of evaluation.every_steps where every evaluation is saved"
        fix = f"checkpoint.every_steps={keeps}" if every is None else f"checkpoint.keep_every_steps={-(-keeps // every) * every}"
        yield ConfigError(key="checkpoint.keep_every_steps", happened=happened, expected=expected, fix=fix)


def check_device(config: PartialConfig) -> Iterator[ConfigError]:
    cluster = config.cluster
    device = devices.resolve_device(cluster.device)
    if device == "cuda" and cluster.launcher not in ENGINES and not is_torchrun_worker() and most_nodes(cluster) == 1:
        gpus, wanted = len(devices.gpus()), devices.processes_per_node(cluster.processes_per_node, "cuda")
        if gpus < (min(wanted, 1) if process_env.shares_gpu() else wanted):
            why = "" if gpus else devices.why_none()
            happened = f"{wanted} processes need a GPU each; this machine shows {gpus}{why and f': {why}'}"
            fix = f"cluster.processes_per_node={gpus}" if gpus else "cluster=cpu"
            yield ConfigError(key="cluster.processes_per_node" if gpus else "cluster.device", happened=happened, fix=fix)
    if device == "cpu" and config.amp.get("dtype") == "float16":
        happened = "fp16 was chosen for a run on CPU, where it is slower than fp32 and overflows"
        yield conflict("amp", happened, "bf16", expected="amp=off or amp=bf16 on CPU")
    for key, value in given(config.strategy, class_constants(config.strategy, StrategyConstants).offloads):
        if device == "cpu" and value is True:
            happened = "is true for a run on CPU, which uses no GPU memory"
            yield conflict(key, happened, "false", expected="GPUs, whose memory it saves")


def check_precision(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to let cuDNN choose by the clock where each run is to give the same bits."""
    if config.precision.cudnn_benchmark and config.tree.get("deterministic") is True:
        yield conflict("precision.cudnn_benchmark", "is true, and deterministic is true: cuDNN would choose algorithms by timing", "false")


def check_activation_checkpointing(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to choose among blocks where there are none."""
    chosen = config.activation_checkpointing
    for name, is_set, without in (("every", chosen.every != 1, "1"), ("save_ops", bool(chosen.save_ops), "[]")):
        if chosen.blocks is None and is_set:
            happened = "is given, and activation_checkpointing.blocks is null"
            expected = "both or none: activation_checkpointing.blocks=auto"
            yield conflict(f"activation_checkpointing.{name}", happened, without, expected=expected)


def check_compile(config: PartialConfig) -> Iterator[ConfigError]:
    mode, backend = config.compile.mode, config.compile.backend
    if mode not in (None, "default") and backend != "inductor":
        happened = f"is {mode}, and compile.backend is {backend}"
        expected = "default: the other modes are inductor's"
        yield ConfigError(key="compile.mode", happened=happened, expected=expected, fix="compile=default, or compile.backend=inductor")


def check_machines(config: PartialConfig) -> Iterator[ConfigError]:
    """Check where the machines meet, on each of them, how long they have, and what their processes' environment is to be."""
    cluster = config.cluster
    yield from check_environment(cluster)
    yield from check_copies(cluster, os.environ)
    if cluster.walltime is not None and cluster.walltime <= cluster.grace_s:
        typed = config.tree["cluster"]["walltime"]
        happened = f"is {typed}, and cluster.grace_s is {cluster.grace_s:g} s: the run would stop before it begins"
        yield ConfigError(key="cluster.walltime", happened=happened, fix="a smaller cluster.grace_s")
    if cluster.agent == "torch" and cluster.launcher != "local":
        happened = f"is torch, and cluster.launcher={cluster.launcher} starts agents of ours on several machines"
        yield conflict("cluster.agent", happened, "own", expected="own; or torchrun itself, typed on each machine (docs/versions.md)")
    if engine_name_of(cluster) is not None:
        yield from _check_other_machines(cluster)
    if cluster.hosts is not None or cluster.launcher == "ssh":
        yield from _check_hosts(config)
    if cluster.launcher == "machines" and not is_torchrun_worker():
        rendezvous = rendezvous_of(cluster, os.environ)
        if rendezvous.is_elastic and max_restarts(cluster, os.environ) == 0:
            happened = f"is 0 with {rendezvous.min_nodes} to {rendezvous.max_nodes} machines: the first one that leaves would end the run"
            yield ConfigError(key="cluster.max_restarts", happened=happened, expected="at least 1", fix="cluster.max_restarts=10")


def _check_other_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check that nothing of their shape is left open: the machines are others than this one, which cannot ask them."""
    if cluster.device == "auto":
        happened = "is auto, and the run uses machines other than this one"
        yield conflict("cluster.device", happened, "cuda", expected="cuda: a GPU for each process; or cpu")
    has_open = not cluster.hosts or any(host.processes is None for host in cluster.hosts)
    if cluster.device == "cuda" and cluster.processes_per_node is None and has_open:
        happened = "is not given, and this machine cannot know the GPUs of the others"
        yield conflict("cluster.processes_per_node", happened, 4, expected="the number of GPUs of each machine")


def _check_hosts(config: PartialConfig) -> Iterator[ConfigError]:
    cluster = config.cluster
    if cluster.launcher != "ssh":
        yield ConfigError(key="cluster.hosts", happened=f"is given with cluster.launcher={cluster.launcher}", expected="cluster=ssh")
    elif not cluster.hosts:
        expected = "the machines' names for ssh"
        yield ConfigError(key="cluster.hosts", happened="is not given", expected=expected, fix="'cluster.hosts=[a,b:4,c]'")
    else:
        if cluster.nodes is not None and cluster.nodes.most != len(cluster.hosts):
            happened = f"is {config.tree['cluster']['nodes']}, with {len(cluster.hosts)} in cluster.hosts"
            yield conflict("cluster.nodes", happened, "null", expected="null, or MIN:MAX with all machines as MAX")
        if not cluster.wait:
            yield ConfigError(key="cluster.wait", happened="is false with cluster=ssh", expected="true: the run ends with its command")


def check_copies(cluster: ClusterConfig, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Find that this command was started several times at once, by srun, mpirun or in each pod, and each copy would train alone.

    Or that each would start all processes of a machine that another copy starts as well.
    """
    if is_torchrun_worker(environment):
        return
    step, is_alone = slurm_step(environment), False
    with suppress(ConfigError):  # told where it is looked for
        is_alone = cluster.launcher == "local" or (cluster.launcher == "machines" and rendezvous_of(cluster, environment).is_alone)
    if is_alone:
        for variable, second, says, meant in _SIGNS:
            is_task = step is not None and not step.is_typed_in  # no batch script, and no shell in which one command is typed
            if (second and second not in environment) or (second == "SLURM_PROCID" and not is_task):
                continue
            with suppress(ValueError):
                if (count := node_range(environment.get(variable, "")).most) > 1:
                    happened = f"{variable}={environment[variable]} says that {says.format(count)}; each would start its own run"
                    expected = "one command for each machine of a run; on one machine it starts a process per GPU itself"
                    fix = f"{meant}\n  on purpose: env -u {variable} ddp-train ..."
                    yield ConfigError(key="cluster", happened=happened, expected=expected, fix=fix)
                    return
    if step is not None and step.most_tasks > 1 and not step.is_typed_in:
        happened = f"srun starts {step.most_tasks} tasks on a node, and each of them would start all processes of the node"
        fix = "srun --ntasks-per-node=1 ddp-train ..., with cluster.processes_per_node if needed"
        expected = "one task per node: ddp-train starts one process per GPU itself"
        yield ConfigError(key="cluster", happened=happened, expected=expected, fix=fix)
