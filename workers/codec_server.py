"""`ratchet codec`: opens sealed payloads for the `temporal` command and the Temporal UI, on this machine only.

Speaks the remote codec protocol: POST /encode and /decode with a JSON body of payloads. Listens on the loopback
address; who may run programs on this machine may ask it, so it runs for as long as somebody looks. A web page may ask
only where it is the stack's own UI, and no other name than this machine's is answered to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf import json_format
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.converter import PayloadCodec

from workers.stack.state import LOOPBACK
from workflows.errors import InvalidConfig

MOST_BYTES = 8 << 20
NAMES = (LOOPBACK, "localhost")


class CodecServer(ThreadingHTTPServer):
    """`ui_port`: of the UI whose pages may ask. Port 0: any free one."""

    daemon_threads = True

    def __init__(self, codec: PayloadCodec, port: int, ui_port: int) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.origins = {f"http://{name}:{ui_port}" for name in NAMES}
        self.ways: dict[str, Callable[[Sequence[Payload]], Awaitable[list[Payload]]]] = {
            "/encode": codec.encode,
            "/decode": codec.decode,
        }

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: CodecServer

    def do_OPTIONS(self) -> None:
        self._answer(204 if self._allowed() else 403, b"")

    def do_POST(self) -> None:
        way = self.server.ways.get(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if way is None or not self._allowed() or not 0 < length <= MOST_BYTES:
            self._answer(403 if way is not None else 404, b"")
            return
        try:
            given = json_format.Parse(self.rfile.read(length), Payloads())
            done = Payloads(payloads=asyncio.run(_asked(way, given.payloads)))
        except (json_format.ParseError, InvalidConfig, ValueError) as error:
            self._answer(400, str(error).encode())
            return
        self._answer(200, json_format.MessageToJson(done).encode())

    def _allowed(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")[0]
        return name in NAMES and self.headers.get("Origin") in (None, *self.server.origins)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if (origin := self.headers.get("Origin")) in self.server.origins:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Headers", "content-type,x-namespace")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a log would only say that somebody looked."""


async def _asked(
    way: Callable[[Sequence[Payload]], Awaitable[list[Payload]]], payloads: Sequence[Payload]
) -> list[Payload]:
    return await way(payloads)
