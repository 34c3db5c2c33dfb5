"""The folder of checkpoints: what is no checkpoint goes, and nothing that is one is lost."""

from __future__ import annotations

from pathlib import Path

from ddp_train.checkpoint.catalog import remove_debris, saved_checkpoints, set_aside
from ddp_train.checkpoint.read import newest_good
from ddp_train.rank.fault_injection import damage
from tests.unit.checkpoint.states import FILE, saved


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_at_the_next_start(tmp_path: Path) -> None:
    for name in (".partial_step_00000005_ab_1", ".removed_step_00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(b"half")
    (tmp_path / ".partial_link").symlink_to(tmp_path.parent)
    assert newest_good(tmp_path) is None
    remove_debris(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.parent.exists()


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        saved(tmp_path, step, keep_last=9)
    assert set_aside(tmp_path, from_step=4, chosen=tmp_path / "step_00000004") == ["aside_0_step_00000008", "aside_0_step_00000012"]
    saved(tmp_path, 6)
    assert newest_good(tmp_path) == tmp_path / "step_00000006"
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000004", "step_00000006"]


def test_a_run_that_begins_again_sets_all_of_them_aside(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    assert set_aside(tmp_path, from_step=0, chosen=None) == ["aside_0_step_00000004"]


def test_a_step_folder_with_more_digits_is_a_later_one(tmp_path: Path) -> None:
    earlier, later = (saved(tmp_path, step, keep_last=9) for step in (99_999_999, 100_000_000))
    assert newest_good(tmp_path) == later == damage(tmp_path, "truncate").parent
    assert newest_good(tmp_path) == earlier
    assert [entry.path for entry in saved_checkpoints(tmp_path)] == [earlier, later]
    assert set_aside(tmp_path, from_step=99_999_999, chosen=earlier) == ["aside_0_step_100000000"]
