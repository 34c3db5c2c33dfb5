#!/usr/bin/env bash
# One of several machines, for schedulers and scripts that set torchrun's variables: the same line on each, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29400 launch/multinode.sh experiment=mnist_convnet data.root=FOLDER
# It is `ddp-train cluster=torchrun "$@"`, with these variables checked; docs/multinode.md has what else there is to say (cluster.*).
set -euo pipefail

explain() {
    cat >&2 <<'TEXT'
  NNODES          how many machines take part; 1:4 is elastic: at least one, at most four
  NODE_RANK       which one this is, from 0; another one on each
  MASTER_ADDR     name or address of machine 0, the same on each
  MASTER_PORT     a port that is free there, the same on each; another one for each run
  NPROC_PER_NODE  processes on each machine; left out: one per GPU, or two on CPU
TEXT
    exit 2
}

require() {    # NAME PATTERN WHAT
    [[ ${!1-} =~ ^($2)$ ]] || { echo "$1 is '${!1-}': expected $3" >&2; explain; }
    export "$1"
}

require NNODES '[1-9][0-9]*(:[1-9][0-9]*)?' 'a number of machines, or MIN:MAX'
require NODE_RANK '[0-9]+' 'a number from 0'
require MASTER_ADDR '[^[:space:]]+' 'the name or address of machine 0'
require MASTER_PORT '[1-9][0-9]*' 'a port'
require NPROC_PER_NODE '([1-9][0-9]*)?' 'a number of processes, or nothing'
unset PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_RDZV_ENDPOINT PET_MASTER_ADDR PET_MASTER_PORT    # what was said above counts

exec ddp-train cluster=torchrun "$@"
