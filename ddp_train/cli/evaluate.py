"""`ddp-train evaluate` and `ddp-train predict`: apply the model of a run to any data, on any number of ranks. No training step is taken.

The work is a job with its own folder, RUN/evaluations/<time>: launched, watched, logged, stopped and resumed like any other.
"""

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.types import RunMode

from ddp_train.checkpoint.catalog import LAST, candidates, is_checkpoint, require_candidates
from ddp_train.cli.location import require_pipeline
from ddp_train.cli.saved_run import TRUST, ask_trust, original_words, parse_words, run_of
from ddp_train.config.check import check_config
from ddp_train.config.command import saved_overrides
from ddp_train.config.command.command_line import with_conf
from ddp_train.config.command.composition import loader_of, parse
from ddp_train.config.resolve import resolve
from ddp_train.config.run_config import RunConfig, data_config, evaluation_sets, set_name
from ddp_train.config.saved import answered_config, config_text
from ddp_train.config.spelling import nearest
from ddp_train.errors import ConfigError, ConfigErrors, EnvironmentRefuses
from ddp_train.launch.job import Evaluation, Job
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.claim import claim_new
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.system.process_env import is_torchrun_worker

USAGE = """ddp-train evaluate RUN [--watch] [--set=NAME] [key=value group=option ...]

  RUN            the folder of a run: evaluates its newest good checkpoint; or one of its checkpoints (RUN/checkpoints/step_00001000,
                 RUN/checkpoints/best)
  --watch        evaluate every checkpoint, existing and new ones, until the run is done: while it trains
  --trust        allow code that another user has written to run as you; without it, the code is only shown
  --set=NAME     only this one of evaluation.sets, as if it were the run's evaluation data
  key=value      what differs from the run, also another group: data.split=test, data=mnist, cluster=cpu, cluster.processes_per_node=1,
                 evaluation.batch_size=512, evaluation.save_predictions=true; + adds a key

The evaluation data and evaluation.sets are those of the run. `data.` and `data.eval.` both change the evaluation set without a name;
then only that set is evaluated. The numbers are in RUN/evaluations/<time>: result.json, metrics.jsonl. The run itself is not changed.
"""

PREDICT_USAGE = """ddp-train predict RUN [--set=NAME] [key=value group=option ...]

  RUN            the folder of a run, or one of its checkpoints: RUN/checkpoints/best
  --trust        as for `ddp-train evaluate`
  --set=NAME     predict for this one of evaluation.sets
  key=value      as for `ddp-train evaluate`: data.root=. data.split=photos data.labelled=false, images of data=image_folder

predict needs no targets and reads none. The predictions are in RUN/evaluations/<time>/predictions: NAME.npy with one row for each sample,
in the data set's order, and samples.txt with the samples' names if the data has names.
"""

_WITHOUT_EFFECT = (
    *("trainer", "optimizer", "scheduler", "checkpoint", "sweep", "health", "profile", "callbacks", "debug"),
    *("experiment", "hydra", "activation_checkpointing", "compile"),
    *("name", "resume", "init_from", "init_from_keys", "init_from_strict", "sanity_check", "summary", "evaluation.every_steps"),
    *("loader.micro_batch_size", "loader.drop_last", "loader.sampling", "loader.sample_weights", "loader.bucket_batches"),
    *("loader.sampler", "loader.mixup_alpha", "loader.cutmix_alpha"),
)
"""Sections, groups and keys that an evaluation does not read."""

_WITHOUT_TRAINING = {
    **dict.fromkeys(("global_batch_size", "grad_accum_steps", "batch_size_schedule", "length_schedule")),
    "optimizer_in_backward": False,
}
"""Settings of `trainer` without those that the check would compare with the evaluation's data and ranks."""

_POLL_S = 2.0


