"""Whether a state has so few tensors that the files can name them: found out before the first step."""

from __future__ import annotations

from torch import Tensor

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.codec import leaf_of
from ddp_train.checkpoint.disk_space import kept_tensors
from ddp_train.checkpoint.snapshot import SHARED, divide_shared
from ddp_train.errors import ConfigError
from ddp_train.training.build import Components
from ddp_train.training.saved_state import modules


def require_few_tensors(components: Components, *, num_ranks: int) -> None:
    """Refuse a model and an optimizer whose tensors no checkpoint could name, those included that the optimizer makes in its first step.

    Raises:
        ConfigError: there are too many.
    """
    states = {part: module.state_dict().items() for part, module in modules(components).items()}
    model = {f"{part}.{name}": value for part, items in states.items() for name, value in items if isinstance(value, Tensor)}
    kept = kept_tensors(components.optimizer).items()
    optimizer = {f"optimizer.state.{number}.{name}": value for number, state in kept for name, value in state.items()}
    leaves = [leaf_of(f"{SHARED}.{name}", value) for name, value in (model | optimizer).items()]
    try:
        for pieces in divide_shared(leaves, num_ranks):
            tensor_file.make_header([(piece.name, piece.dtype, piece.shape) for piece in pieces])
    except tensor_file.TensorFileError as error:
        raise ConfigError(
            key="model",
            happened=f"{len(model):,} tensors of the model and {len(optimizer):,} of the optimizer are too many: {error.happened}",
            expected=f"{error.expected}, some 150,000 tensors for each rank's file",
            fix="layers or experts that are alike in one parameter, [EXPERTS, ...]; or more ranks, of which each writes a share",
        ) from None
