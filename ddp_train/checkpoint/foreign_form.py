"""The form of files with weights, told without reading one: before a run starts, and before they are read. Imports no torch."""

import re
import stat
import zipfile
from pathlib import Path
from typing import NoReturn

from ddp_train.checkpoint import catalog
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import RunFolder

_ENTRIES = 1_000_000  # tensors in a .pt file
_ENTRY = re.compile(  # what torch.save writes: the structure, the tensors, and a few words about both
    r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)


def require_known_form(path: Path) -> None:
    """Refuse as `init_from` what is no file of weights of a known form, no run and no checkpoint. Raises ConfigError."""
    if path.suffix == ".safetensors":
        size = require_regular(path)
        with path.open("rb") as file:
            if (header := int.from_bytes(file.read(8), "little")) > size - 8:
                refuse(path, f"its header would have {header:,} bytes, in a file of {size:,}")
    elif path.suffix in (".pt", ".pth") or (path.suffix == ".ckpt" and not path.is_dir()):
        require_archive(path)
    elif not catalog.is_checkpoint(path) and not RunFolder(path).checkpoints.is_dir():
        problem = "is not a file type that can be read safely" if path.exists() else "there is no such file or folder"
        if (path / ".metadata").exists():
            problem = "is a folder of torch.distributed.checkpoint, whose pickles can run code; if you trust it,"
            problem += f" `ddp-train prepare weights {path} to=FILE.safetensors --unpickle` converts its weights"
        expected = "a .safetensors, .pt, .pth or .ckpt file, a run folder, or one of its checkpoints"
        raise ConfigError(key="init_from", happened=f"{path}: {problem}", expected=expected)


def require_regular(path: Path) -> int:
    """Return the size of a file; refuse what is no regular one."""
    try:
        status = path.stat()
    except OSError as error:
        refuse(path, error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        refuse(path, "is not a regular file")
    return status.st_size


def require_archive(path: Path) -> None:
    """Refuse what `torch.save` does not write: other formats than its zip, compressed or overlapping entries, code."""
    num_bytes = require_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
        refuse(path, "is not in the format of torch 1.6 and later: not a zip archive (tar and bare pickle files are not read)")
    if any("/code/" in entry.filename or entry.filename.endswith("/constants.pkl") for entry in entries):
        refuse(path, "is a TorchScript archive, which holds code")
    if strange := [entry.filename for entry in entries if not _ENTRY.fullmatch(entry.filename)]:
        refuse(path, f"has an entry {strange[0]!r}, which torch.save does not write")
    if len(entries) > _ENTRIES or len({entry.filename for entry in entries}) < len(entries):
        refuse(path, "has the same entry twice, or too many of them")
    unpacked = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or unpacked > num_bytes:
        refuse(path, f"would unpack to {unpacked:,} bytes from {num_bytes:,}: torch.save compresses nothing")


def refuse(path: Path, why: str) -> NoReturn:
    """Refuse a file as weights to begin with."""
    expected = "only tensors, as safetensors or torch.save writes them; or a dict of them under `model`, `state_dict`, `model_state_dict`"
    fix = "if you trust the file, save its weights as safetensors: safetensors.torch.save_file(weights, FILE)"
    raise ConfigError(key="init_from", happened=f"{path}: {why}", expected=expected, fix=fix)
