"""The one seam to an inference engine: token ids in, token ids with their log-probabilities and versions out.

Speaks vLLM's HTTP interface as activities/generation/server.py starts it. Every failure comes out as EngineError:
retryable where the same call may succeed later (unreachable, 5xx, aborted), final where it can't (4xx). Cancelling a
call closes its connection, upon which the engine drops the request. Called by the pool (generation) and by the loads.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import httpx

from activities.generation.affinity import Affinity
from activities.generation.answers import (
    Checksums,
    Generation,
    Prepared,
    read_cached,
    read_generation,
    readable,
    refused,
)
from activities.generation.pressure import Pressure
from activities.generation.server import SERVED_NAME
from workflows.contracts import EngineInfo, InFlight, KvPlan, parse_policy_label
from workflows.errors import EngineError

GENERATE_PATH = "/inference/v1/generate"
GENERATE_S = 600.0
DRAIN_S = 1860.0
"""Longest wait for the end of what is in flight: a little more than one answer may take."""
CONTROL_S = 300.0
"""Longest pause, reload or score: a load of a large model."""
ASK_S = 5.0
PROBE_PRIORITY = -1000
"""Before every rollout: an engine that proves itself is out of rotation until it has."""
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
"""A machine that is gone says nothing: its requests fail after 25 s, not when they should long have been answered."""
PAUSES = {InFlight.FINISH: "wait", InFlight.ABORT_CONTINUE: "abort", InFlight.KEEP: "keep"}
"""vLLM's words for what becomes of requests in flight."""


