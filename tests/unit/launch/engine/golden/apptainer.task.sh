#!/bin/bash
# ddp-train for this run, on one of its machines: after cluster.setup, with the run's interpreter, on the copy of its code.

# A signal that comes before Python listens waits until it does, where env can do that (coreutils 8.31).
block=(env --block-signal=USR1,TERM)
if [ "$1" = node ] && [ -z "$DDP_TRAIN_HOLDS" ] && "${block[@]}" true 2> /dev/null; then
    DDP_TRAIN_HOLDS=yes exec "${block[@]}" bash "$0" "$@"
fi
unset DDP_TRAIN_HOLDS

refuse() { echo "$(uname -n): $1" >&2; exit 78; }

cd /work || refuse 'the folder where the run was submitted is not here'
export PYTHONSAFEPATH=1 PYTHONPATH=/runs/mnist/launch/code/src:/runs/mnist/launch/code"${PYTHONPATH:+:$PYTHONPATH}"
command -v python > /dev/null || refuse 'python is not here: cluster.python names an interpreter that every machine has; cluster.setup can make it known'
exec python -m ddp_train "$@"
