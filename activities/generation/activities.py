"""The `generate` activity: one answer of the policy, its tokens recorded, its action read.

Promises: what the engine returned is what is stored, ids and log-probabilities and the weight version of each token;
no token of unproven or foreign weights is stored; each try writes its own object, which nothing overwrites. Time in
which no engine had room or served the run counts as waiting, not as generation. Called by the Episode workflow;
cancelling it aborts the engine's request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from temporalio import activity

from activities.generation.engine import Affinity, EngineClient, Generation
from activities.generation.harness import initial_messages, observation_message, parse_action
from activities.generation.routing import Ask, Cached, EnginePool, Grant
from activities.generation.server import routes_experts
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tasksets.base import Taskset
from workflows.contracts import (
    Action,
    ActionKind,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    KvPlan,
    Segment,
    Timing,
    derive_seed,
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
        answer, versions, engine, waited_s = await self._sample(message, prompt, earlier, room, template)
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
            timing=Timing(queue_s=queue_s + waited_s, run_s=time.monotonic() - began - waited_s),
        )

    async def _prompt(self, template: Template, message: GenerateInput, earlier: list[Segment]) -> list[int]:
        """The ids that this turn adds to those of the earlier turns."""
        if not earlier:
            taskset = self._open_taskset(message.task.taskset)
            task = await asyncio.to_thread(taskset.load, message.task.task_id)
            return template.initial(initial_messages(task))
        return template.continuation(earlier[-1].token_ids[-1], observation_message(message.observation or ""))

    async def _sample(
        self, message: GenerateInput, prompt: list[int], earlier: list[Segment], room: int, template: Template
    ) -> tuple[Generation, list[int], str, float]:
        """(answer, version per token, engine, seconds waited) of the first engine that answers from proven weights.

        What an engine had made of proven weights when it was cut goes before the prompt of the next try."""
        ask, waited_s = _ask(message, earlier), 0.0
        routed_from = _routed_from(message.model, earlier)
        most, made, versions = min(room, message.sampling.max_tokens), _NOTHING, list[int]()
        attempt = 0
        while True:
            async with self._pool.engine(ask) as grant:
                waited_s += grant.waited_s
                try:
                    answer = await grant.client.generate(
                        prompt + made.token_ids,
                        temperature=message.sampling.temperature,
                        max_tokens=most - len(versions),
                        seed=derive_seed(message.seed, len(versions)) if versions else message.seed,
                        stop_token_ids=[template.end_of_turn],
                        priority=message.priority,
                        cache_salt=grant.cache_salt,
                        affinity=ask.affinity,
                        timeout_s=message.timeout_s,
                        routed_from=routed_from,
                    )
                    made_by = await proven_versions(grant.witnesses, message.run, answer)
                    if message.kv is KvPlan.SALT:
                        _refuse_foreign_cache(grant, answer)
                except EngineError as error:
                    grant.suspect()
                    attempt += 1
                    if not error.retryable or attempt == TRIES:
                        raise
                    continue
            made, versions = _joined(made, answer), versions + made_by
            if made.finish_reason is None and len(versions) == most:
                made = replace(made, finish_reason=FinishReason.LENGTH)
            if made.finish_reason is not None:
                return made, versions, grant.client.info.name, waited_s

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


def _refuse_foreign_cache(grant: Grant, answer: Generation) -> None:
    """An engine that took new weights since it was last asked found, under the old salt, what the old weights left.
    Raises EngineError, retryable: the next try has the new salt."""
    if answer.cached_tokens and answer.spans[0].label not in grant.labels:
        name = grant.client.info.name
        raise EngineError(f"{name}: {answer.cached_tokens} prompt tokens came from the cache of earlier weights")


_NOTHING = Generation(token_ids=[], logprobs=[], spans=[], finish_reason=None, cached_tokens=0)


def _joined(made: Generation, more: Generation) -> Generation:
    """What was made before a cut, and what came after it. Experts are those of the last engine, through which all of
    the tokens went; the cached ones are those of the turn's own prompt."""
    if not made.token_ids:
        return more
    done = len(made.token_ids)
    return replace(
        more,
        token_ids=made.token_ids + more.token_ids,
        logprobs=made.logprobs + more.logprobs,
        spans=made.spans + [span._replace(start=span.start + done, end=span.end + done) for span in more.spans],
        cached_tokens=made.cached_tokens,
    )


def _routed_from(model: str, earlier: list[Segment]) -> int | None:
    """The last token of the turn before went through no layer when it was sampled."""
    return max(0, sum(len(segment.token_ids) for segment in earlier) - 1) if routes_experts(model) else None


def _ask(message: GenerateInput, earlier: list[Segment]) -> Ask:
    """The prompt of a first turn is made of its task, so that siblings share it, and samples of one held-out task."""
    task = message.task
    return Ask(
        run=message.run,
        affinity=Affinity(message.session, f"{task.taskset}/{task.split}/{task.task_id}"),
        last=Cached(earlier[-1].engine, earlier[-1].versions[-1]) if earlier else None,
        priority=message.priority,
        started_at=message.started_at,
        kv=message.kv,
    )


async def proven_versions(witnesses: Sequence[EngineClient], run: str, answer: Generation) -> list[int]:
    """The policy version of each sampled token; `witnesses` are the engines of which one made them.

    Tokens of weights in proof wait for it. Raises EngineError, retryable, for tokens of another run, of unknown
    weights, or of weights whose proof fails or does not come: they are nobody's.
    """
    policies = {label: parse_policy_label(label) for label in answer.labels}
    for label, policy in policies.items():
        if policy is None or policy[0] != run:
            raise EngineError(f"{_names(witnesses)}: tokens from weights labelled {label!r}, not of {run}")
    if unproven := [policy[1] for policy in policies.values() if policy and not policy[2]]:
        await _await_proof(witnesses, run, max(unproven))
    return [
        policy[1]
        for span in answer.spans
        if (policy := policies[span.label]) is not None
        for _ in range(span.start, span.end)
    ]


async def _await_proof(witnesses: Sequence[EngineClient], run: str, version: int) -> None:
    """Return once no witness carries the version unproven any more, and one has proved at least it.

    A later version implies it: a load whose proof failed is followed by a label of nobody for longer than this waits.
    Of several witnesses nobody knows which one it was, so that one with a label of nobody costs the answer.
    """
    deadline = time.monotonic() + PROOF_S
    while True:
        labels = await asyncio.gather(*(engine.label() for engine in witnesses))
        carried = [parse_policy_label(label) for label in labels]
        policies = [policy for policy in carried if policy is not None and policy[0] == run]
        if len(policies) < len(carried):
            found = ", ".join(map(repr, labels))
            raise EngineError(f"{_names(witnesses)}: version {version} was not proven; found {found}")
        unproven = any(policy[1] == version and not policy[2] for policy in policies)
        if not unproven and any(policy[1] >= version for policy in policies):
            return
        if time.monotonic() > deadline:
            raise EngineError(f"{_names(witnesses)}: version {version} was not proven in {PROOF_S:.0f} s")
        await asyncio.sleep(PROOF_EVERY_S)


def _names(engines: Sequence[EngineClient]) -> str:
    return ", ".join(engine.info.name for engine in engines)


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
        routed_experts=answer.routed_experts,
    )
