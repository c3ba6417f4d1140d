"""The OpenAI-compatible endpoint of a worker: one listener on loopback, one key per attempt.

Promises: a key opens its own attempt and nothing else, and nothing any more once that is over; a program that hangs up
ends its call, down to the engine; of a program that calls without end only a few calls are read at a time, so that it
can take neither the worker's memory nor the engines from others. Beside `/v1/chat/completions` and `/v1/models` it has
`/sandbox/run`, behind the `sandbox` command that programs get. Held by the worker; used by the activity that runs the
program.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from activities.agents.chat import ApiError, ChatRequest
from activities.agents.session import AgentSession
from activities.generation.server import SERVED_NAME
from activities.generation.tool_calls import read_json

Result = TypeVar("Result")
log = logging.getLogger(__name__)
MOST_BYTES = 64 << 20
"""Of a request: a whole conversation."""
MOST_CALLS = 8
"""Of one attempt at once, of each kind: the others wait before they are read."""
OVER_S = 5.0


@dataclass(frozen=True)
class Access:
    """What a program is given: the address of the listener, and its key, which is a secret."""

    url: str
    key: str


@dataclass(eq=False)
class _Open:
    session: AgentSession
    context: contextvars.Context
    """Of the activity: what it calls reads from there which attempt it is."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    # Of two kinds, since a command may itself ask the policy.
    chats: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_CALLS))
    commands: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_CALLS))


class AgentEndpoint:
    """An async context manager. `host` is the address that it listens on, on a free port."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._open: dict[str, _Open] = {}
        """By the digest of the key."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_in_openais_shape])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        app.router.add_post("/sandbox/run", self._run)
        # A handler whose client hangs up is cancelled, and with it the engine's request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=OVER_S)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    @asynccontextmanager
    async def at_socket(self, path: Path) -> AsyncIterator[None]:
        """Also at a socket file, for the time of the block; whoever reaches the file may connect, and needs a key."""
        site = web.UnixSite(self._runner, str(path))
        await site.start()
        try:
            await asyncio.to_thread(path.chmod, 0o666)
            yield
        finally:
            await site.stop()

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[Access]:
        """The way in for one program; calls that are under way at the end of the block are ended."""
        key = f"sk-ratchet-{secrets.token_urlsafe(32)}"
        opened = self._open[_digest(key)] = _Open(session, contextvars.copy_context())
        try:
            yield Access(self.url, key)
        finally:
            del self._open[_digest(key)]
            for call in opened.calls:
                call.cancel()
            await asyncio.gather(*opened.calls, return_exceptions=True)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        opened = self._of(request)
        async with opened.chats:
            asked = ChatRequest.parse(await request.read())
            completion = await self._call(self._of(request), opened.session.chat(asked))
        if not asked.stream:
            return web.json_response(completion.body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in completion.chunks(usage=asked.includes_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._of(request)
        return web.json_response({"object": "list", "data": [_POLICY]})

    async def _model(self, request: web.Request) -> web.Response:
        self._of(request)
        if request.match_info["name"] != SERVED_NAME:
            raise ApiError(404, f"the only model here is {SERVED_NAME!r}", code="model_not_found")
        return web.json_response(_POLICY)

    async def _run(self, request: web.Request) -> web.Response:
        opened = self._of(request)
        async with opened.commands:
            try:
                body = read_json(await request.read())
                command, timeout_s = str(body["command"]), body.get("timeout_s")
                timeout_s = None if timeout_s is None else float(timeout_s)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ApiError(400, 'the body must be {"command": "..."}', code="invalid_request") from error
            out = await self._call(self._of(request), opened.session.run(command, timeout_s))
        answer = {"output": out.output, "exit_code": out.exit_code, "signal": out.signal, "timed_out": out.timed_out}
        return web.json_response(answer | {"seconds": out.command_s})

    async def _call(self, opened: _Open, doing: Coroutine[Any, Any, Result]) -> Result:
        """Await it in the activity's own context. Raises ApiError where the attempt ends meanwhile; the key has to be
        looked up anew after any wait, since a call that begins once the attempt is over would be nobody's."""
        call = asyncio.create_task(doing, context=opened.context)
        opened.calls.add(call)
        call.add_done_callback(opened.calls.discard)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise ApiError(503, "the episode is over", code="episode_over", type="server_error") from None
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            raise

    def _of(self, request: web.Request) -> _Open:
        """The attempt that the request's key opens. Raises ApiError, 401."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        opened = self._open.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if opened is None:
            raise ApiError(401, "no episode has this key", code="invalid_api_key", type="authentication_error")
        return opened


_POLICY = {"id": SERVED_NAME, "object": "model", "created": 0, "owned_by": "ratchet"}


def _digest(key: str) -> str:
    """Keys are looked up by it, so that how long that takes says nothing of them."""
    return hashlib.sha256(key.encode()).hexdigest()


@web.middleware
async def _in_openais_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _refused(error)
    except web.HTTPException as error:
        return _refused(ApiError(error.status, error.reason, code="invalid_request"))
    except Exception:
        log.exception("%s failed", request.path)
        return _refused(ApiError(500, "our own error; the worker's log has it", code="internal", type="server_error"))


def _refused(error: ApiError) -> web.Response:
    """With the word to OpenAI's clients that the same request would be refused again."""
    return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})
