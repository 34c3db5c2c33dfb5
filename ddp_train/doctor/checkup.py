"""The ranks' part of `ddp-train doctor`: a machine's first rank examines it, all ranks sum known values, rank 0 shows the result.

All messages go through the store in which the ranks met, and each wait has a limit (`machine`): often the fault of a machine is that no
process group with it would ever open. So the group is opened in a thread that may be left behind.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_train.config import cluster
from ddp_train.config.targets.locate import class_constants
from ddp_train.distributed.store import JoinedAttempt, join_store_again, wait_for
from ddp_train.distributed.world import World, open_world
from ddp_train.doctor.machine import ANSWER_WITHIN_S, EXAMINE_WITHIN_S, Examination, MachineReport, PeerReport, sums_within_s
from ddp_train.doctor.problems import ClusterReport, Measurement, blocks_all_reduce, problems
from ddp_train.doctor.table import screen
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES
from ddp_train.launch.job import Job
from ddp_train.launch.node_facts.differences import SKEW_S
from ddp_train.run_folder.result import Result, Status
from ddp_train.system import process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.devices import resolve_device
from ddp_train.system.files import write_json
from ddp_train.traits import DataConstants

_POLL_S = 0.02
_NUM_VALUES = 1000
_TIMES = 5
_ALL_REDUCE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}

_Answer = TypeVar("_Answer")


def quick(attempt: JoinedAttempt, job: Job) -> int:
    """Examine the machines of a job (its `RankProgram`), and return the exit code. Collective."""
    return _Checkup(attempt, job, is_full=False).run()


def full(attempt: JoinedAttempt, job: Job) -> int:
    """As `quick`; also measure how fast each rank computes and an all-reduce is."""
    return _Checkup(attempt, job, is_full=True).run()


class _Checkup:
    """The examination, as one rank takes part in it."""

    def __init__(self, attempt: JoinedAttempt, job: Job, *, is_full: bool) -> None:
        self._attempt = attempt
        self._store = attempt.store
        self._job = job
        self._machine = process_env.node_rank()
        self._count = process_env.num_nodes()
        self._began = time.monotonic()
        self._is_full = is_full
        self._device = resolve_device(job.config.cluster.device)
        self._sums_within_s = sums_within_s(self._device, attempt.size, is_full=is_full)

    def run(self) -> int:
        """Return the exit code: the same on all ranks."""
        os.environ.update(cluster.environment_of(self._job.config.cluster.env, inherited=os.environ))
        examination = None
        if process_env.local_rank() == 0:
            first = process_env.store_address()[0] if self._count > 1 else ""
            examination = Examination(self._job, number=self._machine, count=self._count, first=first)
            self._store.set(f"machine/{self._machine}", examination.examine().to_json())
        try:
            return self._judge(examination) if self._attempt.rank == 0 and examination is not None else self._follow(examination)
        finally:
            if examination is not None:
                examination.close()

    def _judge(self, examination: Examination) -> int:
        """Collect all reports, judge and show them, and send the verdict (rank 0)."""
        machines = self._collect("machine", range(self._count), MachineReport.from_json, within_s=EXAMINE_WITHIN_S)
        began = time.time()
        self._store.set("addresses", json.dumps({number: machine.address for number, machine in machines.items()}))
        others = [number for number in machines if number != self._machine]
        clocks = self._collect("clock", others, lambda text: _ahead(float(text), began, time.time()), within_s=ANSWER_WITHIN_S)
        self._probe_peers(examination)
        peers = self._collect("peers", machines, PeerReport.from_json, within_s=ANSWER_WITHIN_S)
        report = ClusterReport(
            count=self._count,
            processes=self._attempt.size,
            folder=self._job.run_folder.as_typed(),
            machines=machines,
            peers=peers,
            clocks={self._machine: 0.0, **clocks},
            measurements=None,
            downloads=class_constants(self._job.config.data, DataConstants).downloads,
            expects_equal=self._job.config.cluster.processes_per_node is None,
        )
        measures = not blocks_all_reduce(report)
        self._store.set("next", "sums" if measures else "verdict")
        if measures:
            threading.Thread(target=self._measure, daemon=True).start()
            ranks = range(self._attempt.size)
            sums = self._collect("sum", ranks, lambda text: Measurement(**json.loads(text)), within_s=self._sums_within_s)
            report = replace(report, measurements=sums)
        errors = problems(report)
        stream = sys.stderr if "--json" in self._job.command else sys.stdout
        print(screen(report, errors, seconds=time.monotonic() - self._began), file=stream, flush=True)
        code = ENVIRONMENT_REFUSES if errors else DONE
        with suppress(OSError):  # the folder may be the very fault
            write_json(self._job.run_folder.doctor, {"exit_code": code, "problems": [*map(str, errors)], **asdict(report)})
            Result(status=Status.COMPLETED).write(self._job.run_folder.result)  # nothing starts the examination again
        self._store.set("verdict", json.dumps({"code": code, "problems": len(errors), "host": report.name(0)}))
        return code

    def _follow(self, examination: Examination | None) -> int:
        """Do what rank 0 asks, and return its verdict (other ranks)."""
        if self._wait("addresses", within_s=EXAMINE_WITHIN_S + ANSWER_WITHIN_S) and examination is not None:
            self._store.set(f"clock/{self._machine}", str(time.time()))
            self._probe_peers(examination)
        if self._wait("next", within_s=3 * ANSWER_WITHIN_S) == "sums":
            threading.Thread(target=self._measure, daemon=True).start()
        if not (answer := self._wait("verdict", within_s=self._sums_within_s + ANSWER_WITHIN_S)):
            print("doctor   rank 0 gave no verdict; its terminal may show the reason", flush=True)
            return ENVIRONMENT_REFUSES
        verdict = json.loads(answer)
        if verdict["code"] != DONE and examination is not None:
            print(f"doctor   {verdict['problems']} to fix; the terminal of {verdict['host']} names them", flush=True)
        return int(verdict["code"])

    def _probe_peers(self, examination: Examination) -> None:
        addresses = {int(number): address for number, address in json.loads(self._store.get("addresses")).items()}
        self._store.set(f"peers/{self._machine}", examination.probe_peers(addresses).to_json())

    def _measure(self) -> None:
        """Sum known values with all ranks, and report the outcome: in a thread, since the sum may block for ever."""
        store = join_store_again(self._attempt.prefix)  # while a thread waits in a store, no other can use its connection
        rank = self._attempt.rank
        timeout = timedelta(seconds=self._sums_within_s)
        try:
            world = open_world(dist.PrefixStore("sums", store), rank, self._attempt.size, device=self._device, timeout=timeout)
            kinds = [torch.device("cpu"), *([world.device] if self._device == "cuda" else [])]
            wrong = "; ".join(text for kind in kinds if (text := check_sums(world, kind)))
            speeds = self._speeds(world) if self._is_full and not wrong else {}
            measurement = Measurement(rank=rank, machine=self._machine, device=str(world.device), wrong=wrong, **speeds)
        except Exception as error:  # whatever torch, gloo, NCCL or CUDA raise
            wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            measurement = Measurement(rank=rank, machine=self._machine, wrong=wrong)
        store.set(f"sum/{rank}", json.dumps(asdict(measurement)))

    def _speeds(self, world: World) -> dict[str, float]:
        kind = world.device.type
        size = _MATMUL_SIZE[kind]
        matrix = torch.ones(size, size, device=world.device, dtype=torch.bfloat16 if kind == "cuda" else torch.float32)
        matmul_tflops = 2 * size**3 / 1e12 / _seconds(lambda: matrix @ matrix, world.device)
        world.barrier()
        values = torch.zeros(_ALL_REDUCE_BYTES[kind] // 4, device=world.device)
        all_reduce_gb_s = values.nbytes / 1e9 / _seconds(lambda: world.sum(values), world.device)
        return {"matmul_tflops": matmul_tflops, "all_reduce_gb_s": all_reduce_gb_s}

    def _collect(self, kind: str, numbers: Collection[int], read: Callable[[str], _Answer], *, within_s: float) -> dict[int, _Answer]:
        """Return the answers with these numbers that came in time."""
        answers: dict[int, _Answer] = {}

        def is_complete() -> bool:
            for number in numbers:
                if number not in answers and self._store.check([f"{kind}/{number}"]):
                    answers[number] = read(self._store.get(f"{kind}/{number}").decode())
            return len(answers) == len(numbers)

        wait_until(is_complete, within_s=within_s, every_s=_POLL_S)
        return answers

    def _wait(self, key: str, *, within_s: float) -> str:
        """Return rank 0's message; "": none came in time, or rank 0 has ended."""
        with suppress(dist.DistError):
            return wait_for(self._store, key, within_s=within_s)
        return ""


