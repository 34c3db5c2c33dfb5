"""`ddp-train prepare weights`: weights of others that only unpickling can read, as a file that `init_from` takes without."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ddp_train.errors import ConfigError

USAGE = """ddp-train prepare weights FOLDER to=FILE.safetensors --unpickle

  FOLDER         of torch.distributed.checkpoint (DCP), as torchtitan and FSDP scripts write them; its weights below "model", or all
  to             new file, for init_from= of the runs; one tensor at a time is in memory
  --unpickle     read the folder's metadata, a pickle: it runs whatever its writer has put there. Only for who trusts the writer
"""
_SHAPE = USAGE.partition("\n")[0]


def prepare_weights(arguments: Sequence[str]) -> None:
    """Write the weights of a DCP folder into a plain file.

    Raises:
        UserError: something is missing in what was typed, or the folder cannot be read.
    """
    unpickles = "--unpickle" in arguments
    places = [word.removeprefix("to=") for word in arguments if word.startswith("to=")]
    folders = [word for word in arguments if word != "--unpickle" and not word.startswith("to=")]
    if len(places) != 1 or len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(happened="no folder was given, or no to=FILE", expected=_SHAPE, fix="ddp-train prepare --help")
    folder, to = Path(folders[0]), Path(places[0])
    if not (folder / ".metadata").is_file():
        raise ConfigError(happened=f"{folder} is no folder of torch.distributed.checkpoint", expected="one with a file .metadata")
    if to.suffix != ".safetensors":
        raise ConfigError(key="to", happened=f"is {to}", expected="a new file.safetensors", fix=f"to={to.with_suffix('.safetensors')}")
    if to.exists():
        raise ConfigError(key="to", happened=f"{to} exists; nothing is written over", expected="a new path")
    if not unpickles:
        happened = f"is not given, and {folder / '.metadata'} is a pickle: to read it runs whatever its writer has put there"
        fix = f"ddp-train prepare weights {shlex.join(arguments)} --unpickle"
        raise ConfigError(key="--unpickle", happened=happened, expected="it, where you trust the writer", fix=fix)
    from ddp_train.training.inference.export import from_dcp  # imports torch

    for line in from_dcp(folder, to):
        print(line)
    print(f"written  {to}\nbegin    with it: init_from={shlex.quote(str(to))}")
