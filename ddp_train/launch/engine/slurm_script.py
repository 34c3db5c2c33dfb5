"""The two scripts of a run under SLURM, as text: readable, commented, to be changed and submitted by hand.

    RUN/launch/slurm.sbatch   launch/slurm.sbatch, filled in: what SLURM is asked for; a task on each machine; a requeue by the verdict
    RUN/launch/task.sh        ddp-train as the run finds it: after cluster.setup, with its interpreter, on the copy of its code

Of several runs the first lies in the folder that they have in common, as a job array with one task for each run.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_train import FOLDER
from ddp_train.config.tree import value_at
from ddp_train.errors import ConfigError
from ddp_train.launch.engine.engine import setup_lines
from ddp_train.launch.spec import Spec
from ddp_train.system.redaction import redact, references

_MARGIN_S = 30  # of the early signal, for what is unknown of a step and for ranks that are told late
_OURS = (  # options of sbatch that are set by us, or by a key of their own
    *("account", "partition", "qos", "reservation", "constraint", "dependency", "exclusive", "time", "cpus-per-task"),
    *("array", "chdir", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "requeue", "no-requeue", "signal"),
    *("wrap", "parsable", "test-only", "wait", "het-group"),
)
_HERE = Path(__file__).parent
_LINE = "\n# " + "-" * 136 + "\n"
"""What stands above it in launch/slurm.sbatch is filled in; what stands below is the script that people can run by hand, too."""
_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-node")


def batch_script(specs: Sequence[Spec], *, among: int = 1) -> str:
    """Return the script for sbatch: for one run, or as an array for several that ask for the same.

    `among`: so many arrays the tasks are shared out that may run at a time.
    """
    first, is_array = specs[0], len(specs) > 1
    roots = [str(spec.job.run_folder.root) for spec in specs]
    title = f"{len(specs)} runs, a job of this array for each" if is_array else f"The run {roots[0]}"
    machines = "1 machine" if first.max_nodes == 1 else f"{first.max_nodes} machines"
    if is_array:
        job = [
            "\n".join(["runs=(", *(f"    {quoted(root)}" for root in roots), ")"]),
            "run=${runs[$SLURM_ARRAY_TASK_ID]}",
            "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the number alone may mean all",
            'exec >> "$run/logs/slurm-$SLURM_JOB_ID.out" 2>&1',
        ]
    else:
        job = [f"run={quoted(roots[0])}", "job=$SLURM_JOB_ID"]
    before, inside = container(first, folder=common_folder(specs))
    alone = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", *before, *inside] if before or inside else []
    no_kill = ["--no-kill"] if first.is_elastic else []
    options = [f"--kill-on-bad-exit={int(not first.is_elastic)}", "--export=ALL", "--open-mode=append", *no_kill, *before]
    words = {"options": options, "inside": inside, "alone": alone}  # of srun; before a task's own command; or before one on one machine
    head = [
        "#!/bin/bash",
        f"# {title if title.isprintable() else ascii(title)}, on {machines}."
        " Made by ddp-train, to be read, changed and submitted by hand: sbatch FILE",
        *(f"#SBATCH --{option}" for option in _options(specs, among=among)),
        "",
        *job,
        *(f"{name}=({' '.join(map(quoted, values))})" for name, values in words.items()),
    ]
    places = (_HERE / "slurm.sbatch", FOLDER.parent / "launch/slurm.sbatch")  # installed, or a checkout
    file = next(path for path in places if path.is_file())
    return "\n".join([*head, _LINE[1:]]) + file.read_text(encoding="utf-8").partition(_LINE)[2]


def task_script(spec: Spec) -> str:
    """Return the command of each machine; its arguments are those of ddp-train."""
    cluster = spec.job.config.cluster
    python = cluster.python or ("python" if cluster.slurm.container else str(spec.engine_options["python"]))
    lines = [(_HERE / "task.sh").read_text(encoding="utf-8")]
    if cluster.setup:
        lines.append("{  # what it prints is no answer of ddp-train's")
        lines += [*setup_lines(cluster.setup, refuse="refuse"), "} >&2", ""]
    lines += [f"cd {quoted(spec.working_directory)} || refuse 'the folder where the run was submitted does not exist on this machine'"]
    if spec.code is not None:
        lines += [f'export PYTHONSAFEPATH=1 PYTHONPATH={quoted(spec.code.python_path())}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    missing = f"{python} is not on this machine; set cluster.python to one that every machine has, or load it in cluster.setup"
    lines += [f"command -v {quoted(python)} > /dev/null || refuse {quoted(missing)}", f'exec {quoted(python)} -m ddp_train "$@"', ""]
    return without_secrets("\n".join(lines))


def arrays(specs: Sequence[Spec]) -> list[list[Spec]]:
    """Share runs out: those in one array ask SLURM for the same, and are no more than it takes (the option `most_tasks`)."""
    alike: dict[tuple[str, ...], list[Spec]] = {}
    for spec in specs:
        asks = [option for option in _options([spec]) if not option.startswith("output=")]
        alike.setdefault((*asks, *map(str, container(spec, folder=Path()))), []).append(spec)
    most = int(specs[0].engine_options.get("most_tasks", len(specs)))
    return [group[first : first + most] for group in alike.values() for first in range(0, len(group), most)]


def signal_s(spec: Spec) -> int:
    """Return the time between SLURM's warning and the end of the job: for a save, the step before it, and a margin."""
    return spec.job.config.cluster.grace_s + int(spec.engine_options.get("step_s", 0)) + _MARGIN_S


