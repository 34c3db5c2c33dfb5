"""OpenSSH between the hosts: a server on each, and keys that live as long as the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.machine import need, need_root

_SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
"""
_CLIENT = """
Host node*
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  ConnectTimeout 5
  LogLevel ERROR
"""
# The client looks for ~/.ssh in the user's home, whatever HOME says, and then into /etc: there lies the bed's configuration.
_INSTALL = """
mkdir -p /run/sshd
mount --bind "$1/ssh_config" /etc/ssh/ssh_config
if [ -d ~/.ssh ]; then mount -t tmpfs tmpfs ~/.ssh; fi
/usr/sbin/sshd -f "$1/sshd_config" -E "$1/sshd.$(hostname).log"
"""


class SshHosts(Hosts):
    """Hosts on each of which `ssh NAME COMMAND` reaches all others, as the same user. Nothing of this machine's own SSH is used."""

    def __init__(self, folder: Path, count: int) -> None:
        need_root()
        need("sshd", "ssh")
        for name in ("key", "host_key"):
            _make_key(folder / name)
        host_key = (folder / "host_key.pub").read_text()
        (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
        (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
        (folder / "known_hosts").write_text("".join(f"node{host},{self.address(host)} {host_key}" for host in range(count)))
        super().__init__(folder, count)

    def boot(self, host: int) -> None:
        """Turn a host on, with its server."""
        super().boot(host)
        self[host].must("sh", "-euc", _INSTALL, "install", str(self.folder))


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL)
