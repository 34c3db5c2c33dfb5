"""A run that is saved after `debug.resume_after_steps`, built anew and resumed, as after a stop."""

from dataclasses import dataclass, replace

from ddp_train.distributed.world import World
from ddp_train.errors import DONE
from ddp_train.launch.job import Job, Training
from ddp_train.rank.run_job import end_training, finish_run, not_saved, prepare_run, run_job, train
from ddp_train.rank.stop import Stop
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import count_attempt, end_attempt
from ddp_train.system.phase import Phase, Phases
from ddp_train.training.loop.trainer import Agreed, StopLine
from ddp_train.training.train_state import TrainState


@dataclass(frozen=True)
class StopAfter(StopLine):
    """Stops a run as `stop` does, and after a step of its own."""

    stop: Stop
    state: TrainState
    last_step: int | None

    def begin_next_step(self, steps_run: int, /) -> Agreed:
        agreed = self.stop.begin_next_step(steps_run)
        return agreed._replace(stops=agreed.stops or self.state.step == self.last_step)

    def is_asked(self) -> bool:
        return self.stop.is_asked()


def run_with_pause(job: Job, world: World, state: TrainState, stop: Stop, phases: Phases) -> int:
    """Run one job as `run_job` does, with that pause where its step is still to come. Collective."""
    run, last_step = prepare_run(job, world, state, stop, phases), job.config.debug.resume_after_steps
    if run is None:
        return DONE
    pauses = last_step is not None and state.step < last_step
    if pauses:  # there, `train` ends as at a stop
        run.trainer.services = replace(run.trainer.services, stop=StopAfter(stop, state, last_step))
    is_done = train(run, stop)
    if not pauses or is_done or state.step != last_step or stop.is_last(state.steps_run):
        return finish_run(run, stop, is_done=is_done)
    if unsaved := run.checkpoints.finish():
        raise not_saved("half of the", unsaved)
    end_training(run, Status.PREEMPTED)
    if world.is_main:
        run.records.close()
        end_attempt(job.run_folder)
        count_attempt(job.run_folder)
    world.barrier()
    state.reset()
    phases.enter(Phase.START, 0)
    return run_job(replace(job, work=Training()), world, state, stop, phases)
