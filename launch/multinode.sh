#!/usr/bin/env bash
# One of several machines, for schedulers and scripts that set torchrun's variables: the same line on each, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29400 launch/multinode.sh experiment=mnist_convnet data.root=FOLDER
# It is torchrun with these variables checked, and with the meeting that fits: static for a number of machines, where NODE_RANK counts; c10d
# for MIN:MAX, where machines come and go. `ddp-train cluster=machines "$@"` with the same variables does more: docs/multinode.md says what.
set -euo pipefail

explain() {
    cat >&2 <<'TEXT'
  NNODES          how many machines take part; 1:4 is elastic: at least one, at most four
  NODE_RANK       which one this is, from 0; another one on each
  MASTER_ADDR     name or address of machine 0, the same on each
  MASTER_PORT     a port that is free there, the same on each; another one for each run
  NPROC_PER_NODE  processes on each machine; left out: one per GPU, or two on CPU
  RESTARTS        how often a failed run starts again; left out: 0, of an elastic run 10
TEXT
    exit 2
}

require() {    # NAME PATTERN WHAT
    [[ ${!1-} =~ ^($2)$ ]] || { echo "$1 is '${!1-}': expected $3" >&2; explain; }
}

require NNODES '[1-9][0-9]*(:[1-9][0-9]*)?' 'a number of machines, or MIN:MAX'
require NODE_RANK '[0-9]+' 'a number from 0'
require MASTER_ADDR '[^[:space:]]+' 'the name or address of machine 0'
require MASTER_PORT '[1-9][0-9]*' 'a port'
require NPROC_PER_NODE '([1-9][0-9]*)?' 'a number of processes, or nothing'
require RESTARTS '[0-9]*' 'a number, or nothing'
unset "${!PET_@}"    # torchrun's own variables: what was said above counts

processes=${NPROC_PER_NODE:-$(python3 -c 'from ddp_train.system.devices import processes_per_node as count; print(count(None, "auto"))')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / processes > 0 ? $(nproc) / processes : 1))}
if [[ $NNODES == *:* ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # else torch waits for ever when a machine joins
    meet=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$MASTER_PORT")
    meet+=(--rdzv-conf="is_host=$((NODE_RANK == 0))" --max-restarts="${RESTARTS:-10}")
else
    meet=(--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts="${RESTARTS:-0}")
fi
exec torchrun --nnodes="$NNODES" --nproc-per-node="$processes" "${meet[@]}" -m ddp_train "$@"
