"""What can change results besides code, data and configuration: packages, the processor, variables of math libraries. No torch."""

import json
import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLES = re.compile(r"(KMP|GOMP|MKL|DNNL|ONEDNN|OPENBLAS|ATEN|CUBLAS|CUDNN)_\w+|NCCL_(ALGO|PROTO)|NVIDIA_TF32_OVERRIDE")
_VECTORS = re.compile(r"avx|fma|f16c|amx|sse4|sve|asimd|neon|bf16|i8mm")  # by which torch, MKL and oneDNN choose their code


def software() -> dict[str, Any]:
    """Return the facts of this machine and interpreter for environment.json."""
    variables = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    facts = {"python": platform.python_version(), "platform": platform.platform(), "cpu": _cpu(), "variables": variables}
    packages, sources = dict[str, str](), dict[str, str]()
    for dist in metadata.distributions():
        head = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
        # By a pattern: email's parser takes six times as long.
        name, version = (re.search(rf"^{field}: *(.+?)\r?$", head, re.MULTILINE) for field in ("Name", "Version"))
        if name and version and name[1] not in packages:  # the first one on the path is imported
            packages[name[1]] = version[1]
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # only what comes from no index has this file (PEP 610)
                origin = json.loads(dist.read_text("direct_url.json") or "")
                kind = "editable " if origin.get("dir_info", {}).get("editable") else ""
                vcs, commit = (origin.get("vcs_info", {}).get(key, "") for key in ("vcs", "commit_id"))
                sources[name[1]] = f"{vcs}+{origin['url']}@{commit}" if vcs else f"{kind}{origin['url']}"
    return {**facts, "packages": dict(sorted(packages.items())), "package_sources": sources}


def _cpu() -> dict[str, Any]:
    lines: dict[str, str] = {}
    with suppress(OSError):  # Linux alone has it
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines())
        lines = {key.strip(): value.strip() for key, _, value in pairs}
    vectors = {flag for flag in (lines.get("flags") or lines.get("Features") or "").split() if _VECTORS.search(flag)}
    model = lines.get("model name") or platform.processor() or platform.machine()
    return {"model": model, "vectors": " ".join(sorted(vectors)), "cores": os.cpu_count()}