def _ahead(clock: float, began: float, answered: float) -> float:
    """Return by how many seconds a machine's clock is ahead; it read its clock between `began` and `answered`."""
    ahead = clock - min(max(clock, began), answered)
    return clock - began if abs(ahead) > SKEW_S else ahead


def check_sums(world: World, device: torch.device) -> str:
    """Sum and gather known values with all ranks; return the first wrong result, or "". Collective."""
    for dtype in (torch.int64, torch.float32):  # small integers are exact in both, in whatever order they are added
        rows = [_values(rank, dtype, device) for rank in range(world.size)]
        summed = world.sum(rows[world.rank].clone())
        if text := _difference(summed, torch.stack(rows).sum(0), f"the sum of {dtype} on {device.type}"):
            return text
        for rank, (theirs, row) in enumerate(zip(world.gather_rows(rows[world.rank]), rows, strict=True)):
            if text := _difference(theirs, row, f"what came from rank {rank} as {dtype} on {device.type}"):
                return text
    return ""


def _values(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.arange(_NUM_VALUES, device=device) % 97 * (rank % 8 + 1)).to(dtype)  # 20,000 ranks add up to less than 2**24


def _difference(values: Tensor, expected: Tensor, name: str) -> str:
    wrong = (values != expected).nonzero()
    if not len(wrong):
        return ""
    index = int(wrong[0])
    return f"{name} has {values[index].item()} at index {index}, expected {expected[index].item()}; {len(wrong)} values are wrong"


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long the work takes once it is warm: the median of some times."""
    times = []
    module = torch.get_device_module(device)
    for _ in range(_TIMES + 1):
        module.synchronize(device)
        started = time.monotonic()
        work()
        module.synchronize(device)
        times.append(time.monotonic() - started)
    return median(times[1:])
