"""An engine as the client sees it, in memory: labels, a pause, a prefix cache, weights that are a number.

Its tokens are 65 + (prompt length + i) % 26, each with log-probability -0.01 * (weights + 1), until `end` would come.
Cached is the longest beginning that a prompt shares with a sequence of the same salt: blocks of one token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file

from activities.generation.engine import EngineClient
from activities.publication.checksums import checksums_of_file
from workflows.contracts import EngineInfo


class FakeEngine:
    """`weights` is what a reload reads from `<folder>/weights.txt`."""

    def __init__(self, name: str = "local-e0") -> None:
        self.info = EngineInfo(name=name, host="local", url=f"http://{name}")
        self.label = "default"
        self.names = ["policy"]
        self.weights = 0
        self.facts: dict[str, Any] = {"engine": "vllm", "dtype": "float32"}
        """How it says that it serves."""
        self.given: dict[str, str] = {}
        """Checksums of the last load's tensors."""
        self.paused = False
        self.asleep = False
        self.pauses: list[tuple[str, str]] = []
        """(mode, clear_cache) of each pause."""
        self.staged: dict[str, Any] | None = None
        """What was asked to be staged last; it is exchanged where its source is a file."""
        self.staging_fails = ""
        self.running = 0
        self.held: asyncio.Event | None = None
        """Generations wait for it."""
        self.down = False
        self.calls: list[str] = []
        self.methods: list[str] = []
        """Of the calls of `/collective_rpc`."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """Of the generations, as `requests`."""
        self.cache: set[tuple[str | None, tuple[int, ...]]] = set()
        """(salt, sequence)"""
        self.pressure = {"kv_cache_usage_perc": 0.1, "num_preemptions_total": 0.0}
        self.pressure |= {"num_requests_waiting": 0.0, "num_requests_running": 0.0}
        self.slices, self.prepared = 0, 0
        """Of how many slices it needs to make weights ready before a pause, 0 where it can't; how many are done."""
        self.unfit = ""
        """Why it gives that up."""
        self.keep_cache = False
        self.stale_reload = False
        self.fail: dict[str, int] = {}
        """Path, or method of `/collective_rpc`, -> status of its next answers."""
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """Replaces the choice of the next generations."""
        self.delay_s = 0.0
        self.on_generate: Callable[[], None] = lambda: None
        self.on_reload: Callable[[], None] = lambda: None
        self.on_call: Callable[[], None] = lambda: None

    def client(self) -> EngineClient:
        return EngineClient(self.info, transport=httpx.MockTransport(self.handle))

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if self.down:
            raise httpx.ConnectError("connection refused", request=request)
        for told in (path, json.loads(request.content or b"{}").get("method")):
            if told in self.fail:
                error = {"message": f"told to fail {told}"}
                return httpx.Response(self.fail[told], json={"error": error})
        if path == "/metrics":
            lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in self.pressure.items()]
            return httpx.Response(200, text="\n".join(["# HELP vllm:num_requests_waiting Waiting.", *lines]))
        body = json.loads(request.content) if request.content else {}
        self.on_call()
        await asyncio.sleep(0)
        if "method" in body:
            self.methods.append(body["method"])
        if path == "/inference/v1/generate":
            self.headers.append(dict(request.headers))
        return httpx.Response(200, json=await self._answer(path, body | dict(request.url.params)))

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/weight_info":
                return {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/v1/models":
                return {"data": [{"id": name} for name in self.names]}
            case "/pause":
                self.pauses.append((body["mode"], body["clear_cache"]))
                self.paused = True
                while body["mode"] == "wait" and self.running:
                    await asyncio.sleep(0.01)
                if not self.keep_cache and body["clear_cache"] == "true":
                    self.cache.clear()
            case "/start_weight_update":
                self.staged = None
            case "/update_weights":
                self.staged = body["update_info"]
            case "/finish_weight_update":
                assert self.paused and self.staged, "an exchange under running requests, or of nothing"
                self.on_reload()
                path = Path(self.staged["source"].removeprefix("file:"))
                self.weights, self.given = int(load_file(path)["embed"][0, 0]), checksums_of_file(path)
            case "/sleep":
                self.asleep = True
            case "/wake_up":
                self.asleep = False
            case "/is_sleeping":
                return {"is_sleeping": self.asleep}
            case "/collective_rpc" if body["method"] == "ratchet_forget":
                self.prepared = 0
                return {"results": [{}]}
            case "/collective_rpc" if body["method"] == "ratchet_prepare":
                if not self.slices:
                    return {"results": [{"ready": False, "why": "nothing is packed here", "longest_s": 0}]}
                self.prepared += 1
                return {"results": [{"ready": self.prepared >= self.slices, "why": self.unfit, "longest_s": 0.05}]}
            case "/collective_rpc" if body["method"] == "ratchet_exchange":
                assert self.paused, "an exchange under running requests"
                if self.prepared < self.slices:
                    return {"results": [{"why": "none are made ready"}]}
                self._take(Path(body["kwargs"]["path"]))
                return {"results": [{"why": ""}]}
            case "/collective_rpc" if body["method"] == "ratchet_staged":
                digest = self.staged["digest"] if self.staged else ""
                return {"results": [{"ready": not self.staging_fails, "failed": self.staging_fails, "digest": digest}]}
            case "/resume":
                self.paused = False
            case "/collective_rpc" if body["method"] == "ratchet_reload":
                assert self.paused, "a reload under running requests"
                self._take(Path(body["kwargs"]["path"]))
                return {"results": [{}]}
            case "/collective_rpc" if body["method"] == "ratchet_checksums":
                return {"results": [{"given": self.given, "held": []}]}
            case "/collective_rpc" if body["method"] == "ratchet_serving":
                return {"results": [self.facts]}
            case "/collective_rpc":
                return {"results": [{"digest": f"digest of {self.weights}"}]}
            case "/inference/v1/generate":
                return await self._generate(body)
        return {}

    def _take(self, folder: Path) -> None:
        self.on_reload()
        if not self.stale_reload:
            self.weights = int((folder / "weights.txt").read_text())
        self.given = checksums_of_file(folder / "model.safetensors")

    def score(self, token: int) -> float:
        return -0.01 * (self.weights + 1) - token / 1000

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        while self.paused:
            await asyncio.sleep(0.01)
        self.running += 1
        try:
            self.on_generate()
            await asyncio.sleep(self.delay_s)
            if self.held is not None:
                await self.held.wait()
        finally:
            self.running -= 1
        prompt, sampling = body["token_ids"], body["sampling_params"]
        ids = [65 + (len(prompt) + index) % 26 for index in range(sampling["max_tokens"])]
        salt = body.get("cache_salt")
        cached = self._cached(salt, prompt)
        choice = {
            "finish_reason": "length",
            "token_ids": ids,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [{"logprob": self.score(token)} for token in ids]},
        }
        if self.answer is not None:
            choice |= self.answer(body)
        if "prompt_logprobs" not in sampling:
            # The last token of an answer was never put in.
            self.cache.add((salt, tuple(prompt + choice["token_ids"][:-1])))
        scores = [None, *({str(token): {"logprob": self.score(token)}} for token in prompt[1:])]
        return {
            "choices": [choice],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
            "prompt_logprobs": scores,
        }

    def _cached(self, salt: str | None, prompt: list[int]) -> int:
        shared = (takewhile(_alike, zip(prompt, ids, strict=False)) for other, ids in self.cache if other == salt)
        return min(len(prompt) - 1, max((sum(1 for _ in pairs) for pairs in shared), default=0))


def _alike(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def choice(ids: list[int], *spans: tuple[str, int, int], finish: str = "stop") -> dict[str, Any]:
    """What an engine answers: these ids, made under these labels."""
    return {
        "finish_reason": finish,
        "token_ids": ids,
        "weight_versions": [{"version": label, "start": start, "end": end} for label, start, end in spans],
        "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
    }
