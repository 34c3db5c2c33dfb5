"""All private names of torch that we use or replace, in one table, each with what is done where a version of torch lacks it.

Such names may go with any release. An agent and a rank call `missing` when they start, and print its lines. docs/versions.md
lists the tested versions. This module imports no torch: it inspects modules that are imported already.
"""

import sys
from collections.abc import Iterable

PASSED = ("2.10", "2.15")  # the oldest and the newest torch that the tests were run with (docs/versions.md)
PLAIN_AGENT = "cluster.agent=torch: torchrun's own agent"
_OWN_STEP = "torch's own AdamW takes the step"
_NO_COMPILE = "compile=off"
_NO_CHECKPOINTING = "activation_checkpointing=off"
_NONE = "no run without it: torch's own packages and many others use it"

_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent"
INTERNALS = {
    # launch/agent/elastic.py replaces the first three, and its agent has methods in the place of three, and reads the last two.
    f"{_ELASTIC}.multiprocessing.api._terminate_process_handler": PLAIN_AGENT,
    f"{_ELASTIC}.multiprocessing.api.get_subprocess_handler": PLAIN_AGENT,
    "torch.distributed.launcher.api.LocalElasticAgent": PLAIN_AGENT,
    **dict.fromkeys((f"{_AGENT}._start_workers", f"{_AGENT}._monitor_workers", f"{_AGENT}._shutdown"), PLAIN_AGENT),
    **dict.fromkeys((f"{_AGENT}._pcontext", f"{_AGENT}._remaining_restarts"), PLAIN_AGENT),
    "torch.autograd.graph._engine_run_backward": "loss.backward(), which costs 15 us and an import",
    "torch.autograd.Variable._execution_engine": _NONE,
    "torch.optim.optimizer._global_optimizer_pre_hooks": _OWN_STEP,
    "torch.optim.optimizer._global_optimizer_post_hooks": _OWN_STEP,
    "torch.autograd.profiler._is_profiler_enabled": _OWN_STEP,
    "torch._fused_adamw_": _OWN_STEP,
    "torch._foreach_add_": _OWN_STEP,
    "torch._foreach_mul_": _NONE,
    "torch._foreach_copy_": _NONE,
    "torch._foreach_lerp_": _NONE,
    "torch._C._current_graph_task_id": _NO_CHECKPOINTING,
    "torch._ops.OpOverload": _NO_CHECKPOINTING,
    "torch.utils._python_dispatch._disable_current_modes": _NO_CHECKPOINTING,
    "torch.utils._pytree.tree_map": _NONE,
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": _NO_COMPILE,
    "torch._inductor.config": _NO_COMPILE,
    "torch._inductor.async_compile.shutdown_compile_workers": _NO_COMPILE,
    "torch.nn.Module._call_impl": _NO_COMPILE,
    "torch.nn.Module._compiled_call_impl": _NO_COMPILE,
    "torch._dynamo.config": _NO_COMPILE,
    "torch._dynamo.list_backends": _NO_COMPILE,
    "torch._dynamo.callback.callback_handler": _NO_COMPILE,
    "torch._dynamo.utils.counters": _NO_COMPILE,
    "torch._dynamo.exc.TorchDynamoException": _NO_COMPILE,
    "torch.cuda._is_in_bad_fork": _NONE,
    "torch.cuda.memory._record_memory_history": "profile=trace: profile=memory is not there",
    "torch.cuda.memory._dump_snapshot": "profile=trace: profile=memory is not there",
    "torch.amp.grad_scaler.GradScaler._found_inf_per_device": "health.on_nonfinite=stop with amp=fp16",
    "torch.optim.AdamW._step_supports_amp_scaling": "the host reads one number in each step, with health.on_nonfinite=skip",
    "torch.distributed.ProcessGroup._get_backend": "strategy=ddp",
    "torch.UntypedStorage._cdata": "strategy=ddp",
    "torch.nn.modules.batchnorm._NormBase": _NONE,
    "torch.nn.modules.batchnorm._BatchNorm": _NONE,
    "torch.utils.data._utils.collate.default_collate_fn_map": _NONE,
    "torch.utils.data._utils.pin_memory.pin_memory": _NONE,
}
"""Dotted name -> what is done without; an attribute that a constructor sets has the name of its class. MKL's number of threads
(rank/forked.py) and the flight recorder's variables (watchdog/client.py) are no names of Python: without them threads are as torch
sets them, and there are no records."""

OF_AGENT = [name for name, without in INTERNALS.items() if without is PLAIN_AGENT]
OF_ADAMW = [name for name, without in INTERNALS.items() if without is _OWN_STEP]
OF_CHECKPOINTING = [name for name, without in INTERNALS.items() if without is _NO_CHECKPOINTING]


def missing(names: Iterable[str] = INTERNALS) -> list[str]:
    """Return a line for each of these names that this torch lacks, if its module is imported."""
    return [f"torch {_version()} has no {name}; instead: {INTERNALS[name]}" for name in names if _is_missing(name)]


def newer_than_passed() -> str:
    """Return a line where torch is newer than what the tests were run with; else ""."""
    installed = _version()
    numbers, passed = ([int(part) for part in version.split(".")[:2]] for version in (installed or "0.0", PASSED[1]))
    if numbers <= passed:
        return ""
    newest = f"{PASSED[1]}, the newest that the tests were run with"
    return f"{installed} is newer than {newest}; if an agent behaves oddly: cluster.agent=torch"


def _version() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def _is_missing(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (target := sys.modules.get(".".join(parts[:count]))) is None:
            continue
        if count < len(parts) - 1 and parts[count].lstrip("_").islower():  # one of torch's modules that was not imported; else a class
            return False
        for part in parts[count:]:
            if not hasattr(target, part):  # else the constructor sets it, of this class or of one that it extends
                inits = (getattr(vars(base).get("__init__"), "__code__", None) for base in getattr(target, "__mro__", ()))
                return not any(part in code.co_names for code in inits if code is not None)
            target = getattr(target, part)
        return False
    return False
