"""What the words of a command show before anything of it is imported. Called by `__main__`."""

from __future__ import annotations

from collections.abc import Sequence

_STARTS_RANKS = ("resume", "evaluate", "predict", "doctor")
"""The commands that start ranks, in addition to the one without a name."""

_HERE = ("cluster=local", "cluster=cpu")
"""Presets whose ranks are processes of this machine. A login node, from which jobs go elsewhere, has few processors to give."""

_SHOWS_TEXT = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")


def starts_ranks(words: Sequence[str]) -> bool:
    """Tell, as far as the words show it, whether a command comes to start ranks on this machine when nothing is wrong with it.

    Where they do not show it, what ranks need is imported when they are started.
    """
    is_command = bool(words) and "=" not in words[0] and words[0][:1] not in ("-", "+", "~")
    shows_text = any(word.partition("=")[0] in _SHOWS_TEXT for word in words)
    is_elsewhere = any(word.startswith(("cluster=", "cluster.launcher=")) and word not in _HERE for word in words)
    return not shows_text and not is_elsewhere and (not is_command or words[0] in _STARTS_RANKS)