class EngineClient:
    """One engine. Safe for concurrent calls of one event loop."""

    def __init__(self, info: EngineInfo, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` is for tests; by default one without a limit of connections: the engine queues by priority."""
        self.info = info
        # The server closes an idle connection after 5 s: one kept for longer could break a request that uses it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(
            base_url=info.url,
            timeout=ASK_S,
            transport=transport or httpx.AsyncHTTPTransport(limits=limits, retries=1, socket_options=KEEP_ALIVE),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self,
        token_ids: list[int],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        stop_token_ids: list[int],
        priority: int = 0,
        cache_salt: str | None = None,
        affinity: Affinity | None = None,
        options: Mapping[str, float] | None = None,
        timeout_s: float = GENERATE_S,
        routed_from: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Sample up to `max_tokens` tokens after `token_ids`. A sampled stop token is part of the answer.

        `routed_from`: of a mixture of experts, the token from whose index on the experts are wanted; what an engine
        does not know of them is no failure. `stop`: texts that end the answer, their tokens included.

        `options`: other sampling parameters by vLLM's names, as `{"top_p": 0.9}`.

        Of the engine's cached prefixes only those made under the same `cache_salt` are used. An answer that takes
        longer than `timeout_s` from an engine that works is a final EngineError: it would as well the next time."""
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop_token_ids": stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
        }
        if stop:
            sampling |= {"stop": list(stop), "detokenize": True}
        sampling |= options or {}
        if routed_from is not None:
            sampling["routed_experts_prompt_start"] = routed_from
        body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": sampling, "priority": priority}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        try:
            answer = await self._generate(body, read_s=timeout_s, headers=affinity.headers if affinity else None)
        except EngineError as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout) or not await self._works():
                raise
            words = f"{self.info.name}: no answer within {timeout_s:g} s (rollout.generate_timeout_s)"
            raise EngineError(words, retryable=False) from error
        with self._reading():
            made = read_generation(answer, self.info.name)
        if routed_from is None or made.routed_experts:
            return made
        experts = await self._routed(answer, routed_from, len(token_ids) + len(made.token_ids) - 1)
        return replace(made, routed_experts=experts)

    async def _routed(self, answer: dict[str, Any], start: int, stop: int) -> str:
        """From an engine that does not say it with the answer; empty where it can't say it at all."""
        try:
            told = await self._rpc("ratchet_routed", request_id=answer.get("request_id", ""), start=start, stop=stop)
        except EngineError:
            return ""
        return str(told.get("experts", ""))

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token given those before it, at temperature 1; the first is 0.0. Never cached."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._generate(
            {"token_ids": token_ids, "sampling_params": sampling, "priority": PROBE_PRIORITY}, read_s=CONTROL_S
        )
        with self._reading():
            rest = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [0.0, *(position[str(token)]["logprob"] for token, position in rest)]

    async def cached_tokens(self, token_ids: list[int], *, cache_salt: str | None = None) -> int:
        """How many tokens of a prompt the engine finds in its prefix cache; they are in it afterwards."""
        sampling = {"max_tokens": 1, "detokenize": False}
        body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": sampling, "priority": PROBE_PRIORITY}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        answer = await self._generate(body, read_s=CONTROL_S)
        with self._reading():
            return read_cached(answer)

    async def label(self) -> str:
        """The weight label that the engine carries now."""
        answer = await self._call("GET", "/weight_info")
        with self._reading():
            return str(answer["weight_version"])

    async def pressure(self) -> Pressure:
        """How busy the engine is, by its own figures."""
        response = await self._request("GET", "/metrics")
        with self._reading():
            return Pressure.parse(response.text)

    async def set_label(self, label: str) -> None:
        """Tokens made from here on carry `label`."""
        await self._call("POST", "/update_weight_version", json={"new_version": label})

    async def pause(self, in_flight: InFlight = InFlight.KEEP, kv: KvPlan = KvPlan.DROP) -> None:
        """Begin nothing new, and return once what is in flight has ended, was cut or is frozen. Frozen requests go on
        with what the cache holds of them, unless it is dropped. Doing it twice is one pause."""
        params = {"mode": PAUSES[in_flight], "clear_cache": "true" if kv is KvPlan.DROP else "false"}
        await self._call("POST", "/pause", params=params, read_s=DRAIN_S)

    async def resume(self) -> None:
        await self._call("POST", "/resume", read_s=CONTROL_S)

    async def abort_all(self) -> None:
        """End every request in flight: their answers are an EngineError for whoever waits."""
        await self._call("POST", "/abort_requests", json={})

    async def prepare(self, **weights: str) -> Prepared:
        """Make weights ready in the engine's memory for `exchange` while it goes on: those below `path` on its machine,
        or the staged ones of sha256 `digest`."""
        while True:
            answers = await self._rpcs("ratchet_prepare", **weights)
            with self._reading():
                why = next((str(item["why"]) for item in answers if item["why"]), "")
                if why or all(item["ready"] for item in answers):
                    return Prepared(why, max(float(item["longest_s"]) for item in answers))

    async def exchange(self, **weights: str) -> None:
        """Exchange the weights of the paused engine for those that `prepare` made ready."""
        for answer in await self._rpcs("ratchet_exchange", **weights):
            with self._reading():
                if why := str(answer["why"]):
                    raise EngineError(f"{self.info.name}: no weights to exchange: {why}")

    async def forget(self) -> None:
        """Give the memory back of what was staged or made ready."""
        await self._rpc("ratchet_forget")

    async def reload(self, folder: str) -> None:
        """Load the weights below `folder`, a path on the engine's machine, into the paused engine."""
        await self._rpc("ratchet_reload", path=folder)

    async def stage(self, source: str, *, digest: str, size: int, bytes_per_s: float = 0) -> None:
        """Begin to bring weights into the engine's memory while it goes on: from `source`, which `offers.fetch` names,
        `size` bytes of sha256 `digest`. What was staged before is forgotten."""
        await self.forget()
        await self._call("POST", "/start_weight_update")
        info = {"source": source, "digest": digest, "size": size, "bytes_per_s": bytes_per_s}
        await self._call("POST", "/update_weights", json={"update_info": info})

    async def staged(self, digest: str) -> tuple[bool, str]:
        """(whether these weights lie verified in the engine's memory, why they never will)."""
        told = await self._rpc("ratchet_staged")
        with self._reading():
            if told["digest"] not in ("", digest):
                return False, f"others are being staged, {told['digest'][:12]}"
            return bool(told["ready"]), str(told["failed"])

    async def swap(self, digest: str) -> None:
        """Exchange the weights of the paused engine for the staged ones, which are of this sha256."""
        ready, why = await self.staged(digest)
        if not ready:
            raise EngineError(f"{self.info.name}: no weights to exchange: {why}")
        await self._call("POST", "/finish_weight_update", json={}, read_s=CONTROL_S)

    async def rest(self) -> None:
        """Give the device up, weights and cache; nothing may be in flight."""
        await self._call("POST", "/sleep", params={"level": 1, "mode": "keep"}, read_s=CONTROL_S)

    async def wake(self) -> None:
        """Take the device again, if it was given up."""
        answer = await self._call("GET", "/is_sleeping")
        with self._reading():
            asleep = bool(answer["is_sleeping"])
        if asleep:
            await self._call("POST", "/wake_up", read_s=CONTROL_S)

    async def digest(self) -> str:
        """Digest of the parameters that the engine holds."""
        answer = await self._rpc("ratchet_digest")
        with self._reading():
            return str(answer["digest"])

    async def checksums(self) -> Checksums:
        """Of what the engine was given in its last load, and of what it holds."""
        answer = await self._rpc("ratchet_checksums")
        with self._reading():
            held = [(str(found), list(names)) for found, names in answer["held"]]
            return Checksums(dict(answer["given"]), held)

    async def serving(self) -> dict[str, Any]:
        """How the engine serves, by its own account: version, dtype, kernels, flags; worker_extension.py has the
        fields."""
        return await self._rpc("ratchet_serving")

    async def served_names(self) -> list[str]:
        """The model names that the engine answers to; its spec's fingerprint is one."""
        answer = await self._call("GET", "/v1/models")
        with self._reading():
            return [item["id"] for item in answer["data"]]

    async def healthy(self) -> bool:
        """Whether the engine answers and its core lives."""
        try:
            await self._call("GET", "/health")
        except EngineError:
            return False
        return True

    async def _works(self) -> bool:
        """Whether it answers and serves proven weights: it neither hangs nor is being loaded."""
        try:
            policy = parse_policy_label(await self.label())
        except EngineError:
            return False
        return policy is not None and policy[2]

    async def _rpc(self, method: str, **arguments: str | int) -> dict[str, Any]:
        return (await self._rpcs(method, **arguments))[0]

    async def _rpcs(self, method: str, **arguments: str | int) -> list[dict[str, Any]]:
        """What each of the engine's workers answers; at least one does."""
        body = {"method": method, "kwargs": arguments}
        answer = await self._call("POST", "/collective_rpc", json=body, read_s=CONTROL_S)
        with self._reading():
            results: list[dict[str, Any]] = [dict(item) for item in answer["results"]]
            return [results[0], *results[1:]]

    def _reading(self) -> AbstractContextManager[None]:
        return readable(self.info.name)

    async def _generate(
        self, body: dict[str, Any], *, read_s: float = GENERATE_S, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        body = {"model": SERVED_NAME, **body}
        return await self._call("POST", GENERATE_PATH, json=body, read_s=read_s, headers=headers)

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        response = await self._request(method, path, **options)
        with readable(f"{self.info.name} {path}"):
            answer: dict[str, Any] = response.json() if response.content else {}
            return answer

    async def _request(self, method: str, path: str, *, read_s: float = ASK_S, **options: Any) -> httpx.Response:
        timeout = httpx.Timeout(ASK_S, read=read_s, pool=None)
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.RequestError as error:
            raise EngineError(f"{self.info.name} {path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code >= 400:
            raise self._refused(path, response)
        return response

    def _refused(self, path: str, response: httpx.Response) -> EngineError:
        return refused(f"{self.info.name} {path}", response)
