#!/usr/bin/env bash
# One machine: torchrun starts the ranks, global rank 0 composes. The same as `ddp-train "$@"`, with torchrun's own options at hand.
#   launch/local.sh experiment=mnist_convnet data.root=FOLDER
#   PROCESSES=4 launch/local.sh cluster=cpu
set -euo pipefail
processes=${PROCESSES:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}     # one per GPU
[ "$processes" -gt 0 ] || processes=2                            # two on CPU
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / processes > 0 ? $(nproc) / processes : 1))}
exec torchrun --standalone --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" -m ddp_train "$@"
