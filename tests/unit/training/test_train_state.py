"""The position of a run, over rewinds and over another number of ranks."""

from __future__ import annotations

import json

from ddp_train.training.train_state import Best, Jump, TrainState, WindowSums


def test_a_state_comes_back_from_json_and_does_not_change_with_the_run() -> None:
    state = TrainState(step=5, position=160, best={"eval/loss": Best(0.5, 4)}, losses={"": [1.0]}, skipped_in_a_row=1)
    state.jumps.append(Jump(from_step=9, to_step=4, undone=(128, 288)))
    kept, again = state.state_dict(), TrainState()
    again.load_state_dict(json.loads(json.dumps(kept)))
    assert again == state
    assert again.steps_run == 10
    state.losses[""].append(2.0)
    assert kept["losses"] == {"": [1.0]}


def test_of_the_windows_of_other_ranks_rank_0_carries_the_sums() -> None:
    windows = [WindowSums([1.0, 2.0], [8.0, 8.0], skipped_samples=1, skipped_steps=3), WindowSums([0.5, 0.5], [8.0, 8.0], skipped_steps=3)]
    assert WindowSums.merged(windows, is_main=True) == WindowSums([1.5, 2.5], [8.0, 8.0], skipped_samples=1, skipped_steps=3)
    assert WindowSums.merged(windows, is_main=False) == WindowSums([0.0, 0.0], [8.0, 8.0], skipped_samples=0, skipped_steps=3)