def evaluate(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train evaluate RUN [--watch] [key=value ...]`: evaluate a checkpoint of a run, or each new one."""
    return _begin("evaluate", arguments, runner)


def predict(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train predict RUN [key=value ...]`: write the model's predictions for samples without targets."""
    return _begin("predict", arguments, runner)


def _begin(command: str, arguments: list[str], runner: JobRunner) -> int:
    usage, known = (USAGE, {"--watch": ""}) if command == "evaluate" else (PREDICT_USAGE, {})
    options, (run, *overrides) = parse_words(arguments, usage, {**known, "--set": "NAME", TRUST: ""}, most=None)
    path, watches, chosen_set = Path(run), "--watch" in options, options.get("--set", "")
    folder = run_of(path, key="RUN")
    if RunFolder(folder).evaluation_task.exists():
        raise ConfigError(key="RUN", happened=f"{path} is an evaluation itself", expected="the run that was evaluated")
    if watches and is_checkpoint(path):
        raise ConfigError(key="RUN", happened=f"{path} is one checkpoint", expected="a run folder with --watch", fix=str(folder))
    ask_trust(command, arguments, folder)
    checkpoint = path.absolute() if is_checkpoint(path) else RunFolder(folder).checkpoints / LAST
    if watches:
        _wait_for_first(RunFolder(folder))
    elif not is_checkpoint(path) and not any(word.startswith("after=") for word in overrides):
        require_candidates(checkpoint, key="RUN")
    config = _config(folder, overrides, chosen_set=chosen_set, predicts=command == "predict")
    require_pipeline(config)
    if (code := runner.meet_machines(config, run=str(checkpoint))) is not None:
        return code
    evaluation_folder = RunFolder(claim_new(RunFolder(folder).evaluations / time.strftime("%Y-%m-%d_%H-%M-%S")))
    work = Evaluation(run=str(folder), checkpoint=str(checkpoint), predicts=command == "predict", watches=watches)
    work.write(evaluation_folder)
    evaluation_folder.record_config(config_text(config, evaluation_folder.root))
    job = Job(config=config, run_folder=evaluation_folder, command=list(sys.argv), overrides=overrides, work=work)
    return runner.run_to_end(job)


def _config(folder: Path, overrides: list[str], *, chosen_set: str, predicts: bool) -> RunConfig:
    """Return the run's config without the settings of training, with the typed overrides; its section `data` is the evaluation data."""
    saved = answered_config(folder)
    is_data_typed = any(text.lstrip("+").partition("=")[0].partition(".")[0] == "data" for text in overrides)
    data, sets = _eval_data(saved, chosen_set, is_data_typed=is_data_typed, predicts=predicts)
    of_another_start = {"node_rank": None, **({"processes_per_node": None} if is_torchrun_worker() else {})}  # torchrun has started them
    config_for = {
        **saved,
        "data": data,
        "evaluation": {**saved["evaluation"], "sets": sets},
        "after": None,
        "init_from": None,
        "resume": "auto",
        "debug": {**dict.fromkeys(saved["debug"]), "faults": [], "overfit": False},  # no limits of training: all samples are evaluated
        "cluster": {**saved["cluster"], **of_another_start},
        # Any number of ranks will do: there is no global batch.
        "trainer": {**saved["trainer"], **_WITHOUT_TRAINING},
    }
    changed = [re.sub(r"^(\+*)data\.eval\.", r"\1data.", text) for text in overrides]  # `data` is the evaluation data
    for key in (text.lstrip("+~").partition("=")[0] for text in changed):
        if any(key == name or key.startswith(f"{name}.") for name in _WITHOUT_EFFECT):
            happened = "is a key of training: an evaluation takes no steps, so it would change nothing"
            expected = "keys of data, loader, evaluation, objective, model, amp, metrics and cluster"
            raise ConfigError(key=key, happened=happened, expected=expected, fix="leave it out")
    choices = {key: option for key, _, option in (text.partition("=") for text in changed) if isinstance(config_for.get(key), Mapping)}
    for group, option in choices.items():
        config_for[group] = _section(group, option, folder)
    values = [text for text in changed if text.partition("=")[0] not in choices]
    added = [text.lstrip("+") for text in values if text.startswith("+")]
    merged = saved_overrides.with_overrides(config_for, [text for text in values if not text.startswith("+")], added=added)
    if "eval" not in data:
        merged.data.eval = {}
    if predicts:
        merged.evaluation.save_predictions = False  # with targets
    return check_config(merged)


def _eval_data(saved: Mapping[str, Any], chosen_set: str, *, is_data_typed: bool, predicts: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the data without a name, and those of evaluation sets by name. ConfigError: the run has no such data."""
    splits = {set_name(key): data_config(saved, key) for key in evaluation_sets(saved)}
    if chosen_set and chosen_set not in splits:
        expected = f"one of {', '.join(filter(None, splits))}" if any(splits) else "none: the run has no evaluation.sets"
        raise ConfigError(key="--set", happened=f"is {chosen_set}, which the run does not have", expected=expected)
    if not is_data_typed and "" not in splits and not chosen_set and (predicts or not splits):
        happened = "is null: the run has no evaluation data" + (" without a name" if splits else "")
        fix = f"--set={next(iter(splits))}" if splits else "data.split=test, or another data=OPTION"
        raise ConfigError(key="data.eval", happened=happened, expected="data to evaluate on", fix=fix)
    split = splits.pop(chosen_set, None)
    data = data_config(saved, "data") if split is None else split
    no_evaluation = {"eval": None} if split is None and not is_data_typed else {}
    return {**data, **no_evaluation}, {} if chosen_set or predicts or is_data_typed else splits


def _section(group: str, option: str, folder: Path) -> Any:
    """Return the section of a group's option, composed with the defaults from the run's own YAML. ConfigError: there is no such option."""
    args = parse(with_conf(original_words(folder)[1]))
    loader = loader_of(args)
    if option not in (offered := loader.get_group_options(group)):
        close = nearest(option, offered)
        happened = f"has no option {option!r}"
        raise ConfigError(key=group, happened=happened, expected=f"one of {', '.join(offered)}", fix=f"{group}={close}" if close else "")
    loaded = loader.load_configuration(args.config_name or "config", [f"{group}={option}"], RunMode.RUN)[group]
    composed, errors = resolve(loaded, section=group)
    if errors:
        raise ConfigErrors(errors)
    if group == "data":
        return data_config({group: composed}, "data.eval" if composed.get("eval") else "data")
    return composed


def _wait_for_first(run_folder: RunFolder) -> None:
    """Wait until a run has saved: then its config has the values of its `auto`s. EnvironmentRefuses: it never will."""
    name = run_folder.checkpoints / LAST
    if not candidates(name):
        print(f"waiting for the first checkpoint of {run_folder.as_typed()}", flush=True)
    while not candidates(name):
        verdict = verdict_of(run_folder)
        if verdict.outcome is not Outcome.AGAIN and not candidates(name):
            happened = f"{run_folder.as_typed()} has saved no checkpoint and will not continue: {verdict}"
            raise EnvironmentRefuses(key="RUN", happened=happened, expected="a run with a checkpoint, or one that is queued or running")
        time.sleep(_POLL_S)
