"""What an inference engine answers, read into records; what can't be read, and what it refuses with, is an EngineError.

Called by the engine's client, which has asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from workflows.contracts import FinishReason
from workflows.errors import EngineError

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": None}
PASSING = (408, 425, 429)
"""Refusals of what stands between us and the engine that say: later."""


class VersionSpan(NamedTuple):
    """Sampled tokens `[start, end)` were made under the weights labelled `label`."""

    label: str
    start: int
    end: int


class Prepared(NamedTuple):
    """Weights that an engine made ready for its kernels, or not."""

    why: str
    """Why it can't: a device that packs nothing, another kind of model, too little memory; they are loaded in place."""
    slice_s: float
    """The longest time for which it made no token for that."""


class Checksums(NamedTuple):
    """Of weights as an engine has them, by activities/publication/checksums.py."""

    given: dict[str, str]
    """Of each tensor that its model was given, by name."""
    held: list[tuple[str, list[str]]]
    """Of each parameter that can be seen, with the names of the tensors that it is made of."""


@dataclass(frozen=True)
class Generation:
    """One answer: aligned lists of the sampled tokens, the stop token among them."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log, of the distribution sampled from."""
    spans: list[VersionSpan]
    finish_reason: FinishReason | None
    """None: it was cut before its end, with the tokens that it had."""
    cached_tokens: int
    routed_experts: str = ""
    """As in Segment; empty from an engine that does not say."""

    @property
    def labels(self) -> set[str]:
        return {span.label for span in self.spans}


@contextmanager
def readable(what: str) -> Iterator[None]:
    """An answer that is not of the engine's shape, as a proxy's page, is the engine's fault and may pass."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"{what}: an answer that can't be read: {type(error).__name__} {error}") from error


def refused(what: str, response: httpx.Response) -> EngineError:
    """What `what` was refused with: it may pass where the fault is not the request's."""
    message = f"{what}: HTTP {response.status_code} {_detail(response)}"
    return EngineError(message, retryable=response.status_code >= 500 or response.status_code in PASSING)


def _detail(response: httpx.Response) -> str:
    """vLLM's own message, or the start of whatever came."""
    try:
        return str(response.json()["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return response.text[:300]


def read_cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were in the engine's cache."""
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def read_generation(answer: dict[str, Any], engine: str) -> Generation:
    """Raises EngineError for one that ended otherwise than an answer may, or lacks what each token needs."""
    choice = answer["choices"][0]
    if choice["finish_reason"] not in FINISH or (choice["finish_reason"] == "abort" and not choice["token_ids"]):
        raise EngineError(f"{engine}: the answer ended with {choice['finish_reason']!r}")
    finish = FINISH[choice["finish_reason"]]
    spans = [VersionSpan(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
    generation = Generation(
        token_ids=choice["token_ids"],
        logprobs=[item["logprob"] for item in choice["logprobs"]["content"]],
        spans=spans,
        finish_reason=finish,
        cached_tokens=read_cached(answer),
        routed_experts=choice.get("routed_experts") or "",
    )
    covered = [index for span in spans for index in range(span.start, span.end)]
    if covered != list(range(len(generation.token_ids))) or len(generation.logprobs) != len(generation.token_ids):
        raise EngineError(f"{engine}: a token without log-probability or weight version")
    return generation