def sbatch_value(text: str, *, key: str) -> str:
    """Return a value as a line `#SBATCH --option=VALUE` has it: in double quotes, with a backslash before those and itself."""
    if not text.isprintable():
        raise ConfigError(key=key, happened=f"is {text!r}", expected="text without line breaks and control characters")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quoted(text: str) -> str:
    """Return text as one word of the shell, on one line: the scripts are read by people."""
    if "\n" in text or "\0" in text:
        raise ConfigError(happened=f"{text!r} contains a line break", expected="names and paths of one line")
    return shlex.quote(text)


def _options(specs: Sequence[Spec], *, among: int = 1) -> Iterator[str]:
    spec = specs[0]
    cluster, slurm = spec.job.config.cluster, spec.job.config.cluster.slurm
    yield f"job-name={sbatch_value(spec.job.config.name, key='name')}"
    yield f"nodes={spec.min_nodes}-{spec.max_nodes}" if spec.is_elastic else f"nodes={spec.max_nodes}"
    yield "ntasks-per-node=1"
    if cpus := _cpus(spec):
        yield f"cpus-per-task={cpus}"
    if cluster.device == "cuda" and not set(_GPUS) & set(slurm.options):
        yield f"gpus-per-node={max(spec.processes)}"
    if cluster.walltime is not None:
        if cluster.walltime <= signal_s(spec):
            typed = value_at(spec.job.config.tree, "cluster.walltime")
            happened = f"is {typed}, but SLURM has to warn the run {signal_s(spec)} s before the end"
            expected = f"more than cluster.grace_s ({cluster.grace_s}), a step and {_MARGIN_S} s"
            raise ConfigError(key="cluster.walltime", happened=happened, expected=expected)
        days, rest = divmod(cluster.walltime, 86_400)
        yield f"time={days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    for name in ("account", "partition", "qos", "reservation", "constraint"):
        if (value := getattr(slurm, name)) is not None:
            key = f"cluster.slurm.{name}"
            yield f"{name}={sbatch_value(_plain(value, key=key), key=key)}"
    before = [f"afterok:{job}" for job in spec.engine_options.get("after", ())]  # after=RUN
    if dependencies := [slurm.dependency] * (slurm.dependency is not None) + before:
        yield f"dependency={sbatch_value(','.join(map(str, dependencies)), key='cluster.slurm.dependency')}"
    yield from ["kill-on-invalid-dep=yes"] if before else []
    yield from ["exclusive"] if slurm.exclusive else []
    yield from ["no-kill"] if spec.is_elastic else []
    yield f"signal=USR1@{signal_s(spec)}"
    yield from ("requeue" if spec.job.is_resumable else "no-requeue", "open-mode=append")
    if len(specs) > 1:
        yield f"array=0-{len(specs) - 1}%{max(1, int(spec.engine_options['parallel']) // among)}"
    root = str(spec.job.run_folder.root)
    if any("\\" in str(run.job.run_folder.root) for run in specs):
        raise ConfigError(key="hydra.run.dir", happened=f"{root} contains a backslash", expected="a path that SLURM can use for its log")
    log = "/dev/null" if len(specs) > 1 else root.replace("%", "%%") + "/logs/slurm-%j.out"
    yield f"output={sbatch_value(log, key='hydra.run.dir')}"
    yield f"chdir={sbatch_value(spec.working_directory, key='hydra.run.dir')}"
    yield from _typed_options(slurm.options)


