"""What features hang on the loop comes behind what hangs there, point by point."""

from __future__ import annotations

import subprocess
import sys

from ddp_train.training.loop.hooks import Hooks


def test_a_feature_comes_behind_those_before_it_and_shares_no_list_with_the_loop() -> None:
    hooks, called = Hooks(), list[str]()
    feature = Hooks(after_step=[lambda step: called.append(f"second {step}")], after_first_step=[lambda: called.append("first step")])
    hooks.add(Hooks(after_step=[lambda step: called.append(f"first {step}")]))
    hooks.add(feature)
    feature.after_step.clear()
    for after_step in hooks.after_step:
        after_step(3)
    assert called == ["first 3", "second 3"] and len(hooks.after_first_step) == 1 and hooks.before_step == []


def test_who_answers_the_loop_need_not_import_it() -> None:
    code = "import sys; import ddp_train.training.loop.hooks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
