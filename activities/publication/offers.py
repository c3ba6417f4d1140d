"""Weights that the trainer's machine hands to engines itself, and the server that does so.

An offer is one safetensors file in a local folder, named by its sha256: whoever knows the name knows what must come.
Promises: an offer appears whole or not at all; the folder is on a disk, so that a trainer that starts again, or a
machine, offers what it offered before. Written by `publish`, read by engines through activities/generation/staging.py:
over the server's socket, or as the file where they share the machine.
"""

from __future__ import annotations

import http.server
import os
import re
import socketserver
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from workflows.errors import StorageError

FOLDER = "offers"
"""In the trainer's spool."""
UNIX = "unix:"
TCP = "http://"
_DIGEST = re.compile(r"/[0-9a-f]{64}")


class Offers:
    """The folder of one machine's offers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def put(self, file: Path, digest: str) -> None:
        """Offer `file`, which is of this sha256 and is moved here; it must lie on the same disk."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(file)
        file.replace(self.path(digest))

    def keep_last(self, count: int) -> None:
        """Offer none but the newest any more. Who reads one that goes reads it to the end."""
        for path in sorted(self.folder.glob("*"), key=lambda item: item.stat().st_mtime, reverse=True)[count:]:
            path.unlink(missing_ok=True)


class OfferServer:
    """Answers `GET /<sha256>` with the offer, on a socket file (`unix:<path>`) or an address (`http://<host>:<port>`).

    A context manager. Whoever reaches it and knows a digest gets the weights: a socket file is its owner's alone, an
    address belongs in a private network. Raises StorageError (final) for an address that it can't have."""

    def __init__(self, address: str, offers: Offers) -> None:
        handler = type("Handler", (_Handler,), {"offers": offers})
        self._socket_file: Path | None = None
        try:
            if address.startswith(UNIX):
                self._socket_file = Path(address.removeprefix(UNIX))
                self._socket_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._socket_file.unlink(missing_ok=True)
                self._server: socketserver.BaseServer = _UnixServer(str(self._socket_file), handler)
                os.chmod(self._socket_file, 0o600)
                self._inode = self._socket_file.stat().st_ino
            else:
                host, _, port = address.removeprefix(TCP).rpartition(":")
                self._server = _TcpServer((host, int(port)), handler)
        except (OSError, ValueError) as error:
            raise StorageError(f"weights can't be offered at {address}: {error}", retryable=False) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="offers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        # One that came after may have taken the name.
        if self._socket_file and self._socket_file.exists() and self._socket_file.stat().st_ino == self._inode:
            self._socket_file.unlink(missing_ok=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    offers: Offers
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            if not _DIGEST.fullmatch(self.path):
                raise FileNotFoundError
            with self.offers.path(self.path[1:]).open("rb") as file:
                self.send_response(200)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                self.connection.sendfile(file)
        except FileNotFoundError:
            self.send_error(404, "not offered here")
        except OSError:
            # The engine went away in the middle: its own side says so.
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


class _TcpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
