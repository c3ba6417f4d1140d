"""The `generate` activity: one answer of the policy, its tokens recorded, its action read.

Promises: what the engine returned is what is stored, ids and log-probabilities and the weight version of each token;
no token of unproven or foreign weights is stored; each try writes its own object, which nothing overwrites. Called by
the Episode workflow; cancelling it aborts the engine's request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from temporalio import activity

from activities.generation.engine import EngineClient, Generation
from activities.generation.harness import initial_messages, observation_message, parse_action
from activities.generation.routing import EnginePool
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tasksets.base import Taskset
from workflows.contracts import (
    Action,
    ActionKind,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    Segment,
    Timing,
    parse_policy_label,
)
from workflows.errors import EngineError

TEXT_CHARS = 2000
PROOF_S = 8.0
"""How long tokens of weights that are being proven wait for the proof. Below loader.HOLD_S, which keeps a failed
proof visible for longer than anybody waits for it."""
PROOF_EVERY_S = 0.1
TRIES = 3
"""Engines that one try of the activity may go through, so that a lost engine costs no backoff."""
CACHED_SEGMENTS = 4096


class GenerationActivities:
    """`open_taskset` gives the taskset of a name."""

    def __init__(self, pool: EnginePool, store: ObjectStore, open_taskset: Callable[[str], Taskset]) -> None:
        self._pool = pool
        self._store = store
        self._open_taskset = open_taskset
        self._segments: OrderedDict[str, Segment] = OrderedDict()

    @activity.defn(name="generate")
    async def generate(self, message: GenerateInput) -> GenerateOutput:
        """Sample the turn's answer. Raises EngineError, StorageError or InvalidConfig."""
        info = activity.info()
        began = time.monotonic()
        queue_s = (info.started_time - info.current_attempt_scheduled_time).total_seconds()
        template = await asyncio.to_thread(Template.load, message.model)
        earlier = [await self._segment(key) for key in message.segments]
        added = await self._prompt(template, message, earlier)
        prompt = [token for segment in earlier for token in segment.token_ids] + added
        room = message.sampling.context_length - len(prompt)
        if room < 1:
            return GenerateOutput(
                segment=None,
                action=Action(kind=ActionKind.MALFORMED, error="the context is full"),
                finish_reason=FinishReason.CONTEXT_FULL,
                prompt_tokens=len(prompt),
                timing=Timing(queue_s=queue_s, run_s=time.monotonic() - began),
            )
        engine, answer, versions = await self._sample(message, prompt, min(room, message.sampling.max_tokens), template)
        text = template.text(answer.token_ids)
        segment = _segment(message, added, answer, versions, text=text, engine=engine)
        key = segment_key(message.run, message.attempt_id, message.turn, info.attempt)
        await asyncio.to_thread(self._store.put, key, segment.model_dump_json().encode())
        self._remember(key, segment)
        return GenerateOutput(
            segment=key,
            action=parse_action(text),
            text=text[:TEXT_CHARS],
            finish_reason=answer.finish_reason,
            engine=engine,
            prompt_tokens=len(prompt),
            sampled_tokens=len(answer.token_ids),
            cached_tokens=answer.cached_tokens,
            min_version=min(versions),
            max_version=max(versions),
            timing=Timing(queue_s=queue_s, run_s=time.monotonic() - began),
        )

    async def _prompt(self, template: Template, message: GenerateInput, earlier: list[Segment]) -> list[int]:
        """The ids that this turn adds to those of the earlier turns."""
        if not earlier:
            taskset = self._open_taskset(message.task.taskset)
            task = await asyncio.to_thread(taskset.load, message.task.task_id)
            return template.initial(initial_messages(task))
        return template.continuation(earlier[-1].token_ids[-1], observation_message(message.observation or ""))

    async def _sample(
        self, message: GenerateInput, prompt: list[int], max_tokens: int, template: Template
    ) -> tuple[str, Generation, list[int]]:
        """(engine, answer, version per token) of the first engine that gives an answer from proven weights."""
        for attempt in range(TRIES):
            engine = await self._pool.choose(message.run, message.session)
            try:
                answer = await engine.generate(
                    prompt,
                    temperature=message.sampling.temperature,
                    max_tokens=max_tokens,
                    seed=message.seed,
                    stop_token_ids=[template.end_of_turn],
                    priority=message.priority,
                )
                return engine.info.name, answer, await proven_versions(engine, message.run, answer)
            except EngineError as error:
                self._pool.suspect(engine)
                if not error.retryable or attempt == TRIES - 1:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _segment(self, key: str) -> Segment:
        if key in self._segments:
            self._segments.move_to_end(key)
            return self._segments[key]
        segment = Segment.model_validate_json(await asyncio.to_thread(self._store.get, key))
        self._remember(key, segment)
        return segment

    def _remember(self, key: str, segment: Segment) -> None:
        self._segments[key] = segment
        while len(self._segments) > CACHED_SEGMENTS:
            self._segments.popitem(last=False)


def segment_key(run: str, attempt_id: str, turn: int, activity_attempt: int) -> str:
    """Each try has a key of its own: a slow older one can't replace what a newer one has reported."""
    return f"runs/{run}/trajectories/{attempt_id.removeprefix(f'{run}/')}/t{turn}-{activity_attempt}.json"


async def proven_versions(engine: EngineClient, run: str, answer: Generation) -> list[int]:
    """The policy version of each sampled token.

    Tokens of weights in proof wait for it. Raises EngineError, retryable, for tokens of another run, of unknown
    weights, or of weights whose proof fails or does not come: they are nobody's.
    """
    policies = {label: parse_policy_label(label) for label in answer.labels}
    for label, policy in policies.items():
        if policy is None or policy[0] != run:
            raise EngineError(f"{engine.info.name}: tokens from weights labelled {label!r}, not of {run}")
    if unproven := [policy[1] for policy in policies.values() if policy and not policy[2]]:
        await _await_proof(engine, run, max(unproven))
    return [
        policy[1]
        for span in answer.spans
        if (policy := policies[span.label]) is not None
        for _ in range(span.start, span.end)
    ]


async def _await_proof(engine: EngineClient, run: str, version: int) -> None:
    """Return once the engine carries proven weights of at least `version`.

    A later version implies it: a load whose proof failed is followed by a label of nobody for longer than this waits.
    """
    deadline = time.monotonic() + PROOF_S
    while True:
        label = await engine.label()
        policy = parse_policy_label(label)
        if policy is None or policy[0] != run:
            raise EngineError(f"{engine.info.name}: version {version} was not proven; the engine carries {label!r}")
        if (policy[1] == version and policy[2]) or policy[1] > version:
            return
        if time.monotonic() > deadline:
            raise EngineError(f"{engine.info.name}: version {version} was not proven in {PROOF_S:.0f} s")
        await asyncio.sleep(PROOF_EVERY_S)


def _segment(
    message: GenerateInput, added: list[int], answer: Generation, versions: list[int], *, text: str, engine: str
) -> Segment:
    """The turn's record: prompt tokens have mask 0, sampled ones mask 1, whatever they are."""
    prompted, sampled = len(added), len(answer.token_ids)
    return Segment(
        turn=message.turn,
        token_ids=added + answer.token_ids,
        loss_mask=[0] * prompted + [1] * sampled,
        logprobs=[0.0] * prompted + answer.logprobs,
        versions=[-1] * prompted + versions,
        temperature=message.sampling.temperature,
        finish_reason=answer.finish_reason,
        text=text,
        engine=engine,
        cached_tokens=answer.cached_tokens,
    )
