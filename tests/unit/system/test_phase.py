"""What a rank says it is at."""

from __future__ import annotations

from ddp_train.system.phase import Phase, Phases
from tests.unit.parts import components, trainer


def test_the_loop_says_every_phase_of_every_step() -> None:
    parts = components("trainer.max_steps=2", "evaluation.batch_size=16")
    assert parts.eval_loader is not None
    phases, heard = Phases(), []
    phases.listen(lambda phase, step: heard.append((phase, step)))
    trainer(parts, log_every_steps=10, decide_save=lambda step: True, phases=phases).train()
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


def test_who_wants_to_hear_no_more_is_told_no_more() -> None:
    phases, heard = Phases(), list[int]()

    def listener(phase: Phase, step: int) -> None:
        heard.append(step)

    phases.listen(listener)
    phases.enter(Phase.DATA, 1)
    phases.forget(listener)
    phases.enter(Phase.DATA, 2)
    assert heard == [0, 1]


def test_who_listens_first_is_told_before_those_that_listen_already() -> None:
    phases, heard = Phases(), list[str]()
    phases.listen(lambda phase, step: heard.append("late"))
    phases.listen(lambda phase, step: heard.append("early"), is_first=True)
    phases.enter(Phase.DATA, 0)
    assert heard == ["late", "early", "early", "late"]
