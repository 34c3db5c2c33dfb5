"""What a person reads at the start and at the end of a run, on rank 0."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.errors import printable
from ddp_train.launch.job import Job, Training
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import rates, slow_ranks
from ddp_train.run_folder.result import Result
from ddp_train.run_folder.times import describe_goodput
from ddp_train.system import devices, torch_internals
from ddp_train.training.parts.components import Components
from ddp_train.training.train_state import TrainState


def opening(job: Job, world: World) -> str:
    """Describe the run that begins, and its folder."""
    why = devices.why_none() if world.device.type == "cpu" and job.config.cluster.device == "auto" else ""
    debug_variables = {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"} & job.config.cluster.env.keys()
    batch = [str(job.config.batch), *job.config.batch_notes()] if isinstance(job.work, Training) else []
    lines = [
        f"run      {job.run_folder.as_typed()}",
        f"ranks    {world.size} on {world.device.type}{_gpu(world.device)}",
        *([f"torch    {newer}"] if (newer := torch_internals.newer_than_passed()) else []),
        *(f"torch    {line}" for line in torch_internals.missing()),
        *([f"debug    the messages of NCCL and torch: {job.run_folder.as_typed()}/logs/rank_*.log"] if debug_variables else []),
        *([f"warning  no GPU is used: {why} (cluster=cpu if that is intended)"] if why else []),
        *(f"{'' if index else 'batch':<8} {line}" for index, line in enumerate(batch)),
        *job.config.left_out,
    ]
    return "\n".join(lines)


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    return f" ({facts.name}, {facts.total_memory / 2**30:.1f} GiB)"


def plan(job: Job, components: Components, state: TrainState) -> str:
    """Describe the run's length, and where it begins."""
    order, wanted = components.train_loader.order, job.config.batch.global_batch_size
    parameters = [parameter.numel() for parameter in components.model.parameters()]
    trained = [parameter.numel() for parameter in components.model.parameters() if parameter.requires_grad]
    frozen = "all trained" if len(trained) == len(parameters) else f"{sum(trained):,} of them trained"
    per_epoch = f"{order.steps_per_epoch} per epoch" if order.steps_per_epoch else "epochs"
    epoch = f"{per_epoch} of {order.epoch_size:,} samples" if order.epoch_size else "the data has no epochs"
    lines = [
        f"model    {type(components.model).__name__}, {sum(parameters):,} parameters, {frozen}",
        f"data     {_named(job.config.data)}",
        f"steps    {components.total_steps} ({epoch})",
        f"rate     {_spread(components.optimizer.param_groups)} ({type(components.optimizer).__name__}, {_named(job.config.scheduler)})",
    ]
    if job.config.summary:
        from ddp_train.training.build.dry_build import layer_table

        lines[1:1] = [f"         {line}" for line in layer_table(components.model, depth=job.config.summary)]
    if dtype := components.answers.get("amp.dtype"):
        lines.append(f"amp      auto: {dtype}, which the device supports")
    lines += components.notes
    if job.config.debug.max_steps is not None:
        lines.append("debug    the run ends there; its schedules are those of the whole run")
    if changes := job.config.trainer.batch_size_schedule:
        later = ", ".join(f"{size} from step {step} on" for step, size in changes)
        lines.append(f"batch    {wanted} samples, then {later}")
    if components.length_plan is not None and (cuts := job.config.trainer.length_schedule):
        later = ", ".join(f"{length} from step {step} on" for step, length in cuts)
        lines.append(f"lengths  windows of {components.length_plan.whole} tokens, in pieces of {later}")
    lines += _groups(components.optimizer)
    if order.epoch_size and order.epoch_size < wanted:
        size = f"its {order.epoch_size:,} samples are fewer than a global batch"
        lines.append(f"data     {size}: each step takes all of them, not {wanted:,}")
    lines += [f"data     {caveat}" for caveat in components.train_loader.caveats(state.position)]
    if state.step:
        lines.append(f"resumed  after step {state.step}, {state.position:,} samples")
    return "\n".join(lines)


def _named(component_config: Any) -> str:
    return str(component_config.get("_target_")).rpartition(".")[2]


