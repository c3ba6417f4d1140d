"""One answer of the policy, its tokens recorded: the `generate` activity, which reads an action of it, and `answer`,
for whoever puts the prompt together itself.

Promises: what the engine returned is what is stored, ids and log-probabilities and the weight version of each token;
no token of unproven or foreign weights is stored; each try writes its own object, which nothing overwrites. Time in
which no engine had room or served the run counts as waiting, not as generation. Called by the Episode workflow
and by the agents' endpoint; cancelling it aborts the engine's request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from temporalio import activity

from activities.generation.affinity import Affinity
from activities.generation.answers import Generation
from activities.generation.engine import EngineClient
from activities.generation.harness import carried
from activities.generation.harnesses import Harness, open_harness
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


@dataclass(frozen=True)
class Prompt:
    """What an answer is sampled after: the turns of its branch so far, and the ids that this turn adds to theirs."""

    added: list[int]
    earlier: list[Segment]
    """Of the branch, oldest first; empty for its first turn."""
    origin: Segment | None = None
    """Of a branch that forks, the turn that it forks from: an engine has its tokens in its cache."""
    branch: int = 0
    stop: Sequence[str] = ()
    """Texts at which the answer ends; what was sampled of them stays in its tokens."""

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.earlier for token in segment.token_ids] + self.added

    @property
    def last(self) -> Segment | None:
        return self.earlier[-1] if self.earlier else self.origin


@dataclass(frozen=True)
class Answer:
    """One answer as it was stored under `key`."""

    key: str
    segment: Segment
    prompt_tokens: int
    versions: list[int]
    """policy_version of each sampled token."""
    waited_s: float
    """For room on an engine."""
    asked_at: float = 0.0
    """When an engine was first asked, seconds since the epoch."""

    @property
    def sampled_tokens(self) -> int:
        return len(self.versions)


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
        harness = open_harness(message.harness, template)
        earlier = [await self._segment(key) for key in message.segments]
        prompt = Prompt(await self._added(template, harness, message, earlier), earlier)
        made = await self.answer(message, prompt, template, attempt=info.attempt)
        if made is None:
            return GenerateOutput(
                segment=None,
                action=Action(kind=ActionKind.MALFORMED, error="the context is full"),
                finish_reason=FinishReason.CONTEXT_FULL,
                prompt_tokens=len(prompt.token_ids),
                timing=Timing(queue_s=queue_s, run_s=time.monotonic() - began),
            )
        self._remember(made.key, made.segment)
        return GenerateOutput(
            segment=made.key,
            action=carried(harness.read(made.segment.text)),
            text=made.segment.text[:TEXT_CHARS],
            finish_reason=made.segment.finish_reason,
            engine=made.segment.engine,
            prompt_tokens=made.prompt_tokens,
            sampled_tokens=made.sampled_tokens,
            cached_tokens=made.segment.cached_tokens,
            min_version=min(made.versions),
            max_version=max(made.versions),
            asked_at=made.asked_at,
            timing=Timing(queue_s=queue_s + made.waited_s, run_s=time.monotonic() - began - made.waited_s),
        )

    async def answer(
        self, message: GenerateInput, prompt: Prompt, template: Template, *, attempt: int
    ) -> Answer | None:
        """Sample after `prompt` and store the turn; None where the context leaves no room for a token. Of `message` its
        task, observation and segments are not read. Each `attempt` at a turn is stored by itself.

        Raises EngineError or StorageError."""
        token_ids = prompt.token_ids
        room = message.sampling.context_length - len(token_ids)
        if room < 1:
            return None
        answer, versions, engine, waited_s, asked_at = await self._sample(message, prompt, token_ids, room, template)
        segment = _segment(message, prompt, answer, versions, text=template.text(answer.token_ids), engine=engine)
        key = segment_key(message.run, message.attempt_id, message.turn, attempt)
        await asyncio.to_thread(self._store.put, key, segment.model_dump_json().encode())
        return Answer(key, segment, len(token_ids), versions, waited_s, asked_at)

    async def _added(
        self, template: Template, harness: Harness, message: GenerateInput, earlier: list[Segment]
    ) -> list[int]:
        """The ids that this turn adds to those of the earlier turns."""
        if not earlier:
            taskset = self._open_taskset(message.task.taskset)
            task = await asyncio.to_thread(taskset.load, message.task.task_id)
            return template.initial(harness.begin(task), harness.tools)
        said = harness.observe(earlier[-1].text, message.observation or "")
        return template.continuation(earlier[-1].token_ids[-1], said, harness.tools)

    async def _sample(
        self, message: GenerateInput, asked: Prompt, prompt: list[int], room: int, template: Template
    ) -> tuple[Generation, list[int], str, float, float]:
        """(answer, version per token, engine, seconds waited, when one was asked) of the first engine that answers from
        proven weights.

        What an engine had made of proven weights when it was cut goes before the prompt of the next try."""
        ask, waited_s, asked_at = _ask(message, asked.last), 0.0, 0.0
        routed_from = _routed_from(message.model, asked.earlier)
        most, made, versions = min(room, message.sampling.max_tokens), _NOTHING, list[int]()
        attempt = 0
        while True:
            async with self._pool.engine(ask) as grant:
                waited_s += grant.waited_s
                # Of an answer that was cut the start counts: its version is the turn's first.
                asked_at = asked_at if versions else time.time()
                try:
                    answer = await grant.client.generate(
                        prompt + made.token_ids,
                        temperature=message.sampling.temperature,
                        max_tokens=most - len(versions),
                        seed=derive_seed(message.seed, len(versions)) if versions else message.seed,
                        stop_token_ids=[template.end_of_turn],
                        stop=asked.stop,
                        priority=message.priority,
                        cache_salt=grant.cache_salt,
                        affinity=ask.affinity,
                        options=message.sampling.truncation,
                        timeout_s=message.timeout_s,
                        routed_from=routed_from,
                    )
                    made_by = await proven_versions(grant.witnesses, message.run, answer)
                    _refuse_other_version(message, made_by)
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
                return made, versions, grant.client.info.name, waited_s, asked_at

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


def _refuse_other_version(message: GenerateInput, versions: Sequence[int]) -> None:
    """Raises EngineError, retryable, for tokens of another version than the one that the request is pinned to."""
    pinned = message.pinned_version
    if pinned is not None and (others := sorted(set(versions) - {pinned})):
        raise EngineError(f"tokens of version {', '.join(map(str, others))}, pinned to {pinned}")


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


def _ask(message: GenerateInput, last: Segment | None) -> Ask:
    """The prompt of a first turn is made of its task, so that siblings share it, and samples of one held-out task."""
    task = message.task
    return Ask(
        run=message.run,
        affinity=Affinity(message.session, f"{task.taskset}/{task.split}/{task.task_id}"),
        last=Cached(last.engine, last.versions[-1]) if last is not None else None,
        priority=message.priority,
        started_at=message.started_at,
        kv=message.kv,
        version=message.pinned_version,
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
    message: GenerateInput, prompt: Prompt, answer: Generation, versions: list[int], *, text: str, engine: str
) -> Segment:
    """The turn's record: prompt tokens have mask 0, sampled ones mask 1, whatever they are."""
    prompted, sampled = len(prompt.added), len(answer.token_ids)
    # A record never lacks its end: the reason is there once the answer is whole.
    assert answer.finish_reason is not None
    return Segment(
        turn=message.turn,
        token_ids=prompt.added + answer.token_ids,
        loss_mask=[0] * prompted + [1] * sampled,
        logprobs=[0.0] * prompted + answer.logprobs,
        versions=[-1] * prompted + versions,
        temperature=message.sampling.temperature,
        finish_reason=answer.finish_reason,
        text=text,
        engine=engine,
        cached_tokens=answer.cached_tokens,
        routed_experts=answer.routed_experts,
        branch=prompt.branch,
    )