def _typed_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield `cluster.slurm.options`; refuse what is set by another key, or by us."""
    for name, value in options.items():
        key = f"cluster.slurm.options.{name}"
        if name in _OURS or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            expected = "the long name of an sbatch option that neither ddp-train nor another key below `cluster` sets"
            raise ConfigError(key=key, happened="cannot be set here", expected=expected)
        if isinstance(value, (list, dict)):
            raise ConfigError(key=key, happened=f"is {value!r}", expected="text, a number or true; null or false leaves the option out")
        if value is True:
            yield name
        elif value is not None and value is not False:
            yield f"{name}={sbatch_value(_plain(value, key=key), key=key)}"


def _cpus(spec: Spec) -> int | None:
    """Return how many CPUs a machine's task asks for; None for all that the machine has."""
    config = spec.job.config
    if config.cluster.slurm.cpus_per_node is not None:
        return config.cluster.slurm.cpus_per_node
    if config.cluster.slurm.exclusive:
        return None
    return max(config.cluster.threads_per_process or 1, 1 + config.loader.num_workers) * max(spec.processes)


def container(spec: Spec, *, folder: Path) -> tuple[list[str], list[str]]:
    """Return the options of srun that a container takes, and the words that stand before the task's own command.

    `folder`: the run's, or that of several runs, which the container sees.
    """
    cluster, slurm = spec.job.config.cluster, spec.job.config.cluster.slurm
    if slurm.container is None:
        return [], []
    folders = list(dict.fromkeys([spec.working_directory, str(folder)]))
    folders += [spec.code.folder] if spec.code is not None and not Path(spec.code.folder).is_relative_to(folders[-1]) else []
    if wrong := [folder for folder in folders if "," in folder or ":" in folder]:
        happened = f"{wrong[0]} cannot be mounted in a container"
        raise ConfigError(key="cluster.slurm.container", happened=happened, expected="paths without , and :")
    more = [_plain(mount, key="cluster.slurm.container_mounts") for mount in slurm.container_mounts]
    mounts = ",".join([*(f"{folder}:{folder}" for folder in folders), *more])
    image = _plain(slurm.container, key="cluster.slurm.container")
    if slurm.container_runtime == "pyxis":
        options = {"container-image": image, "container-mounts": mounts, "container-workdir": spec.working_directory}
        return [f"--{name}={value}" for name, value in options.items()], []
    gpus = ["--nv"] if cluster.device == "cuda" else []
    return [], ["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", spec.working_directory, image]


def without_secrets(script: str) -> str:
    """Return a script as it is; refuse one that holds a secret of this process's environment."""
    for line, hidden in zip(script.splitlines(), redact(script).splitlines(), strict=False):
        if line != hidden:
            happened = f"the SLURM script would contain a secret from your environment: {hidden}"
            raise ConfigError(key="cluster", happened=happened, expected="${oc.env:NAME} in cluster.setup")
    return script


def _plain(value: object, *, key: str) -> str:
    """Return a value for a line that no shell reads; refuse a secret."""
    if names := references(str(value)):
        happened = f"takes the secret {names[0]} from the environment"
        fix = f"`export ...=${{oc.env:{names[0]}}}` in cluster.setup, if the program reads it from the environment"
        raise ConfigError(key=key, happened=happened, expected="a value that may be written into a script", fix=fix)
    return str(value)


def common_folder(specs: Sequence[Spec]) -> Path:
    """Return the folder that the runs have in common: of one its own."""
    return Path(os.path.commonpath([spec.job.run_folder.root for spec in specs]))
