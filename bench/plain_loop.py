"""An episode without Temporal: the same activity functions with the same messages, called one after the other.

What is left out is what durability costs: no history, no queue, no retry, no heartbeat. The order of things is that of
workflows/episode.py. Called by durability.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.generation.activities import GenerationActivities
from activities.lineage.activities import LineageActivities
from activities.sandbox.activities import SandboxActivities
from workflows.closing import close_group
from workflows.contracts import (
    AcquireInput,
    ActInput,
    ActionKind,
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    GenerateInput,
    GroupInput,
    ReleaseInput,
    Sampling,
    StopReason,
    TurnRecord,
    VerifyInput,
    derive_seed,
)
from workflows.outcome import judge


class PlainLoop:
    """Groups and episodes over the activities' own methods. Any failure rises: nothing is retried."""

    def __init__(
        self, generation: GenerationActivities, sandbox: SandboxActivities, lineage: LineageActivities
    ) -> None:
        self._generation, self._sandbox, self._lineage = generation, sandbox, lineage

    async def group(self, group: GroupInput) -> None:
        """The siblings together, and the group's row."""
        siblings = await asyncio.gather(*(self._episode(episode_of(group, index)) for index in range(group.group_size)))
        await _call(self._lineage.record_group, close_group(group, siblings))

    async def _episode(self, input: EpisodeInput) -> EpisodeSummary:
        started_at = time.time()
        acquire = AcquireInput(run=input.run, group_id=input.group_id, attempt_id=input.attempt_id, task=input.task)
        boot = asyncio.create_task(_call(self._sandbox.acquire, acquire))
        turns: list[TurnRecord] = []
        observation: str | None = None
        answer, sequence = "", 0
        for turn in range(input.limits.max_turns):
            made = await _call(self._generation.generate, _generate_input(input, started_at, turns, observation))
            sequence = made.prompt_tokens + made.sampled_tokens
            turns.append(
                TurnRecord(
                    turn=turn,
                    segment=made.segment,
                    engine=made.engine,
                    prompt_tokens=made.prompt_tokens,
                    sampled_tokens=made.sampled_tokens,
                    finish_reason=made.finish_reason,
                )
            )
            if made.action.kind is ActionKind.FINAL:
                answer = made.action.answer
                break
            act = ActInput(
                lease=(await boot).lease,
                op_id=f"t{turn}",
                turn=turn,
                command=made.action.command,
                step_timeout_s=input.limits.step_timeout_s,
                max_output_chars=input.limits.max_output_chars,
            )
            done = await _call(self._sandbox.act, act)
            observation = done.observation()
        lease = (await boot).lease
        verdict = await _call(self._sandbox.verify, VerifyInput(lease=lease, task=input.task, answer=answer))
        judgement = judge(StopReason.FINISHED, verdict, input.limits.failure_reward)
        record = EpisodeRecord(
            attempt_id=input.attempt_id,
            episode_id=input.episode_id,
            group_id=input.group_id,
            run=input.run,
            kind=input.kind,
            task=input.task,
            attempt=input.attempt,
            outcome=judgement.outcome,
            stop_reason=StopReason.FINISHED,
            reward=judgement.reward,
            turns=turns,
            seed=input.seed,
            sequence_tokens=sequence,
            started_at=started_at,
            ended_at=time.time(),
        )
        await asyncio.gather(
            _call(self._lineage.record_episode, record),
            _call(self._sandbox.release, ReleaseInput(attempt_id=input.attempt_id, lease=lease)),
        )
        return EpisodeSummary(**{name: getattr(record, name) for name in EpisodeSummary.model_fields})


def episode_of(group: GroupInput, index: int) -> EpisodeInput:
    """The sibling's first attempt, as Group makes it."""
    return EpisodeInput(
        run=group.run,
        group_id=group.group_id,
        index=index,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model=group.model,
        task=group.task,
        limits=group.limits,
        seed=derive_seed(group.seed, "sibling", index),
    )


def _generate_input(
    input: EpisodeInput, started_at: float, turns: list[TurnRecord], observation: str | None
) -> GenerateInput:
    limits, turn = input.limits, len(turns)
    return GenerateInput(
        run=input.run,
        attempt_id=input.attempt_id,
        session=input.attempt_id,
        turn=turn,
        model=input.model,
        task=input.task,
        segments=[record.segment for record in turns if record.segment is not None],
        observation=observation,
        sampling=Sampling(
            temperature=limits.temperature, max_tokens=limits.max_tokens_per_turn, context_length=limits.context_length
        ),
        seed=derive_seed(input.seed, turn),
        started_at=started_at,
        timeout_s=limits.generate_timeout_s,
    )


async def _call(function: Callable[[Any], Any], message: Any) -> Any:
    """An activity function in the context that it asks for its times."""
    return await ActivityEnvironment().run(function, message)
