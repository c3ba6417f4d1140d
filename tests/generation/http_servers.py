"""Real HTTP servers around in-memory engines: they listen on a port, and they die as a killed process does."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tests.generation.fakes import FakeEngine
from workflows.contracts import EngineInfo

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class HttpServer:
    """Answers with `handler` on a port of the loopback address."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        """As with kill -9: the port is closed and every connection reset, whatever is on it."""
        self._server.close()
        for writer, serving in self._open.items():
            writer.transport.abort()
            if serving is not None:
                serving.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = asyncio.current_task()
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode().strip().split("\r\n")
                method, path, _ = line.split(" ", 2)
                headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                answer = await self._handler(httpx.Request(method, self.url + path, headers=headers, content=body))
                status = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}\r\n"
                writer.write(f"{status}content-length: {len(answer.content)}\r\n\r\n".encode() + answer.content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            del self._open[writer]
            writer.close()


@asynccontextmanager
async def serving(*engines: FakeEngine) -> AsyncIterator[list[HttpServer]]:
    """The engines on ports of their own, which become their addresses."""
    async with AsyncExitStack() as stack:
        servers = []
        for engine in engines:
            server = HttpServer(engine.handle)
            await server.start()
            stack.callback(server.die)
            engine.info = EngineInfo(name=engine.info.name, host=engine.info.host, url=server.url)
            servers.append(server)
        yield servers


class ForwardingRouter:
    """Hashes a header over the engines and forwards the request, as session routers do. `drops` are fields of the
    answers' choices that it does not know of; `routes` are the paths that it has."""

    def __init__(self, engines: list[FakeEngine], *, header: str) -> None:
        self.engines, self.header = engines, header
        self.drops: list[str] = []
        self.routes = ["/inference/v1/generate"]
        self.forwarded: list[str] = []
        self.url = ""
        self._http = httpx.AsyncClient()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path not in self.routes:
            return httpx.Response(404, json={"detail": "Not Found"})
        key = request.headers[self.header]
        engine = self.engines[hashlib.sha256(key.encode()).digest()[0] % len(self.engines)]
        self.forwarded.append(engine.info.name)
        try:
            kept = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
            answer = await self._http.post(engine.info.url + path, content=request.content, headers=kept, timeout=30)
        except httpx.RequestError:
            return httpx.Response(503, json={"error": {"message": f"{engine.info.name} is gone"}})
        found = answer.json()
        for choice in found.get("choices", []):
            for name in self.drops:
                choice.pop(name)
        return httpx.Response(answer.status_code, json=found)

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def routing(router: ForwardingRouter) -> AsyncIterator[HttpServer]:
    server = HttpServer(router.handle)
    await server.start()
    try:
        yield server
    finally:
        server.die()
        await router.close()
