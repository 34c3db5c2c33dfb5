"""Who is taken in, who is refused alone and by which name, who is missing and who is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.launch.job import RankProgram
from ddp_train.launch.node.wire import LineLost, connect, proof
from tests.unit.launch.node.fake_machines import FIRST, bed, hasty

pytestmark = pytest.mark.usefixtures("hasty")
__all__ = ["hasty"]


def test_machines_that_agree_begin_an_attempt_the_first_one_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, nodes=(3, 3)) as found:
            third = await found.comes("node2", node_rank=2, nodes="2", processes=1)
            await third.hears("welcome")
            second = await found.comes("node1", node_rank=1)
            attempts = [await each.hears("attempt") for each in (found.first, second, third)]
            assert [each["rank"] for each in attempts] == [0, 1, 2]
            assert {(each["nodes"], each["restarts"], each["port"], each["name"]) for each in attempts} == {
                (3, 0, attempts[0]["port"], attempts[0]["name"])
            }
            assert '"world_size": 5' in attempts[0]["job"]

    asyncio.run(story())


def test_who_disagrees_is_refused_alone_and_named_on_all_terminals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with bed(tmp_path, nodes=(3, 3)) as found:
            good = await found.comes("node1")
            await good.hears("welcome")
            bad = await found.comes("node2", config={**FIRST.config, "optimizer.lr": 0.5})
            refused = await bad.hears("refused")
            assert not refused["is_foreign"]
            assert "optimizer.lr" in refused["reasons"][0] and "0.5 on node2" in refused["reasons"][0]
            await good.hears("say")
            assert "node2 is refused:\n  optimizer.lr" in good.said()
            broken = await found.comes("node3", problems=["GLOO_SOCKET_IFNAME=eth7 names eth7, which does not exist"])
            assert "eth7" in (await broken.hears("refused"))["reasons"][0]
            blind = await found.comes("node4", sees=False)
            assert "does not see" in (await blind.hears("refused"))["reasons"][0]
            await (await found.comes("node2")).hears("attempt")  # mended

    asyncio.run(story())
    assert "node2 is refused" in capsys.readouterr().err


def test_for_another_program_than_training_machines_may_disagree_and_have_problems(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, first=replace(FIRST, problems=["eth8 is not there"]), work=RankProgram(function="a.b")) as found:
            other = await found.comes("node1", sees=False, nodes="3", config={"optimizer.lr": 0.5}, problems=["eth7 is not there"])
            assert '"RankProgram": {"function": "a.b"}' in (await other.hears("attempt"))["job"]

    asyncio.run(story())


def test_another_run_is_refused_and_a_strangers_words_are_not_listened_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, token="ours", first=FIRST) as found:
            foreign = await found.comes("node1", token="theirs")
            refused = await foreign.hears("refused")
            assert refused["is_foreign"] and refused["reasons"] == ["it belongs to another run"]
            stranger = await connect("127.0.0.1", found.port, within_s=5)
            stranger.send("over", code=0)
            assert (await stranger.receive())["kind"] == "challenge"
            with pytest.raises(LineLost):
                await stranger.receive()
            stranger.cut()
            await (await found.comes("node1", token="ours")).hears("attempt")

    asyncio.run(story())


def test_both_ends_prove_that_they_know_the_token_and_never_send_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path, token="ours") as found:
            other = await found.comes("node1", token="ours")
            welcome = await other.hears("welcome")
            challenge = await other.hears("challenge")
            assert welcome["proof"] == proof("ours", by="registry", over="n1", own=challenge["nonce"])
            assert welcome["proof"] != proof("ours", by="node", over=challenge["nonce"], own="n1")
            again = await found.comes("node2", token="ours")
            assert (await again.hears("challenge"))["nonce"] != challenge["nonce"]
            assert "ours" not in str([each for each in other.heard if each["kind"] != "attempt"])

    asyncio.run(story())


@pytest.mark.parametrize("says", [{"facts": "{}"}, {"facts": "[]"}, {"facts": None}, {"program": None}, {"pid": "x"}])
def test_a_machine_of_another_version_is_told_so(tmp_path: Path, says: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            other = await found.comes("node1", says=says)
            assert (await other.hears("refused"))["reasons"] == ["it speaks another version of ddp_train"]

    asyncio.run(story())
    assert "node1 is refused:\n  it speaks another version of ddp_train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "stop"},
        {"kind": "stop", "signal": "SIGTERM", "is_final": False},
        {"kind": "stop", "signal": 999, "is_final": False},
        {"kind": "ended", "attempt": 1, "code": None, "why": ""},
        {"kind": ["ended"]},
    ],
)
def test_a_node_that_sends_what_is_no_message_is_dropped_by_name(
    tmp_path: Path, fields: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> int:
        async with bed(tmp_path) as found:
            second = await found.comes("node1")
            await second.hears("attempt")
            await found.first.hears("attempt")
            second.line.send(**fields)  # type: ignore[arg-type]
            assert "sent an unknown message" in (await second.hears("dropped"))["why"]
            await found.first.hears("kill")
            found.first.ends(137)
            return await found.code()

    assert asyncio.run(story()) == 1
    assert "node1 sent an unknown message: {'kind': " in capsys.readouterr().err


def test_a_machine_that_does_not_answer_is_named_and_may_come_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            mute = await found.comes("node1", is_mute=True)
            async with asyncio.timeout(5):
                while not mute.is_cut:
                    await asyncio.sleep(0.01)
            await (await found.comes("node1")).hears("attempt")

    asyncio.run(story())
    assert f"node1 does not say whether it sees {tmp_path}" in capsys.readouterr().err


def test_what_strangers_say_is_spelled_out_cut_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with bed(tmp_path, token="ours") as found:
            for number in range(5):
                stranger = await found.comes(f"\x1b[2J{number}" + "x" * 10_000, token="theirs")
                await stranger.hears("refused")
            assert len(found.registry._refused) == 1
            for number in range(50):
                other = await found.comes(f"node{number}", token="ours", config={})
                await other.hears("refused")
            assert len(found.registry._refused) == 20

    asyncio.run(story())
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\\x1b[2J0xxx" in said and "x" * 200 not in said
    assert said.count("it belongs to another run") == 1 and "(127.0.0.1) is refused" in said


def test_a_run_that_has_its_machines_takes_no_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            second = await found.comes("node1", node_rank=1)
            await second.hears("attempt")
            again = await found.comes("node7", node_rank=1)
            assert (await again.hears("refused"))["reasons"] == ["machine 1 is here already: node1"]
            third = await found.comes("node2")
            assert (await third.hears("refused"))["reasons"] == ["the run has all 2 machines: node0, node1"]

    asyncio.run(story())


def test_clocks_that_differ_are_named_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            await (await found.comes("node1", ahead_s=60.0)).hears("attempt")

    asyncio.run(story())
    assert "warning: the clock of node1 is 60.0 s ahead of that of node0" in capsys.readouterr().err


def test_missing_machines_are_named_and_the_end_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> int:
        async with bed(tmp_path, nodes=(3, 3), join_timeout_s=1, hosts=("a", "b", "c"), first=replace(FIRST, node_rank=0)) as found:
            await asyncio.sleep(0.4)
            other = await found.comes("node1", node_rank=1)
            await other.hears("say", within_s=0.4)  # soon after it has come, and on its terminal, too
            assert missing in other.said()
            return await found.code()

    missing = "waiting: of 3 machines machine 2 (c) is missing; here: node0, node1"
    assert asyncio.run(story()) == 78
    said = capsys.readouterr().err
    assert missing in said
    assert "fewer than 3 machines joined within 1 s" in said


def test_who_came_for_another_run_is_refused_and_who_comes_back_to_this_one_is_not(tmp_path: Path) -> None:
    """Two runs that are resumed at one endpoint have equal configs."""

    async def story() -> None:
        async with bed(tmp_path, nodes=(2, 2), first=replace(FIRST, run="/runs/a")) as found:
            for run, said in (("/runs/b", "node1 wants /runs/b"), ("", "node1 wants a new one")):
                refused = await (await found.comes("node1", run=run)).hears("refused")
                assert refused["is_foreign"] and refused["reasons"] == [f"another run is there: /runs/a; {said}"]
            back = await found.comes("node1", run=str(found.run_folder.root))  # it has been a node of this very run
            assert (await back.hears("welcome"))["folder"] == str(found.run_folder.root)

    asyncio.run(story())
