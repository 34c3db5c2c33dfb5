"""A run that is saved after `debug.resume_after_steps`, built anew and resumed, as after a stop."""

import time
from dataclasses import dataclass, replace

from ddp_train.launch.job import Training
from ddp_train.rank import train_job
from ddp_train.rank.stop import Stop
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.system.phase import Phase
from ddp_train.training.loop.hooks import Agreed
from ddp_train.training.train_state import TrainState


@dataclass(kw_only=True)
class StopAfter:
    """What the loop of a run with a pause asks in the place of `stop`: it ends after the pause's step, too."""

    stop: Stop
    state: TrainState
    last_step: int
    pauses: bool = False  # it has stopped the run after that step, and `stop` has not

    def agree_after(self, steps_run: int, /) -> Agreed:
        agreed = self.stop.agree_after(steps_run)
        self.pauses = not agreed.is_last_step and self.state.step == self.last_step
        return agreed._replace(is_last_step=agreed.is_last_step or self.pauses)

    def is_asked(self) -> bool:
        return self.stop.is_asked()


def train_with_pause(run: train_job.RankRun) -> Status:
    """Train as `train_job` does, with that pause where its step is still to come. Collective."""
    state, last_step = run.state, run.job.config.debug.resume_after_steps
    assert last_step is not None
    run = train_job.with_known_micro_batch(run)
    stop = StopAfter(stop=run.stop, state=state, last_step=last_step)
    components = train_job.build_components(run)
    data_changes = train_job.begin_or_resume(run, components)
    if train_job.end_if_completed(run, components):
        return Status.COMPLETED
    trainer = train_job.prepare_trainer(run, components, data_changes, ends_by=stop)
    end = train_job.train(run, trainer)
    if not stop.pauses or run.stop.is_last(state.steps_run):
        return train_job.finish_run(run, trainer, end)
    if end.unsaved:
        raise train_job.not_saved("half of the", end.unsaved)
    train_job.end_training(run, trainer, Status.PREEMPTED)
    if run.world.is_main:
        trainer.services.records.close()
        AttemptCount(run.job.run_folder).finish()
        AttemptCount(run.job.run_folder).begin()
    run.world.barrier()
    state.reset()
    run.phases.enter(Phase.START, 0)
    return train_job.train_job(replace(run, job=replace(run.job, work=Training()), started_monotonic=time.monotonic()))
