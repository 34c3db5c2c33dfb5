#!/usr/bin/env bash
# One machine: torchrun starts the ranks, global rank 0 composes. The same as `ddp-train "$@"`, with torchrun's own options at hand.
#   launch/local.sh experiment=mnist_convnet data.root=FOLDER
#   PROCESSES=4 launch/local.sh cluster=cpu
set -euo pipefail
# One process per GPU of CUDA_VISIBLE_DEVICES, or of the machine; two on CPU.
processes=${PROCESSES:-$(python3 -c 'from ddp_train.system.devices import processes_per_node as count; print(count(None, "auto"))')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / processes > 0 ? $(nproc) / processes : 1))}
exec torchrun --standalone --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" -m ddp_train "$@"
