"""An engine that says what a script says, over real HTTP: for rows whose boundary is not the engine.

It reads the row out of the prompt's tokens and the turn out of how often the assistant was prompted; everything around
that is as vLLM answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.generation.policies import CHATML, make_tokenizer
from workflows.contracts import EngineInfo

ROW = re.compile(r"Row ([\w-]+)\.")
REASONS = {200: "OK", 400: "Bad Request", 503: "Service Unavailable"}


class ScriptedEngine:
    """`scripts`: what is said per row, turn by turn; the last sentence is said again."""

    def __init__(self, scripts: Mapping[str, Sequence[str]], *, label: str) -> None:
        self.label = label
        self.scripts = scripts
        self.refuses: dict[str, int] = {}
        """Row -> HTTP status of its generations."""
        self.delay_s = 0.0
        self.running = asyncio.Event()
        """Cleared: requests in flight wait, as in an engine that is paused for new weights."""
        self.running.set()
        self.heard: dict[str, list[str]] = defaultdict(list)
        """Prompts per row, as text."""
        self.asked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Row -> its first generation was asked for."""
        self._tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match path:
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/inference/v1/generate":
                return await self._generate(body)
        return 400, {"error": {"message": f"no {path} here"}}

    async def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = self._tokenizer.decode(body["token_ids"])
        found = ROW.search(prompt)
        assert found is not None, prompt
        row, turn, began = found[1], prompt.count("<|im_start|>assistant") - 1, self.label
        self.heard[row].append(prompt)
        self.asked[row].set()
        if status := self.refuses.get(row):
            return status, {"error": {"message": "told to refuse"}}
        await asyncio.sleep(self.delay_s)
        await self.running.wait()
        says = self.scripts[row][min(turn, len(self.scripts[row]) - 1)]
        ids = [*self._tokenizer.encode(says, add_special_tokens=False), self._tokenizer.eos_token_id]
        half = len(ids) // 2
        spans = [{"version": began, "start": 0, "end": half}, {"version": self.label, "start": half, "end": len(ids)}]
        choice = {
            "finish_reason": "stop",
            "token_ids": ids,
            "weight_versions": spans,
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
        }
        return 200, {"choices": [choice], "usage": {}}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode().partition("?")[0]
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                status, answer = await self.answer(path, json.loads(body or b"{}"))
                data = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(engine: ScriptedEngine, name: str = "here-e0") -> AsyncIterator[EngineInfo]:
    """The engine on a port of its own."""
    server = await asyncio.start_server(engine._serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield EngineInfo(name=name, host="here", url=f"http://127.0.0.1:{port}")
    server.close()
