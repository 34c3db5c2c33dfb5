# Machine 1 (b) of the run "/shared/my run". Made by ddp-train, to be read.
# A bash there reads it from the line to the machine. Before it the line has the environment of the command, which is not kept here because
# it may hold secrets, and launch_id=..., which no other launch has.
no() { printf '\036ddp-train: no %s\n' "$1"; exit 78; }
cd /work 2>/dev/null || no 'does not have the current folder; fix: cd to a folder that all machines share'
[ -e '/shared/my run/launch'/here_"$launch_id" ] && [ -w '/shared/my run/launch' ] ||
    no "does not see the run folder, or cannot write to it; fix: cd to a folder that all machines share"
failed() { echo "$1" >&2; exit 1; }
trap "no 'failed in a line of cluster.setup; fix: try these lines with ssh HOST bash'" EXIT    # also by a line that exits
module load cuda
[ $? = 0 ] || failed 'cluster.setup failed: module load cuda'
trap - EXIT
export PYTHONPATH='/shared/my run/launch/code/src:/shared/my run/launch/code'"${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1   # the run's own code comes first
command -v /opt/python >/dev/null || no 'does not have the Python of this command; fix: cluster.python=PATH'
exec /opt/python -m ddp_train.launch.engine.ssh_remote '/shared/my run/launch/spec.json' 1
