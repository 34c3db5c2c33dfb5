"""When attempts begin and end, what is counted, and what the end is: with machines that have no agents."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.unit.launch.node.fake_machines import FIRST, bed, hasty

pytestmark = pytest.mark.usefixtures("hasty")
__all__ = ["hasty"]


def ends_as(folder: RunFolder, status: Status, step: int = 3) -> None:
    Result(status=status, step=step).write(folder.result)


def test_a_run_that_is_completed_ends_with_0(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            ends_as(found.run_folder, Status.COMPLETED)
            second.ends(0)
            found.first.ends(0)
            return await found.code()

    assert asyncio.run(story()) == 0


def test_a_run_whose_time_is_up_ends_with_75_everywhere(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            ends_as(found.run_folder, Status.PREEMPTED)
            second.ends(0)
            found.first.ends(0)
            return await found.code()

    assert asyncio.run(story()) == 75


def test_a_failure_costs_one_restart_for_all_machines(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path, max_restarts=1) as found:
            second = await found.comes("node1")
            for count in (1, 2):
                attempts = [await each.hears("attempt", count=count) for each in (found.first, second)]
                assert [(each["restarts"], each["max_restarts"]) for each in attempts] == [(count - 1, 1)] * 2
                failure.from_exit(rank=2, pid=1, exit_code=-9).record(found.run_folder)
                second.ends(1)
                await found.first.hears("kill", count=count)  # its ranks hang, and have nothing to say
                found.first.ends(137)
            return await found.code()

    assert asyncio.run(story()) == 1


@pytest.mark.parametrize("code", [2, 78, 93])
def test_what_a_person_has_to_mend_is_not_started_again(tmp_path: Path, code: int) -> None:
    async def story() -> int:
        async with bed(tmp_path, max_restarts=5) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            second.ends(1)
            found.first.ends(code)
            return await found.code()

    assert asyncio.run(story()) == code


def test_without_progress_there_is_a_last_restart(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path, max_restarts=99) as found:
            second = await found.comes("node1")
            for count in range(1, 5):
                await second.hears("attempt", count=count)
                second.ends(1)
                found.first.ends(1)
            return await found.code()

    assert asyncio.run(story()) == 93


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_lost_machine_is_named_before_anybody_else_is_and_the_others_end(
    tmp_path: Path, is_silent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> int:
        async with bed(tmp_path, nodes=(3, 3)) as found:
            second, third = await found.comes("node1", node_rank=1), await found.comes("node2", node_rank=2)
            await third.hears("attempt")
            if is_silent:
                third.freeze()
            else:
                third.line.cut()
            await second.hears("kill")
            report = json.loads(found.run_folder.failure.read_text())
            assert (report["host"], report["rank"], report["error"]) == ("node2", 4, "MachineLost")
            assert ("has been silent for" in report["message"]) == is_silent
            second.ends(137)
            found.first.ends(137)
            assert "node2" in second.said()
            return await found.code()

    assert asyncio.run(story()) == 1
    assert "The run failed: machine node2" in capsys.readouterr().err


def test_a_first_machine_that_loses_all_others_names_itself(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, nodes=(3, 3)) as found:
            others = [await found.comes(f"node{number}") for number in (1, 2)]
            for other in others:
                await other.hears("attempt")
            for other in others:
                other.freeze()
            await found.first.hears("kill")
            report = json.loads(found.run_folder.failure.read_text())
            assert report["host"] == "node0" and "cannot reach any other machine (node1, node2)" in report["message"]

    asyncio.run(story())


def test_a_fixed_run_waits_for_the_lost_machine_and_an_elastic_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story(folder: Path, min_nodes: int) -> None:
        folder.mkdir()
        async with bed(folder, nodes=(min_nodes, 2), max_restarts=3) as found:
            second = await found.comes("node1", program="one")
            await second.hears("attempt")
            await found.first.hears("attempt")
            second.line.cut()
            await found.first.hears("kill")
            found.first.ends(137)
            if min_nodes == 1:
                alone = await found.first.hears("attempt", count=2)
                assert (alone["nodes"], alone["restarts"]) == (1, 1)
                second = await found.comes("node1", program="one")
                told = await found.first.hears("stop")
                assert told["signal"] == signal.SIGTERM
                ends_as(found.run_folder, Status.PREEMPTED)
                found.first.ends(143)
            else:
                await asyncio.sleep(0.4)
                second = await found.comes("node1", program="one")
            last = await second.hears("attempt")
            assert (last["nodes"], last["restarts"], last["rank"]) == (2, 1, 1)  # one that comes costs none
            assert min_nodes == 2 or not found.run_folder.result.exists()

    asyncio.run(story(tmp_path / "elastic", 1))
    asyncio.run(story(tmp_path / "fixed", 2))
    assert "waiting: of 2 machines node1 (ended its node program, or the connection was lost) is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_stop_signal_on_one_machine_stops_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    async def story() -> int:
        async with bed(tmp_path, max_restarts=3) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            second.line.send("stop", signal=int(number), is_final=False)
            assert (await found.first.hears("stop"))["signal"] == number
            assert not any(each["kind"] == "stop" for each in second.heard)  # it has told its own agent
            ends_as(found.run_folder, Status.INTERRUPTED if number == signal.SIGINT else Status.PREEMPTED)
            second.ends(128 + number)
            found.first.ends(128 + number)
            return await found.code()

    assert asyncio.run(story()) == code


def test_a_second_stop_kills_the_agents_of_all(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            for is_final in (False, True):
                found.first.line.send("stop", signal=int(signal.SIGINT), is_final=is_final)
            await second.hears("kill")
            second.ends(137)
            found.first.ends(137)
            return await found.code()

    assert asyncio.run(story()) == 130
    assert RunFolder(tmp_path).read_result() == Result(status=Status.INTERRUPTED)


def test_a_stop_while_machines_are_missing_ends_the_run(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            await found.first.hears("welcome")
            found.first.line.send("stop", signal=int(signal.SIGTERM), is_final=False)
            return await found.code()

    assert asyncio.run(story()) == 143


def test_an_agent_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            found.first.line.send("stop", signal=int(signal.SIGTERM), is_final=False)
            await second.hears("stop")
            await second.hears("kill")

    asyncio.run(story())


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_machine_whose_agent_outlives_a_kill_is_dropped(tmp_path: Path, is_first: bool, is_stopped: bool) -> None:
    """And the run ends with the first machine: without it there is no other attempt."""

    async def story() -> int:
        async with bed(tmp_path, nodes=(1, 2), max_restarts=3 if is_first else 0) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            held, other = (found.first, second) if is_first else (second, found.first)
            if is_stopped:
                for is_final in (False, True):
                    other.line.send("stop", signal=int(signal.SIGTERM), is_final=is_final)
            await asyncio.sleep(0.05)
            other.ends(143 if is_stopped else 1)
            assert (await held.hears("kill"))["attempt"] == 1
            assert "cannot be killed" in (await held.hears("dropped"))["why"]
            return await found.code()

    assert asyncio.run(story()) == (143 if is_stopped else 1)


def test_a_machine_that_is_lost_after_the_last_step_leaves_the_result_as_it_is(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            ends_as(found.run_folder, Status.COMPLETED)
            second.line.cut()
            await found.first.hears("kill")
            found.first.ends(137)
            return await found.code()

    assert asyncio.run(story()) == 0
    assert RunFolder(tmp_path).is_completed() and not RunFolder(tmp_path).failure.exists()


def test_a_damaged_result_is_as_none(tmp_path: Path) -> None:
    async def story() -> int:
        (tmp_path / "result.json").write_text("{")
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            second.ends(1)
            found.first.ends(1)
            return await found.code()

    assert asyncio.run(story()) == 1


def test_on_fewer_machines_the_global_batch_stays(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, nodes=(1, 2)) as found:
            await found.first.hears("attempt")
            job = json.loads(found.first.heard[-1]["job"])
            assert job["config"]["batch"]["world_size"] == 2
            before = found.attempts._this_node.job
            assert before is not None and job["config"]["batch"]["global_batch_size"] == before.config.batch.global_batch_size

    asyncio.run(story())


def test_machines_that_an_engine_has_chosen_end_with_one_that_is_refused(tmp_path: Path) -> None:
    async def story() -> int:
        async with bed(tmp_path, is_fixed=True) as found:
            await (await found.comes("node1", config={**FIRST.config, "seed": 9})).hears("refused")
            return await found.code()

    assert asyncio.run(story()) == 78
    report = failure.load_report(RunFolder(tmp_path).failure)
    assert report is not None and report.exit_code == 78 and "node1 is refused" in report.message


def test_a_first_machine_with_a_problem_says_it_to_all(tmp_path: Path) -> None:
    async def story() -> int:
        problem = FIRST.__class__(**{**vars(FIRST), "problems": ["eth7 is not there"]})
        async with bed(tmp_path, first=problem) as found:
            other = await found.comes("node1")
            assert (await other.hears("refused"))["reasons"] == ["eth7 is not there, on node0, the first machine"]
            return await found.code()

    assert asyncio.run(story()) == 78
