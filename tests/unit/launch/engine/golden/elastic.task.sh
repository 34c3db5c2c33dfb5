#!/bin/bash
# ddp-train for this run, on one of its machines: after cluster.setup, with the run's interpreter, on the copy of its code.

# A signal that comes before Python listens waits until it does, where env can do that (coreutils 8.31).
block=(env --block-signal=USR1,TERM)
if [ "$1" = node ] && [ -z "$DDP_TRAIN_HOLDS" ] && "${block[@]}" true 2> /dev/null; then
    DDP_TRAIN_HOLDS=yes exec "${block[@]}" bash "$0" "$@"
fi
unset DDP_TRAIN_HOLDS

refuse() { echo "$(uname -n): $1" >&2; exit 78; }

cd /work || refuse 'the folder where the run was submitted does not exist on this machine'
export PYTHONSAFEPATH=1 PYTHONPATH=/runs/mnist/launch/code/src:/runs/mnist/launch/code"${PYTHONPATH:+:$PYTHONPATH}"
command -v /opt/python > /dev/null || refuse '/opt/python is not on this machine; set cluster.python to one that every machine has, or load it in cluster.setup'
exec /opt/python -m ddp_train "$@"
