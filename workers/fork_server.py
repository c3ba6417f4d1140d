"""`python -m workers.fork_server MODULE [ARGUMENT ...]`: has imported what a part needs, and forks the part.

A part that dies is back as fast as a process can be copied: what costs it seconds of a busy core, its imports, has been
done. Started by the supervisor (workers/stack/forking.py) with a socket as its standard input: for each byte that it
reads it makes one process of the part and answers with two lines, `pid <n>` and, once that has ended, `exit <code>`.
It ends with the socket, but not before the process that it made.

MODULE has `main()`, which is the part, and `preload(arguments)`. Promises: only a process of one thread is copied,
since threads don't come along; where the imports have started some, this process becomes the part itself, as it would
be without a fork server.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import socket
import sys
import tempfile
from contextlib import suppress
from types import ModuleType


def main() -> None:
    module, arguments = importlib.import_module(sys.argv[1]), sys.argv[2:]
    supervisor = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    module.preload(arguments)
    gc.collect()
    # Collections would write to every object, and to the pages that parent and children share.
    gc.freeze()
    with suppress(BrokenPipeError, ConnectionResetError):
        while supervisor.recv(1):
            if not alone():
                supervisor.sendall(f"pid {os.getpid()}\n".encode())
                become(module, arguments)
            pid = os.fork()
            if pid == 0:
                supervisor.close()
                os.setsid()
                become(module, arguments)
            supervisor.sendall(f"pid {pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            supervisor.sendall(f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
    # Nothing is left to do, and taking large libraries apart takes time.
    os._exit(0)


def alone() -> bool:
    """Whether this process has no other thread, also none that Python does not know."""
    return len(os.listdir("/proc/self/task")) == 1


def become(module: ModuleType, arguments: list[str]) -> None:
    """Be the part, to the end."""
    sys.argv = [module.__name__, *arguments]
    tempfile.tempdir = None
    random.seed()
    code = 0
    try:
        module.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
