"""The supervisor's side of a fork server (workers/fork_server.py). Called by a part's runner.

Promises: `start` answers with a process of the part or raises; a fork server that died is started anew at the next
`start`; `close` leaves none behind, and ends no process of the part.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.stack.process import Process, started_now

MODULE = "workers.fork_server"
END_S = 5.0


class ForkServer:
    """Of one part; `argv` is the part's module with its arguments. One thread calls it, but for `close`."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, fingerprint: str, patience_s: float
    ) -> None:
        self._argv, self._env, self._cwd, self._log = argv, env, cwd, log
        self._fingerprint, self._patience_s = fingerprint, patience_s
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def start(self) -> Process:
        """A new process of the part; blocks until the imports are done. Raises OSError where there is none, also after
        `patience_s` seconds."""
        if (pid := self._ask()) is None:
            self._let_go()
            self._launch()
            pid = self._ask()
        if pid is None:
            self._let_go()
            raise OSError("its fork server ended, or takes too long; its log says why")
        return started_now(pid, fingerprint=self._fingerprint)

    def exit_code(self) -> int | None:
        """Of the last process, which has ended; None where nobody knows."""
        if (line := self._line()).startswith("exit "):
            return int(line.removeprefix("exit "))
        server = self._server
        if server is None:
            return None
        # It was the part itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(END_S)
        return None

    def close(self) -> None:
        """Have it end; also while another thread waits in `start`, which then raises."""
        self._closed = True
        self._let_go()

    def _launch(self) -> None:
        if self._closed:
            raise OSError("it is being stopped")
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as output:
            server = subprocess.Popen(
                (sys.executable, "-m", MODULE, *self._argv),
                env=dict(self._env),
                cwd=self._cwd,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ours.settimeout(self._patience_s)
        self._server, self._socket = server, ours
        if self._closed:
            self._let_go()

    def _ask(self) -> int | None:
        """The pid of a new process; None where there is no fork server, or it is gone."""
        place = self._socket
        if place is None:
            return None
        with contextlib.suppress(OSError):
            place.sendall(b".")
            while line := self._line():
                if line.startswith("pid "):
                    return int(line.removeprefix("pid "))
        return None

    def _line(self) -> str:
        """Without its end; empty where there is none to come."""
        read, place = bytearray(), self._socket
        with contextlib.suppress(OSError):
            while place is not None and (byte := place.recv(1)):
                if byte == b"\n":
                    return read.decode()
                read += byte
        return ""

    def _let_go(self) -> None:
        server, place = self._server, self._socket
        self._server = self._socket = None
        if place is not None:
            with contextlib.suppress(OSError):
                place.shutdown(socket.SHUT_RDWR)
            place.close()
        if server is not None:
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
