"""`launcher.py PARENT COMMAND`: a shell command that ends, with all that it started, when the worker does.

Runs by its path, without the project's packages. SIGTERM, and the death of the process PARENT, kill the command's
session. Its exit code is the command's; 128 + n for one that signal n ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1


def main(parent: int, command: str) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    code = child.wait()
    # What it left in the background has nobody to work for.
    end(0, None)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
