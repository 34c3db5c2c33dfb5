"""OpenSSH as an engine: node programs on machines that this one reaches by `ssh HOST`.

It uses the ssh that people type, with their own ~/.ssh/config: users, ports, keys and jump hosts stand there. Each machine gets a short
script for bash on its standard input (RUN/launch/ssh_0.sh ...), so that nothing is quoted for a login shell that nobody knows. A client
process (`ssh_client`) holds the lines, and the run ends when it does.
"""

import json
import os
import shlex
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_train.errors import ENVIRONMENT_REFUSES, ConfigError, EnvironmentRefuses
from ddp_train.launch.engine.engine import Engine, Rendered, Stage, State, Submission, setup_lines
from ddp_train.launch.engine.ssh_client import Remote, run_client
from ddp_train.launch.engine.ssh_remote import MARK
from ddp_train.launch.signals import stop_signals
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import verdict_of
from ddp_train.system.process import Child, fork, is_alive, start_of

OPTIONS = (
    "BatchMode=yes",  # asks for no password: nobody would see it
    "ConnectTimeout=15",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",  # a machine that is silent for 15 seconds is gone
    "ClearAllForwardings=yes",  # those of the user's configuration are for people
    "RequestTTY=no",
)

_SETUP = """\
failed() {{ echo "$1" >&2; exit 1; }}
trap "no 'failed in a line of cluster.setup; fix: try these lines with ssh HOST bash'" EXIT    # also by a line that exits
{}
trap - EXIT
"""
_CODE = 'export PYTHONPATH={}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1   # the run\'s own code comes first\n'


class Ssh(Engine):
    """Runs that live as long as their client on this machine."""

    def __init__(self) -> None:
        self._clients: dict[str, Child] = {}

    def render(self, specs: Sequence[Spec]) -> Rendered:
        """Return each machine's script, and the `ssh` that it is fed to."""
        files, commands = {}, []
        for spec in specs:
            for index, host in enumerate(spec.job.config.cluster.hosts or ()):
                files[spec.job.run_folder.launch / f"ssh_{index}.sh"] = _script(spec, index, host.name)
                commands.append(ssh_command(host.name))
        return Rendered(files=files, commands=commands, run_folders=[spec.job.run_folder.root for spec in specs])

    def submit(self, rendered: Rendered) -> str:
        if len(rendered.run_folders) != 1:
            raise ConfigError(key="cluster", happened="is ssh, which runs one job at a time", expected="one run in each command")
        run_folder = RunFolder(rendered.run_folders[0])
        rendered.write()
        spec = Spec.read(run_folder.spec)
        hosts = [host.name for host in spec.job.config.cluster.hosts or ()]
        remotes = [Remote(*each) for each in zip(hosts, rendered.commands, rendered.files.values(), strict=True)]
        read_end, write_end = os.pipe()

        def run_forked_client() -> int:
            os.close(write_end)
            os.read(read_end, 1)  # until the folder says that we have the run
            try:
                return run_client(run_folder, remotes, least=spec.min_nodes)
            finally:  # another login node cannot see that this process has ended
                if (submission := Submission.read(run_folder)) is not None and submission.id == _id(os.getpid()):
                    run_folder.submitted.unlink(missing_ok=True)

        try:
            client = fork(run_forked_client)
            id = _id(client.pid)
            self._clients[id] = client
            Submission(engine="ssh", id=id).write(run_folder)
        finally:
            os.close(write_end)
            os.close(read_end)
        return id

    def state(self, id: str) -> State:
        """Return the state of a submission, which runs while its client does."""
        host, pid, start = _client(id)
        if host != socket.gethostname():
            return State(stage=Stage.RUNNING, why=f"its client is on {host}", is_sure=False)
        if (client := self._clients.get(id)) is not None:
            has_ended = client.exit_code() is not None
        else:
            has_ended = not is_alive(pid) or start_of(pid) != start
        return State(stage=Stage.ENDED if has_ended else Stage.RUNNING)

    def stop(self, id: str, *, at_once: bool = False) -> None:
        """Tell the client, which tells the machines. EnvironmentRefuses: it is on another machine."""
        host, pid, start = _client(id)
        if host != socket.gethostname():
            fix = f"run the same command on {host}; if that machine is down, the run saves and stops by itself"
            raise EnvironmentRefuses(happened=f"the run's client is on {host}", fix=fix)
        if start_of(pid) == start:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT if at_once else signal.SIGUSR1)  # that one may come again, and still lets it save

    def follow(self, run_folder: RunFolder, id: str) -> int:
        """Wait until a run that this process has submitted has ended, passing on what this process is told, and return its exit code."""
        client = self._clients[id]
        with stop_signals(client.signal, lambda: client.signal(signal.SIGQUIT)):
            code = client.wait()
        return verdict_of(run_folder).exit_code if run_folder.cancelled.exists() else code  # `ddp-train cancel`, in another shell


def ssh_command(host: str) -> list[str]:
    """Return the ssh command that starts a bash on a machine, which reads commands."""
    return ["ssh", *(word for option in OPTIONS for word in ("-o", option)), "--", host, "exec bash"]


def _script(spec: Spec, index: int, host: str) -> str:
    cluster, run_folder = spec.job.config.cluster, spec.job.run_folder
    template = Path(__file__).with_name("ssh.sh").read_text(encoding="utf-8")
    return template.format(
        index=index,
        run=json.dumps(str(run_folder.root)),  # a comment is one line
        host=host,
        mark=MARK.replace("\x1e", "\\036"),
        refuses=ENVIRONMENT_REFUSES,
        setup=_SETUP.format("\n".join(setup_lines(cluster.setup, refuse="failed"))) if cluster.setup else "",
        code=_CODE.format(shlex.quote(spec.code.python_path())) if spec.code is not None else "",
        directory=shlex.quote(spec.working_directory),
        launch=shlex.quote(str(run_folder.launch)),
        python=shlex.quote(cluster.python or str(spec.engine_options["python"])),
        spec=shlex.quote(str(run_folder.spec)),
    )


def _id(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{start_of(pid)}"


def _client(id: str) -> tuple[str, int, str]:
    host, pid, start = id.rsplit(":", 2)
    return host, int(pid), start


ENGINE: Engine = Ssh()
