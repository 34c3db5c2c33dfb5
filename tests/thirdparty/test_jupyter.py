"""Notebooks: a run's output is in its cell, and the stop button lets it save."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ddp_train.run_folder.paths import RunFolder
from tests.conftest import FEW, TINY, Project, wait_for

pytestmark = pytest.mark.needs("nbclient", "ipykernel")

_WORDS = [*TINY, "cluster=cpu", "cluster.processes_per_node=2"]
_OWN = [*FEW, "cluster=cpu", "cluster.processes_per_node=2", "trainer.max_steps=3"]
_LIMIT_S = 600
_MODEL = """import torch
class MyModel(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(768, 10))"""


def notebook(project: Project, *cells: str) -> Any:
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return NotebookClient(made, timeout=_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(project.folder)}})


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def is_training(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0


def test_what_a_run_says_is_in_its_cell_and_its_result_in_the_next(project: Project) -> None:
    client = notebook(
        project,
        f"import ddp_train\nresult = ddp_train.run({[*_WORDS, 'trainer.max_steps=3']!r})",
        "print(result.status, result.step, sorted(result.metrics)[:2])",
        "try:\n    ddp_train.run(['modl=mlp'])\nexcept ddp_train.RunFailed as error:\n    print(error)",
        f"%%writefile my_model.py\n{_MODEL}",
        f"{_MODEL}\nmine = ['model=custom', 'model._target_=__main__.MyModel']"
        "\ntry:\n    ddp_train.run(mine)\nexcept ddp_train.RunFailed as error:\n    print(error)",
        f"result = ddp_train.run({[*_OWN, 'model=custom', 'model._target_=my_model.MyModel']!r})",
    )
    client.execute()
    first, second, third, _, fifth, sixth = client.nb.cells
    assert "ranks    2 on cpu" in printed(first) and "Done: 3 steps" in printed(first)
    assert printed(second) == "completed 3 ['eval/accuracy', 'eval/accuracy_top5']\n"
    assert "did you mean model=mlp" in printed(third)
    assert "%%writefile my_file.py) and name my_file.MyModel" in printed(fifth)
    assert "Done: 3 steps" in printed(sixth)  # of a second run in the same kernel


def test_the_stop_button_ends_a_cell_with_everything_saved(project: Project) -> None:
    words = [*_WORDS, "trainer.max_epochs=100000"]
    again = f"print(ddp_train.run({[*_WORDS, 'trainer.max_steps=3']!r}).status)"
    client = notebook(project, f"import ddp_train\nddp_train.run({words!r})", again)

    async def press() -> None:
        async with client.async_setup_kernel():
            cell = asyncio.ensure_future(client.async_execute_cell(client.nb.cells[0], 0))
            await asyncio.to_thread(wait_for, lambda: cell.done() or any(map(is_training, project.runs())), _LIMIT_S)
            await client.km.interrupt_kernel()
            with pytest.raises(Exception, match="KeyboardInterrupt"):
                await cell
            await client.async_execute_cell(client.nb.cells[1], 1)

    asyncio.run(press())
    stopped, after = client.nb.cells
    result = (folder := RunFolder(min(project.runs()))).read_result()
    assert result is not None and result.status == "interrupted" and folder.saved_steps() == [result.step]
    assert f"stopped after step {result.step}, saved" in printed(stopped)
    assert printed(after).endswith("completed\n")
