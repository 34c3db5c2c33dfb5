"""What a rank says it is at."""

from __future__ import annotations

from ddp_train.distributed.world import alone
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.training.state import TrainState
from ddp_train.training.trainer import Loop, train
from tests.unit.parts import components


def test_the_loop_says_every_phase_of_every_step() -> None:
    parts = components("trainer.max_steps=2", "data.eval_batch_size=16")
    assert parts.eval_loader is not None
    tracker, heard = PhaseTracker(), []
    tracker.listen(lambda phase, step: heard.append((phase, step)))
    loop = Loop(
        log_every_steps=10,
        evaluate_every_steps=None,
        saves_after=lambda step: True,
        clip_grad_norm=None,
        write=lambda record: None,
        save=lambda window: None,
        tracker=tracker,
    )
    train(parts, TrainState(), alone(), loop)
    evaluation = [each for each in heard if each[0] is Phase.EVALUATION]
    assert len(evaluation) == sum(1 for _ in parts.eval_loader) + 1
    assert [each for each in heard if each not in evaluation] == [
        (Phase.START, 0),
        (Phase.DATA, 0),
        (Phase.STEP, 0),
        (Phase.SAVE, 1),
        (Phase.DATA, 1),
        (Phase.STEP, 1),
        (Phase.SAVE, 2),
    ]
