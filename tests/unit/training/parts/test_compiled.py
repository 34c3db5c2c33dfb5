"""Which parts are compiled, how often, with which cache, and what a failure says. By torch's backends that need no C++ compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ddp_train.config.schema import CompileConfig
from ddp_train.distributed.world import World, alone
from ddp_train.errors import ConfigError, RunError
from ddp_train.model.gpt import GPT
from ddp_train.rank.rank import end_compilers
from ddp_train.training.parts.compiled import Compiled, compile_model, compile_note, keep_cache
from ddp_train.training.parts.turns import Turns, make_turns
from ddp_train.training.train_state import TrainState
from tests.unit.parts import components, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what it compiles


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    handler, limit = dynamo.callback_handler, dynamo.config.recompile_limit
    before = handler.start_callbacks[:], handler.end_callbacks[:]
    yield
    dynamo.config.recompile_limit = limit
    handler.start_callbacks[:], handler.end_callbacks[:] = before
    torch.compiler.reset()


def settings(**changes: Any) -> CompileConfig:
    given = {"mode": "default", "regions": "auto", "backend": "eager", "fullgraph": False, "max_recompiles": 8, "on_failure": "stop"}
    return CompileConfig(**{**given, **changes})


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(20, 8, num_layers=3, num_heads=1, width=4)


def compiled(model: nn.Module, **changes: Any) -> Compiled:
    return compile_model(model, settings(**changes), alone(), parts=[model])


def names(found: Compiled) -> list[str]:
    return list(found.regions)


def test_blocks_that_repeat_are_compiled_or_classes_or_the_whole() -> None:
    assert names(compiled(gpt())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(compiled(gpt(), regions=["FeedForward"])) == [f"blocks.{number}.mlp" for number in range(3)]
    assert names(compiled(gpt(), regions="whole")) == [""]
    assert names(compiled(nn.Linear(1, 1))) == [""]
    parts = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})
    assert names(compile_model(parts, settings(), alone(), parts=[*parts.children()])) == ["one", "two"]  # turns call parts
    with pytest.raises(ConfigError, match=r"compile\.regions: the GPT has no module of a class Layer"):
        compiled(gpt(), regions=["Layer"])


def test_nothing_is_compiled_on_the_device_meta() -> None:
    model = gpt()
    assert not compile_model(model, settings(), alone("meta"), parts=[model])
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_blocks_share_a_graph_and_ragged_batches_take_one_more() -> None:
    model, plain = gpt(), gpt()
    found = compiled(model, backend="aot_eager")
    for size in (6, 6, 5, 3, 4, 2):
        tokens = torch.randint(20, (size, 8))
        torch.testing.assert_close(model(tokens), plain(tokens))
    values = found.values()
    assert (values["compile/graphs"], values["compile/recompiles"]) == (2, 1)
    assert values["compile/seconds"] > 0
    assert "2 graphs" in found.line() and "1 of them for other shapes or types" in found.line()
    assert list(model.state_dict()) == list(plain.state_dict())


def test_layers_of_torchs_own_are_compiled_too() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0), 3, enable_nested_tensor=False)
    found = compiled(encoder)
    assert names(found) == ["layers.0", "layers.1", "layers.2"]
    encoder(torch.ones(2, 3, 4).requires_grad_())
    assert found.values()["compile/graphs"] == 1
    assert type(encoder.layers[0]).__name__ == "TransformerEncoderLayer"


class Breaking(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        if given.sum().item() > 1e9:  # the line that breaks the graph
            return given
        return given + 1


def test_a_failure_names_the_users_line_or_goes_on_without() -> None:
    model = Breaking()
    compiled(model, fullgraph=True)
    with pytest.raises(RunError, match=r"compile: Breaking cannot be compiled, at test_compiled\.py:\d+ in forward: if given\.sum\(\)"):
        model(torch.ones(2))
    model = Breaking()
    found = compiled(model, fullgraph=True, on_failure="eager")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    model(torch.ones(3))
    assert found.given_up == 1
    assert "1 regions run without compilation" in found.line()


def test_a_backend_that_fails_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda call, *, real=torch.compile, backend, **rest: real(call, backend=broken, **rest))
    model = nn.Linear(1, 1)
    compiled(model)
    with pytest.raises(RunError, match=r"Linear cannot be compiled(.|\n)*no compiler here(.|\n)*compile\.on_failure=eager"):
        model(torch.ones(1, 1))


def test_a_compiler_that_a_stop_signal_has_ended_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def ended_once(graph: Any, inputs: Any) -> Any:
        times.append(len(times))
        if len(times) == 1:
            subprocess.run(["bash", "-c", "kill -TERM $$"], check=True)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda call, *, real=torch.compile, backend, **rest: real(call, backend=ended_once, **rest))
    model = nn.Linear(1, 1)
    compiled(model)
    assert model(torch.ones(1, 1)).shape == (1, 1)
    assert len(times) == 2


def test_recompiles_have_a_limit() -> None:
    model = nn.Linear(2, 2)
    found = compiled(model, max_recompiles=1)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):  # of parameters: each is a graph of its own
        model.to(kind)(torch.ones(1, 2, dtype=kind))
    assert found.values()["compile/graphs"] == 2


def test_the_cache_is_the_runs_but_for_a_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(World, "barrier", lambda world: None)
    world = World(rank=5, size=8, local_rank=1, local_size=4, device=torch.device("cpu"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch sets it itself
    monkeypatch.setattr("torch._inductor.config.compile_threads", 77)  # as inductor has it that was imported before
    keep_cache(tmp_path / "run/compiled", world)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "run/compiled")
    assert int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == torch._inductor.config.compile_threads >= 1
    keep_cache(tmp_path / "other", world)  # it is somebody's own now
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "run/compiled")


def test_on_a_network_each_machine_has_a_copy_of_the_cache_on_its_own_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr("ddp_train.training.parts.compiled.is_shared", lambda folder: "of_all" in str(folder))
    monkeypatch.setattr(World, "barrier", lambda world: None)
    shared = tmp_path / "of_all/run/compiled"
    for name in ("ab/graph.py", "triton/kernel.cubin", "locks/one.lock"):
        (shared / name).parent.mkdir(parents=True)
        (shared / name).write_text(name)
    for rank, disk in enumerate(("first", "first", "second", "second")):  # two ranks on each machine
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        (tmp_path / disk).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / disk))
        keep = keep_cache(shared, World(rank=rank, size=4, local_rank=rank % 2, local_size=2, device=torch.device("cpu")))
        local = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert local.parent == tmp_path / disk
        assert local.stat().st_mode & 0o77 == 0, "what lies there is executed"
        names = {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()}
        assert names == {"ab/graph.py", "triton/kernel.cubin"} | {f"made_by_{each}.py" for each in ([], [0], [0], [0, 2])[rank]}
        (local / f"made_by_{rank}.py").write_text("new")
        (local / "ab/graph.py").unlink()
        (local / "ab/graph.py").write_text("as this machine has it")
        compiled = Compiled()
        compiled.keep = keep
        compiled.end_warm_up()
        for thread in threading.enumerate():
            if thread.name == "compiled":
                thread.join()
    assert (shared / "made_by_0.py").read_text() == "new"
    assert (shared / "ab/graph.py").read_text() == "ab/graph.py", "what is there stays"
    assert not list(shared.glob("made_by_[1-3].py")), "rank 0 copies, for all"
    (tmp_path / "of_all/tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of_all/tmp"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    keep_cache(shared, alone())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(shared), "a temporary folder on a network is no better"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for a CPU with g++")
def test_processes_that_compile_end_with_the_run_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile, config

    monkeypatch.setattr(config, "compile_threads", 2)
    async_compile.AsyncCompile.process_pool()
    (pool,) = async_compile._pool_set
    assert pool.process.poll() is None
    end_compilers()
    assert pool.process.poll() is not None


def test_a_run_compiles_before_its_first_step_and_trains_as_without(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["model=mini_resnet", "model.width=2", "model.blocks_per_stage=1", "data=synthetic_images", "data.num_samples=40"]
    base += [
        "loader.micro_batch_size=16",
        "trainer.max_steps=4",
        "scheduler=constant",
        "scheduler.warmup_steps=0",
        "data.eval={num_samples:24}",
    ]
    records: list[dict[str, Any]] = []
    runs = []
    for options in (["compile=default", "compile.backend=aot_eager"], []):
        parts = components(*base, *options, base=[])
        trainer(parts, TrainState(), write=lambda record: records.append(dict(record))).train()
        runs.append(parts)
    assert runs[0].notes == [compile_note(runs[0].compiled, settings(backend="aot_eager"))]
    assert "3 regions (BasicBlock)" in runs[0].notes[0]
    warm = capsys.readouterr().out
    assert "compile  " in warm and "graphs in" in warm
    half = [record for record in records if record["split"] == "train"]
    with_, without = half[:4], half[4:]
    assert [record["loss"] for record in with_] == pytest.approx([record["loss"] for record in without], rel=1e-5)
    assert with_[0]["compile/graphs"] >= 2 and "compile/graphs" not in without[0]
    torch.testing.assert_close([*runs[0].model.buffers()], [*runs[1].model.buffers()])  # what warmed up left no trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(768, 768)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        return outputs


class _Graphs:
    """Notes what torch's own code decides: where CUDA graphs begin anew, and give back the memory of those before."""

    def __init__(self) -> None:
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager  # warns of torch's own names where it is imported

        class Manager(CUDAGraphTreeManager):
            running_forwards_with_pending_backwards = False
            current_gen = None

            def __init__(self) -> None:
                """Take no GPU."""

        self.begins: list[bool] = []
        self._manager: Any = Manager()

    def backend(self, module: Any, inputs: Any, **options: Any) -> Any:
        def run(*given: Any) -> Any:
            self.begins.append(self._manager.can_start_new_generation())
            self._manager.current_gen = self._manager.get_curr_generation()
            return module.forward(*given)

        return run


def test_cuda_graphs_of_blocks_begin_anew_with_each_batch_and_not_with_each_block() -> None:
    parts, graphs = components(), _Graphs()
    blocks = nn.Sequential(Block(), Block())
    parts = replace(parts, model=nn.Sequential(nn.Flatten(), blocks, nn.Linear(768, 10)))
    parts = replace(parts, turns=Turns(lambda: make_turns(parts.model, parts.objective, parts.strategy, alone())))
    parts = replace(parts, compiled=compiled(parts.model, mode="reduce-overhead", backend=graphs.backend))
    batch = parts.train_loader.peek().batch
    for _ in range(2):
        parts.loss(batch, parts.turns.plain)
        with torch.no_grad():
            parts.evaluate_batch(batch)
    assert graphs.begins == 4 * [True, False]
