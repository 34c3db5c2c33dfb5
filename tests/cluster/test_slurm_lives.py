"""A run under SLURM over several lives of its job: time limits, signals at any moment, mistakes, nodes that die, two jobs at once."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ddp_train import FOLDER
from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.paths import RunFolder
from tests.cluster.slurm import Slurm
from tests.cluster.slurm_project import SLOW, SMALL, SlurmProject, logs, losses, make, project, steps_of
from tests.conftest import fill

pytestmark = pytest.mark.cluster_long
__all__ = ["project"]


def test_a_time_limit_requeues_until_it_is_done_and_the_curve_is_bitwise_the_same(project: SlurmProject) -> None:
    job, run_folder = project.submit(SLOW, "cluster.walltime='00:02:00'", steps=700)  # about 240 of them in a life
    end = project.ended(job, "COMPLETED", within_s=900)
    assert int(end["Restarts"]) >= 2, logs(run_folder.root)
    assert losses(run_folder) == project.losses_alone(steps=700)


def test_a_walltime_of_our_own_stops_and_requeues_it_where_slurm_does_not_warn(project: SlurmProject) -> None:
    unwarned = {"SBATCH_SIGNAL": "B:23@1"}  # in the place of the script's USR1: URG, which bash does not mind, as late as can be
    words = project.words(SLOW, "cluster.walltime='00:01:30'", steps=600)  # SLURM's limit is a full minute: two of them
    job, run_folder = project.submitted(project.type(*words, env=unwarned)), RunFolder(project.folder / "outputs/run")
    project.restarts(job, 1)
    log = (run_folder.logs / f"slurm-{job}.out").read_text()
    assert log.count("again: stopped in good order") == 1 and "TIME LIMIT" not in logs(run_folder.root), logs(run_folder.root)
    assert "the walltime ends in cluster.grace_s=5 s" in logs(run_folder.root)
    reached = max(run_folder.saved_steps())
    assert reached > 0
    assert project.ended(job, "COMPLETED", within_s=900)["Restarts"] >= "1"
    assert losses(run_folder) == project.losses_alone(steps=600)


def moved(project: SlurmProject, job: str, seconds: int) -> None:
    end = f"{datetime.now() + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"
    project.bed.must("scontrol", "update", f"jobid={job}", f"endtime={end}")


def test_a_time_limit_that_is_moved_counts_and_one_nearer_than_the_warning_is_requeued(project: SlurmProject) -> None:
    unwarned = {"SBATCH_SIGNAL": "B:23@1"}
    words = project.words(SLOW, "cluster.walltime='00:01:00'", steps=600)
    job, run_folder = project.submitted(project.type(*words, env=unwarned)), RunFolder(project.folder / "outputs/run")
    project.trains(run_folder, beyond=12)
    moved(project, job, 600)
    time.sleep(70)
    assert project.bed.job(job)["Restarts"] == "0" and "the walltime ends" not in logs(run_folder.root), logs(run_folder.root)
    moved(project, job, 5)
    project.restarts(job, 1)
    assert project.ended(job, "COMPLETED", within_s=900)["Restarts"] >= "1"
    assert len(losses(run_folder)) == 600


def test_a_controller_that_is_away_at_the_requeue_is_asked_again(project: SlurmProject) -> None:
    job, run_folder = project.submit(SLOW, steps=150)
    project.trains(run_folder, beyond=12)
    project.bed.must("scancel", "--signal=USR1", job)
    project.bed.must("scontrol", "shutdown", "slurmctld")
    log = run_folder.logs / f"slurm-{job}.out"
    project.wait(lambda: "again: stopped in good order" in log.read_text(), "the verdict", within_s=60)
    time.sleep(12)
    project.bed.must("slurmctld")
    project.restarts(job, 1)
    project.ended(job, "COMPLETED", within_s=300)
    assert losses(run_folder) == project.losses_alone(steps=150)


def test_a_full_disk_at_a_stop_is_named_and_the_run_goes_on_when_it_is_mended(small_disk: Path, slurm_hosts: Callable[..., Slurm]) -> None:
    project = make(slurm_hosts(3), small_disk)
    job, run_folder = project.submit(SLOW, steps=150)
    project.trains(run_folder, beyond=12)
    filler = fill(small_disk)
    project.bed.must("scancel", "--signal=USR1", job)
    project.ended(job, "FAILED", within_s=300)
    log = logs(run_folder.root)
    assert log.count("again:") == 1 and re.search(r"outputs/run cannot continue: .*No space left on device", log), log
    assert re.search(r"never: .*\b78\b", log) and "which was NOT saved; the run continues from step" in log
    assert "os._exit" not in log and "in the configuration" not in log and "Traceback" not in log, log
    filler.unlink()
    again = project.submitted(project.type("resume", "outputs/run"))
    project.ended(again, "COMPLETED", within_s=300)
    assert losses(run_folder) == project.losses_alone(steps=150)


def test_a_run_is_cancelled_on_a_full_disk(small_disk: Path, slurm_hosts: Callable[..., Slurm]) -> None:
    project = make(slurm_hosts(3), small_disk)
    job, run_folder = project.submit(SLOW, steps=1000)
    project.trains(run_folder, beyond=12)
    fill(small_disk)
    done = project.type("cancel", "outputs/run")
    assert done.returncode == 0 and "cancelled" in done.stdout, done.output
    assert project.ended(job, "CANCELLED", "FAILED", within_s=120)["Restarts"] == "0"


@pytest.mark.parametrize("delays_s", [(0.0, 2.0, 5.0)])
def test_a_signal_while_it_starts_requeues_it(project: SlurmProject, delays_s: tuple[float, ...]) -> None:
    job, run_folder = project.submit("cluster.setup=['sleep 2']", steps=20)
    for life, delay_s in enumerate(delays_s):
        project.wait(lambda: project.has_a_step(job), "the step", within_s=60)
        time.sleep(delay_s)
        project.bed.must("scancel", "--signal=USR1", job)
        project.restarts(job, life + 1)
        project.wait(lambda: not project.has_a_step(job), "the end of the step", within_s=60)
    project.ended(job, "COMPLETED")
    assert not re.search(r"\b138\b", logs(run_folder.root)) and len(losses(run_folder)) == 20


def test_twenty_stops_are_twenty_times_again(project: SlurmProject) -> None:
    job, run_folder = project.submit(SLOW, steps=400)
    for stop in range(20):
        project.trains(run_folder, beyond=max(steps_of(run_folder), default=0))
        time.sleep(stop % 4 / 4)
        project.bed.must("scancel", "--signal=USR1", job)
        project.restarts(job, stop + 1)
    project.type("cancel", "outputs/run")
    log = (run_folder.logs / f"slurm-{job}.out").read_text()
    assert log.count("again: stopped in good order") == 20 and "143" not in log
    assert losses(run_folder)


def test_a_mistake_that_a_person_has_to_mend_is_never_tried_again(project: SlurmProject) -> None:
    source = (
        "from ddp_train.errors import ConfigError\n\n\ndef picky(**given):\n    raise ConfigError(key='model.width', happened='is odd')\n"
    )
    (project.folder / "mine.py").write_text(source)
    job, run_folder = project.submit("model._target_=mine.picky")
    end = project.ended(job, "FAILED")
    assert (end["Restarts"], end["ExitCode"]) == ("0", "2:0"), logs(run_folder.root)
    status = project.type("status", "outputs/run").stdout
    assert "never: " in status and "model.width: is odd" in status


def test_an_exception_is_counted_and_ends_in_no_progress(project: SlurmProject) -> None:
    job, run_folder = project.submit("+debug.faults=[{kind:exception,rank:3,step:12,attempt:every}]")
    end = project.ended(job, "FAILED", within_s=600)
    assert (end["Restarts"], end["ExitCode"]) == ("3", "93:0"), logs(run_folder.root)
    assert "InjectedFault" in project.type("status", "outputs/run").stdout


def test_a_killed_rank_recovers_in_place(project: SlurmProject) -> None:
    job, run_folder = project.submit("+debug.faults=[{kind:kill,rank:3,step:12}]", "cluster.max_restarts=3", steps=30)
    assert project.ended(job, "COMPLETED")["Restarts"] == "0"
    assert losses(run_folder) == project.losses_alone(steps=30)


def test_a_node_that_is_taken_away_is_replaced(project: SlurmProject) -> None:
    job, run_folder = project.submit(SLOW, steps=100)
    project.trains(run_folder, beyond=12)
    project.bed.must("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    project.restarts(job, 1)
    assert project.ended(job, "COMPLETED", within_s=300)["NodeList"] == "node[2-3]"
    assert losses(run_folder) == project.losses_alone(steps=100)


def test_a_node_that_goes_silent_is_named_and_the_run_goes_on_elsewhere(project: SlurmProject) -> None:
    job, run_folder = project.submit(SLOW, steps=100)
    project.trains(run_folder, beyond=12)
    project.bed.hosts.unplug(2)
    project.wait(lambda: (run_folder.root / "failure.json").exists(), "the report", within_s=30)
    report = load_report(run_folder.failure)
    assert report is not None and report.host == "node2", report
    project.restarts(job, 1)
    assert project.ended(job, "COMPLETED", within_s=300)["NodeList"] == "node[1,3]"
    assert losses(run_folder) == project.losses_alone(steps=100)


@pytest.mark.parametrize("trial", range(10))
def test_two_jobs_at_once_on_the_same_nodes_are_two_runs(project: SlurmProject, trial: int) -> None:
    nodes = "+cluster.slurm.options.nodelist='node[1-2]'"
    jobs = [project.submit(nodes, f"seed={seed}", name=f"seed{seed}", steps=20) for seed in (trial, trial + 1)]
    for job, _ in jobs:
        project.ended(job, "COMPLETED", within_s=300)
    first, second = (losses(run_folder) for _, run_folder in jobs)
    assert len(first) == len(second) == 20 and first != second
    if trial == 0:
        assert first == project.losses_alone("seed=0", steps=20)


def test_what_is_edited_while_it_is_queued_has_no_effect_and_a_changed_copy_is_refused(project: SlurmProject) -> None:
    module = project.folder / "mine.py"
    source = "from ddp_train.model.mlp import MLP\n\n\nclass Mine(MLP):\n    pass\n"
    module.write_text(source)
    own = ["model._target_=mine.Mine", "+cluster.slurm.options.hold=true"]
    job, run_folder = project.submit(*own, steps=20)
    module.write_text("raise RuntimeError('edited while it was queued')\n")
    (run_folder.config).write_text("name: edited\n")
    project.bed.must("scontrol", "release", job)
    project.ended(job, "COMPLETED")
    assert losses(run_folder) == project.losses_alone(steps=20)

    module.write_text(source)
    job, run_folder = project.submit(*own, name="second", steps=20)
    copy = run_folder.code / "mine.py"
    copy.chmod(0o600)
    copy.write_text(source + "# edited\n")
    project.bed.must("scontrol", "release", job)
    end = project.ended(job, "FAILED")
    assert (end["ExitCode"], end["Restarts"]) == ("78:0", "0"), logs(run_folder.root)
    assert "is not what was submitted" in project.type("status", "outputs/second").stdout


def test_the_script_for_those_who_say_everything_by_hand_continues_its_run_in_the_next_life(project: SlurmProject) -> None:
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NPROC_PER_NODE": "2"}
    script = str(FOLDER.parent / "launch/slurm.sbatch")
    words = ["cluster.device=cpu", *SMALL, SLOW, "trainer.max_steps=60"]  # and no folder
    done = project.bed.run("sbatch", "--parsable", "--nodes=2", "--cpus-per-task=2", script, *words, cwd=project.folder, env=environment)
    assert done.returncode == 0, done.output
    job = done.stdout.strip()
    project.wait(
        lambda: any(steps_of(RunFolder(path.parent)) for path in project.folder.glob("outputs/**/metrics.jsonl")), "a step", within_s=90
    )
    project.bed.must("scancel", "--signal=USR1", job)
    assert project.ended(job, "COMPLETED")["Restarts"] == "1", logs(project.folder)
    [metrics] = project.folder.glob("outputs/**/metrics.jsonl")
    assert metrics.parent.name == job
    assert losses(RunFolder(metrics.parent)) == pytest.approx(project.losses_alone(steps=60), rel=1e-5)
