"""What scripts and other frameworks call things, and what is typed here: one table, all typed by tests/unit/config/test_field_words.py.

A value of the table is what to type, with `{}` for the value that was typed; or, by that value, several of them ("": any other one); or a
sentence that begins with `LEAVE_IT_OUT`.
"""

import shlex
from typing import Any

LEAVE_IT_OUT = "leave it out, "

_ALWAYS = f"{LEAVE_IT_OUT}it is always so"
_MACHINES = "cluster=machines cluster.nodes={} cluster.rendezvous_endpoint=node0:29400"
_HALF = {"fp16": "amp=fp16", "16": "amp=fp16", "16-mixed": "amp=fp16", "16-true": "amp=fp16", "half": "amp=fp16", "float16": "amp=fp16"}
_HALF |= dict.fromkeys(("bf16", "bf16-mixed", "bf16-true", "bfloat16"), "amp=bf16")
_HALF |= dict.fromkeys(("32", "32-true", "fp32", "float32", "no", "off"), "amp=off")

_KEYS = {
    "loader.micro_batch_size": "batch_size train_batch_size per_device_train_batch_size micro_batch batch bs",
    "loader.num_workers": "num_workers workers dataloader_num_workers",
    "loader.drop_last": "drop_last dataloader_drop_last",
    "trainer.global_batch_size": "global_batch total_batch_size",
    "trainer.max_epochs": "epochs num_epochs n_epochs max_epochs num_train_epochs",
    "trainer.max_steps": "steps num_steps max_steps max_iters iterations",
    "trainer.grad_accum_steps": "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps",
    "trainer.clip_grad_norm": "gradient_clip_val max_grad_norm grad_clip clip_grad clip_norm",
    "trainer.log_every_steps": "log_every_n_steps logging_steps log_every log_interval",
    "optimizer.lr": "lr learning_rate base_lr",
    "optimizer.weight_decay": "weight_decay wd",
    "scheduler.warmup_steps": "warmup_steps num_warmup_steps",
    "evaluation.batch_size": "eval_batch_size per_device_eval_batch_size val_batch_size",
    "evaluation.every_steps": "evaluate_every_steps eval_steps eval_every eval_interval val_check_interval",
    "evaluation.max_batches": "limit_val_batches",
    "checkpoint.every_steps": "save_every save_steps save_interval save_freq",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.keep_best": "save_top_k",
    "cluster.processes_per_node": "devices gpus num_gpus ngpus nproc_per_node num_processes gpus_per_node world_size",
    "cluster.max_restarts": "max_restarts",
    "strategy.find_unused_parameters": "find_unused_parameters",
    "strategy.static_graph": "static_graph",
    "strategy.bucket_cap_mb": "bucket_cap_mb",
    "strategy.gradient_as_bucket_view": "gradient_as_bucket_view",
    "strategy.sync_batchnorm": "sync_batchnorm sync_bn",
    "precision.cudnn_benchmark": "benchmark cudnn_benchmark",
    "objective.label_smoothing": "label_smoothing",
    "data.image_size": "imgsz img_size image_size",
    "data.root": "data_dir data_root",
    "debug.max_steps": "limit_train_batches",
    "hydra.run.dir": "output_dir out_dir save_dir default_root_dir",
    "resume": "resume_from_checkpoint ckpt_path resume_from",
    "name": "run_name experiment_name exp_name",
    "data": "dataset",
    "model": "arch",
    "optimizer": "optim",
}
"""What is typed here -> what others call it, where the value means the same."""

WORDS: dict[str, str | dict[str, str]] = {
    **{word: f"{key}={{}}" for key, words in _KEYS.items() for word in words.split()},
    **dict.fromkeys(("pin_memory", "persistent_workers", "non_blocking", "shuffle", "local_rank"), _ALWAYS),
    "momentum": "optimizer=sgd optimizer.momentum={}",
    "warmup_ratio": "scheduler.warmup_steps=100",
    "nnodes": {"1": "cluster.nodes=1", "": _MACHINES},
    "num_nodes": {"1": "cluster.nodes=1", "": _MACHINES},
    "num_machines": {"1": "cluster.nodes=1", "": _MACHINES},
    "node_rank": f"{_MACHINES.format(2)} cluster.node_rank={{}}",
    "machine_rank": f"{_MACHINES.format(2)} cluster.node_rank={{}}",
    "master_addr": "cluster=machines cluster.nodes=2 cluster.rendezvous_endpoint={}:29400",
    "master_port": "cluster=machines cluster.nodes=2 cluster.rendezvous_endpoint=node0:{}",
    "rdzv_endpoint": "cluster=machines cluster.nodes=2 cluster.rendezvous_endpoint={}",
    "backend": {"gloo": "cluster.device=cpu", "": "cluster.device=cuda"},
    "accelerator": {"cpu": "cluster.device=cpu", "auto": "cluster.device=auto", "": "cluster.device=cuda"},
    "device": {"cpu": "cluster.device=cpu", "auto": "cluster.device=auto", "": "cluster.device=cuda"},
    "precision": _HALF,
    "mixed_precision": _HALF,
    "amp": {"true": "amp=auto", "false": "amp=off"},
    "use_amp": {"false": "amp=off", "": "amp=auto"},
    "fp16": {"false": "amp=off", "": "amp=fp16"},
    "bf16": {"false": "amp=off", "": "amp=bf16"},
    "tf32": {"false": "precision.float32_matmul_precision=highest", "": "precision.float32_matmul_precision=high"},
    "compile": {"true": "compile=default", "false": "compile=off"},
    "torch_compile": {"false": "compile=off", "": "compile=default"},
    "gradient_checkpointing": {"false": "activation_checkpointing=off", "": "activation_checkpointing=full"},
    "strategy": {
        "ddp_find_unused_parameters_true": "strategy=ddp strategy.find_unused_parameters=true",
        **dict.fromkeys(("auto", "dp", "ddp_spawn", "ddp_notebook", "ddp_fork", "ddp_find_unused_parameters_false"), "strategy=ddp"),
        **dict.fromkeys(("deepspeed", "deepspeed_stage_1", "zero", "zero_1"), "strategy=zero1"),
        **dict.fromkeys(("deepspeed_stage_2", "deepspeed_stage_3", "fsdp2", "fsdp_native", "full_shard"), "strategy=fsdp"),
    },
    "fast_dev_run": {"false": "debug=none", "": "debug=fast"},
    "overfit_batches": "debug=overfit",
    "profiler": "profile=trace",
    "report_to": {"none": "metrics=[]", "tensorboard": f"{LEAVE_IT_OUT}it is always written", "": "metrics={}"},
    "lr_scheduler_type": {"linear": "scheduler=warmup_linear", "cosine": "scheduler=warmup_cosine", "": "scheduler={}"},
    "ema_decay": "callbacks=ema callbacks.ema.decay={}",
    "early_stopping_patience": "callbacks=early_stopping callbacks.early_stopping.patience={}",
    "patience": "callbacks=early_stopping callbacks.early_stopping.patience={}",
}
"""What others call it -> what is typed here. `-` in an option's name is `_` here."""


def instead_of(key: str, value: Any) -> str:
    """Return what to type, or say that there is nothing to type, for a key whose last part others use; "": none of the table."""
    typed = "" if value is None else {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    here = WORDS.get(key.rpartition(".")[2].lstrip("-").replace("-", "_"), "")
    if isinstance(here, dict):
        here = here.get(typed.lower(), here.get("", ""))
    if "{}" in here and not typed:
        return ""
    return here.format(shlex.quote(typed))
