"""`ddp-train export`: write the weights of a run into a file for other programs."""

import shlex
from pathlib import Path

from ddp_train.cli.saved_run import TRUST, ask_trust, parse_words, run_of
from ddp_train.errors import DONE, ConfigError, conflict
from ddp_train.launch.job_runner import JobRunner

USAGE = """ddp-train export RUN [--format=FORMAT] [to=PATH]

  RUN            the folder of a run: exports its newest good checkpoint; or one of its checkpoints, RUN/checkpoints/best
  --format       safetensors   one plain file with the model's weights (the default); no class of the run is instantiated
                 pt            a state_dict for torch.load(FILE, weights_only=True); likewise
                 dcp           a folder for torch.distributed.checkpoint: dcp.load({"model": model.state_dict()}, checkpoint_id=FOLDER)
                 hf            a folder for from_pretrained, if the model has save_pretrained
                 torch_export  a program for torch.export.load(FILE); traced with two samples of the evaluation data, for any number of them
                 onnx          a graph for other runtimes, traced likewise
  to=PATH        a new file, or a new folder for dcp and hf; default: RUN/export/model.safetensors, or with the suffix of the format
  --trust        allow code that another user has written to run as you; needed for hf, torch_export and onnx

Without ddp_train: model.load_state_dict(safetensors.torch.load_file(FILE)).
"""

_SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt", "dcp": "", "hf": "", "torch_export": ".pt2", "onnx": ".onnx"}
_BUILT = ("hf", "torch_export", "onnx")


def export(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train export RUN [--format=FORMAT] [to=PATH]`: write the weights of a run for others."""
    options, (run,) = parse_words(arguments, USAGE, {"--format": "FORMAT", "to": "PATH", TRUST: ""})
    path, format = Path(run), options.get("--format", "safetensors")
    if format not in _SUFFIXES:
        raise ConfigError(key="--format", happened=f"is {format!r}", expected=f"one of {', '.join(_SUFFIXES)}")
    folder = run_of(path, key="RUN")
    if format in _BUILT:
        ask_trust("export", arguments, folder)
    to = Path(options["to"]) if "to" in options else folder / "export" / f"model{_SUFFIXES[format]}"
    if to.exists():
        happened = f"{to} exists; nothing is written over"
        raise ConfigError(key="to", happened=happened, expected="a new path", fix=f"rm -r {shlex.quote(str(to))}, or to=PATH")
    if "to" in options and to.suffix != _SUFFIXES[format] and to.suffix in set(_SUFFIXES.values()) - {""}:
        meant = next(name for name, suffix in _SUFFIXES.items() if suffix == to.suffix)
        raise conflict("--format", f"is {format}, and to={to} looks like {meant}", meant)
    from ddp_train.training.inference import export as work  # imports torch, which no other part of the command needs

    for line in work.export(path, format=format, to=to):
        print(line.replace("FILE", str(to)))
    print(f"written  {to}")
    return DONE
