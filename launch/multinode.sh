#!/usr/bin/env bash
# One of several machines: run the same line on each. Machine 0 (ENDPOINT's host) may start last.
# NODES=1:4 is elastic; RESTARTS=3 starts a failed run again from its newest checkpoint.
#   NODES=2 ENDPOINT=node0:29400 launch/multinode.sh experiment=mnist_convnet data.root=FOLDER
set -euo pipefail
: "${NODES:?how many machines take part}" "${ENDPOINT:?HOST:PORT of machine 0, the same on every machine}"
processes=${PROCESSES:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}
[ "$processes" -gt 0 ] || processes=2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / processes > 0 ? $(nproc) / processes : 1))}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # a store for each attempt: torch's shared one hangs when machines come or go
exec torchrun --nnodes="$NODES" --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="$ENDPOINT" --rdzv-id="${RUN_ID:-ddp_train}" -m ddp_train "$@"