def _spread(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return the peak learning rate of groups of parameters, or from which to which it is."""
    peaks = sorted({float(group.get("initial_lr", group["lr"])) for group in groups})
    return f"{peaks[0]:g}" if len(peaks) == 1 else f"{peaks[0]:g} to {peaks[-1]:g}"


def _groups(optimizer: Optimizer) -> Iterator[str]:
    """Describe the groups of parameters with their rates: a person sees which parameters a pattern has matched."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for group in optimizer.param_groups:
        if "name" in group:
            named.setdefault(group["name"], []).append(group)
    for name, groups in named.items():
        sizes = [parameter.numel() for group in groups for parameter in group["params"]]
        yield f"group    {name}: {sum(sizes):,} parameters in {len(sizes)} tensors, lr {_spread(groups)}"


def closing(job: Job, state: TrainState, result: Result) -> str:
    """Describe the results, their files, and commands to try next."""
    shown = {name: value for name, value in result.last.items() if name == "train/loss" or name.startswith("eval/")}
    speed = rates(result.last.get("train/tokens_per_s"), result.last.get("train/mfu"))
    folder = job.run_folder.as_typed()
    outputs = str(Path(folder).parent) if os.path.isabs(folder) else folder.split(os.sep)[0]
    lines = [
        "",
        f"Done: {result.step} steps, {result.samples:,} samples in {result.seconds:.1f} s",
        *([f"  stopped by {state.early_end}"] if state.early_end is not None else []),
        *(f"  {name:<20} {value:.4f}{_best(result, name)}" for name, value in shown.items()),
        *([f"  {'at the end':<20} {', '.join(speed)}"] if speed else []),
        *([f"  {'goodput':<20} {describe_goodput(result.goodput)}"] if result.goodput is not None else []),
        *(f"  {'slow':<20} {line}" for line in slow_ranks(job.run_folder)),
        f"  run folder           {folder}",
        "",
        "Try next:",
        *([f"  {_command('tensorboard')} --logdir {outputs}"] if job.config.metrics.get("tensorboard") else []),
        f"  {_next(job, state, result)}",
    ]
    return "\n".join(lines)


def over(job: Job, state: TrainState) -> str:
    """Say that a run is completed, and what would continue it."""
    if state.early_end is None:
        return "all steps are done already; a larger trainer.max_steps or trainer.max_epochs would continue"
    again = _resume(job.run_folder, f"~callbacks.{state.early_end.callback}")
    return f"the run was stopped after step {state.step} by {state.early_end}\n`{again}` would continue"


def stopped(run_folder: RunFolder, step: int | None, *, unsaved: str = "") -> str:
    """Return the one line after a stop. `step` is None where nothing was done since the start.

    `unsaved` says where the run continues instead, when that step could not be saved.
    """
    if run_folder.evaluation_task.exists():
        return f"stopped; `{_resume(run_folder)}` does it again"
    what = "stopped before the first step, nothing to save" if step is None else f"stopped after step {step}, saved"
    if unsaved:
        what = f"stopped after step {step}, which was NOT saved; the run continues {unsaved}"
    return f"{what}; `{_resume(run_folder)}` continues"


def _resume(run_folder: RunFolder, *overrides: str) -> str:
    return f"{_command('ddp-train')} {shlex.join(['resume', run_folder.as_typed(), *overrides])}"


def _next(job: Job, state: TrainState, result: Result) -> str:
    """Return the command that may come next: the whole of a run that was cut off; else a longer one."""
    trainer = job.config.trainer
    if job.config.debug.max_steps is not None:
        return _typed(job, but="debug")
    if state.early_end is not None:
        return _resume(job.run_folder, f"~callbacks.{state.early_end.callback}")
    longer, limit = ("max_steps", trainer.max_steps) if trainer.max_steps == result.step else ("max_epochs", trainer.max_epochs)
    key, more = f"trainer.{longer}", f"trainer.{longer}={2 * (limit or 1)}"
    if "total_steps" in job.config.scheduler:  # it ends with the run: the same, but longer, begins anew, as its rates would jump here
        return f"{_typed(job, but=key)} {more}"
    return _resume(job.run_folder, more)


def _typed(job: Job, *, but: str) -> str:
    """Return the typed overrides of a run, without one key, those below it, and those that name this one run."""
    keys = [(word.lstrip("+~").partition("=")[0], word) for word in job.overrides]
    words = [word for key, word in keys if key not in (but, "resume") and not key.startswith((f"{but}.", "hydra"))]
    return " ".join([_command("ddp-train"), *(printable(shlex.quote(word)) for word in (*job.options, *words))])


def _best(result: Result, name: str) -> str:
    best = result.metrics["best"].get(name)
    return f"  (best {best['value']:.4f} at step {best['step']})" if best else ""


def _command(name: str) -> str:
    """Return a command of ours as this user can type it: its name when it is on the path or not installed, else where it lies."""
    own = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(own) or not own.exists():
        return name
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
