"""What a model is made of, as a table for people: `summary`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def layer_table(model: nn.Module, *, depth: int) -> list[str]:
    """Return the lines of a table: each part of the model down to `depth` levels, its class, and how many parameters it has and trains.

    Shapes are those of a part's own parameters. One that an earlier part has too (tied weights) is named after it, and counted in both.
    """
    rows = [("layer", "class", "parameters", "trained", "shapes"), *_rows(model, depth)]
    layer, kind, count, trained = (max(len(row[column]) for row in rows) for column in range(4))
    return [f"{row[0]:<{layer}}  {row[1]:<{kind}}  {row[2]:>{count}}  {row[3]:>{trained}}  {row[4]}".rstrip() for row in rows]


def _rows(model: nn.Module, depth: int) -> Iterator[tuple[str, str, str, str, str]]:
    owners: dict[int, str] = {}  # the id of a parameter -> the name under which it was listed
    for path, module in model.named_modules():
        level = path.count(".") + 1 if path else 0
        own = [(name, parameter) for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)]
        if level > depth or (level == 0 and not own):
            continue
        shapes = []
        for name, parameter in own:
            full = f"{path}.{name}".lstrip(".")
            owner = owners.setdefault(id(parameter), full)
            shapes.append(f"{name} {list(parameter.shape)}" if owner == full else f"{name} = {owner}")
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
        name = "  " * (level - 1) + path.rpartition(".")[2] if path else "(itself)"
        counts = (f"{sum(sizes):,}", f"{sum(trained):,}") if parameters else ("", "")
        yield name, type(module).__name__, *counts, ", ".join(shapes)
