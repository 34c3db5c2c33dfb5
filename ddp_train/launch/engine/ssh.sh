# Machine {index} ({host}) of the run {run}. Made by ddp-train, to be read.
# A bash there reads it from the line to the machine. Before it the line has the environment of the command, which is not kept here because
# it may hold secrets, and launch_id=..., which no other launch has.
no() {{ printf '{mark}no %s\n' "$1"; exit {refuses}; }}
cd {directory} 2>/dev/null || no 'does not have the current folder; fix: cd to a folder that all machines share'
[ -e {launch}/here_"$launch_id" ] && [ -w {launch} ] ||
    no "does not see the run folder, or cannot write to it; fix: cd to a folder that all machines share"
{setup}{code}command -v {python} >/dev/null || no 'does not have the Python of this command; fix: cluster.python=PATH'
exec {python} -m ddp_train.launch.engine.ssh_remote {spec} {index}
