"""The far end of a line: runs the node program on a machine that was reached by SSH, and lets nothing outlive the line.

SSH tells a program without a terminal neither of Ctrl-C nor that the other end is gone. So the client speaks to this process on its
standard input, line by line: `go LAUNCH_ID` begins the run, `signal NUMBER` passes one on, `alive` comes twice a second. When it ends or
is silent, the node program gets SIGHUP, as at a terminal that is closed: it saves and ends.

What the node program prints passes through here, too: whoever writes into a line that is broken would fail before anything is saved.
"""

import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, shell_code
from ddp_train.system.process import STOP_SIGNALS, die_with_parent

MARK = "\x1eddp-train: "  # begins a line that is for the client, and not for the terminal
READY = f"{MARK}ready"  # this machine waits for `go`
_NEEDED = ("torch", "hydra", "omegaconf", "numpy", "tensorboard", "rich", "xxhash")  # by a node program and its ranks, whatever they train
SILENT_S = 15.0  # a line that is silent for so long is broken


def main(arguments: list[str]) -> int:
    """Wait for `go`, run the node program of a spec and a machine's number to its end, and return its exit code."""
    spec, index = arguments
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{sys.executable} has no {', '.join(missing)}", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    os.write(1, f"{READY}\n".encode())
    words = _words()
    word, _, launch_id = next((text for text in words if text != "alive"), "").partition(" ")  # `alive`: other machines take longer
    if word != "go":
        return DONE  # another machine cannot take part
    command = [sys.executable, "-m", "ddp_train", "node", spec, f"--index={index}", f"--launch={launch_id}"]
    node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_prepare)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: node.send_signal(number))
    is_broken = threading.Event()  # the line to the client
    assert node.stdout is not None and node.stderr is not None
    pipes = ((node.stdout.fileno(), 1, is_broken), (node.stderr.fileno(), 2, is_broken))
    pumps = [threading.Thread(target=_pass_on, args=pipe, daemon=True) for pipe in pipes]
    for thread in (threading.Thread(target=_obey, args=(words, node, is_broken), daemon=True), *pumps):
        thread.start()
    code = node.wait()
    for pump in pumps:
        pump.join(5)
    return shell_code(code)


def _prepare() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until it listens (`launch.signals.keep_early_stops`)


def _obey(words: Iterator[str], node: subprocess.Popen[bytes], is_broken: threading.Event) -> None:
    for text in words:
        word, _, number = text.partition(" ")
        if word == "signal":
            node.send_signal(int(number))
    is_broken.set()
    node.send_signal(signal.SIGHUP)


def _pass_on(source: int, target: int, is_broken: threading.Event) -> None:
    """Write what comes from the node program to the client, as long as the client is connected."""
    os.set_blocking(target, False)
    while data := os.read(source, 1 << 16):
        while data:
            try:
                if select.select([], [target], [], 1.0)[1]:
                    data = data[os.write(target, data) :]
                elif is_broken.is_set():
                    break
            except BlockingIOError:
                continue
            except OSError:
                break


def _words() -> Iterator[str]:
    """Yield the lines that come from the client, until the line ends or is silent."""
    text = b""
    while select.select([0], [], [], SILENT_S)[0] and (read := os.read(0, 4096)):
        *lines, text = (text + read).split(b"\n")
        yield from (line.decode() for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
