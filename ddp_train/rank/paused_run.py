"""A run that is saved after `debug.resume_after_steps`, built anew and resumed, as after a stop."""

import time
from dataclasses import dataclass, replace

from ddp_train.launch.job import Training
from ddp_train.rank.stop import Stop
from ddp_train.rank.train_job import RankRun, build_components, end_training, finish_run, not_saved, prepare_trainer, train, train_job
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import count_attempt, end_attempt
from ddp_train.system.phase import Phase
from ddp_train.training.loop.hooks import Agreed
from ddp_train.training.train_state import TrainState


@dataclass(frozen=True)
class StopAfter:
    """Stops a run as `stop` does, and after a step of its own."""

    stop: Stop
    state: TrainState
    last_step: int | None

    def agree_after(self, steps_run: int, /) -> Agreed:
        agreed = self.stop.agree_after(steps_run)
        return agreed._replace(is_last_step=agreed.is_last_step or self.state.step == self.last_step)

    def is_asked(self) -> bool:
        return self.stop.is_asked()


def train_with_pause(run: RankRun) -> Status:
    """Train as `train_job` does, with that pause where its step is still to come. Collective."""
    built, components = build_components(run)
    trainer, last_step = prepare_trainer(built, components), run.job.config.debug.resume_after_steps
    if trainer is None:
        return Status.COMPLETED
    state, stop = run.state, run.stop
    pauses = last_step is not None and state.step < last_step
    if pauses:  # there, `train` ends as at a stop
        trainer.services = replace(trainer.services, stop=StopAfter(stop, state, last_step))
    end = train(built, trainer)
    if not pauses or end.is_done or state.step != last_step or stop.is_last(state.steps_run):
        return finish_run(built, trainer, end)
    if end.unsaved:
        raise not_saved("half of the", end.unsaved)
    end_training(built, trainer, Status.PREEMPTED)
    if run.world.is_main:
        trainer.services.records.close()
        end_attempt(run.job.run_folder)
        count_attempt(run.job.run_folder)
    run.world.barrier()
    state.reset()
    run.phases.enter(Phase.START, 0)
    return train_job(replace(run, job=replace(run.job, work=Training()), started_monotonic=time.monotonic()))
