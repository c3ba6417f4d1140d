"""Processes and those that started them. Linux only; imports nothing heavy, since every child of vLLM imports it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
RANKED = "RATCHET_RANKED"
"""Set by workers/ranked.py: RANK and WORLD_SIZE are ours, and not those of a job that the stack was started in."""


def launched_rank() -> int | None:
    """This process's rank where our launcher started it; None elsewhere."""
    return int(os.environ["RANK"]) if RANKED in os.environ else None


def end_with_parent() -> None:
    """SIGKILL for this process when the parent dies, also if that happened just now."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
