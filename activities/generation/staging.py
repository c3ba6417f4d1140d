"""Weights on their way into an engine's memory, while it goes on: fetched in a thread, verified, then read in place.

Runs inside vLLM's worker, below its weight-transfer engine; imports nothing of vLLM. Promises: tensors come only from
bytes whose sha256 is the one that was asked for. A source is where the trainer offers weights
(activities/publication/offers.py): `unix:<socket>`, `http://<host>:<port>` or `file:<path>`, which is mapped.
"""

from __future__ import annotations

import hashlib
import http.client
import mmap
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.publication.offers import TCP, UNIX
from activities.publication.tensors import mapped, tensors_in

FILE = "file:"
PIECE = 1 << 20
CONNECT_S = 10.0


class Staging:
    """One set of weights: begun with the object, `ready` once verified, or `failed` with the reason."""

    def __init__(self, source: str, digest: str, size: int, bytes_per_s: float = 0.0) -> None:
        self._source, self.digest, self.size, self._bytes_per_s = source, digest, size, bytes_per_s
        self._buffer: bytearray | mmap.mmap | None = None
        self._dropped = threading.Event()
        self.failed = ""
        self.ready = False
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._dropped.set()
        self._buffer, self.ready = None, False

    def wait(self) -> None:
        self._thread.join()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Name and torch tensor of each, which lie in the staged memory."""
        assert self.ready and self._buffer is not None
        return tensors_in(self._buffer)

    def _run(self) -> None:
        try:
            buffer = self._mapped() if self._source.startswith(FILE) else self._received()
        except Exception as error:
            # Whatever it is, somebody waits for the word: memory that is not there, a peer that talks nonsense.
            self.failed = f"{type(error).__name__} {error}"
            return
        if not self._dropped.is_set():
            self._buffer, self.ready = buffer, True

    def _mapped(self) -> mmap.mmap:
        buffer = mapped(Path(self._source.removeprefix(FILE)))
        digest, view = hashlib.sha256(), memoryview(buffer)
        for start in range(0, len(buffer), PIECE):
            digest.update(view[start : start + PIECE])
        self._verify(len(buffer), digest.hexdigest())
        return buffer

    def _received(self) -> bytearray:
        connection = _connection(self._source)
        try:
            connection.request("GET", f"/{self.digest}")
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{self._source} answers {answer.status} {answer.reason}")
            buffer, digest, filled = bytearray(self.size), hashlib.sha256(), 0
            view, began = memoryview(buffer), time.monotonic()
            while filled < self.size and (count := answer.readinto(view[filled : filled + PIECE])):
                digest.update(view[filled : filled + count])
                filled += count
                self._hold_back(filled, began)
            self._verify(filled + len(answer.read(1)), digest.hexdigest())
            return buffer
        finally:
            connection.close()

    def _hold_back(self, sent: int, began: float) -> None:
        """Sleep for as long as the rate wants. Raises ValueError when nobody wants the weights any more."""
        ahead_s = sent / self._bytes_per_s - (time.monotonic() - began) if self._bytes_per_s else 0.0
        if self._dropped.wait(ahead_s) if ahead_s > 0 else self._dropped.is_set():
            raise ValueError("not wanted any more")

    def _verify(self, size: int, digest: str) -> None:
        if size != self.size or digest != self.digest:
            raise ValueError(f"{size} bytes of sha256 {digest[:12]}, not {self.size} of {self.digest[:12]}")


def _connection(source: str) -> http.client.HTTPConnection:
    if source.startswith(UNIX):
        return _UnixConnection(source.removeprefix(UNIX))
    host, _, port = source.removeprefix(TCP).rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=CONNECT_S)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
