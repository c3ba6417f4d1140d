"""A world whose groups are scripted: one activity asks the script what its episodes would, without their workflows.

For tests of what a run makes of its groups, at a sixth of the cost. What groups and episodes are asked for here is what
the real ones ask, in their order: acquire, (generate, act), generate, verify.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from tests.workflows.fakes import World
from tests.workflows.scripted_group import ScriptedGroup
from workflows.closing import close_group
from workflows.contracts import (
    AcquireInput,
    ActInput,
    ActionKind,
    EpisodeSummary,
    GenerateInput,
    GroupInput,
    GroupResult,
    Outcome,
    Queue,
    Sampling,
    StopReason,
    VerifyInput,
    engine_queue,
    sandbox_queue,
)
from workflows.episode import Episode
from workflows.evaluation import Evaluation
from workflows.registry import ON_CONTROL


class QuickWorld(World):
    @activity.defn
    async def play_group(self, message: GroupInput) -> GroupResult:
        """One attempt per sibling; an `acquire` that fails is infrastructure's failure."""
        started_at = time.time()
        attempts = await asyncio.gather(*(self._attempt(message, index) for index in range(message.group_size)))
        endings = [attempt.outcome.value for attempt in attempts]
        result = close_group(message, attempts).model_copy(
            update={
                "outcomes": {name: endings.count(name) for name in endings},
                "started_at": started_at,
                "closed_at": max(attempt.ended_at for attempt in attempts),
                "draw": message.draw,
            }
        )
        recorded = await self.record_group(result)
        return result.joined_by(recorded.replay if recorded is not None else "")

    async def _attempt(self, group: GroupInput, index: int) -> EpisodeSummary:
        name = f"{group.group_id}/e{index}/a0"
        asked = {"run": group.run, "attempt_id": name, "task": group.task}
        ended: dict[str, Any] = {"attempt_id": name, "min_version": None, "max_version": None, "sampled_tokens": 0}
        try:
            lease = (await self.acquire(AcquireInput(group_id=group.group_id, **asked))).lease
        except ApplicationError:
            lost = {"outcome": Outcome.INFRA_FAILURE, "stop_reason": StopReason.SANDBOX_LOST, "reward": None}
            return EpisodeSummary(**ended, **lost, ended_at=time.time())
        made, answer = [], ""
        limits = group.limits
        for turn in range(limits.max_turns):
            sampling = Sampling(
                temperature=limits.temperature, max_tokens=limits.max_tokens, context_length=limits.context_length
            )
            turned = GenerateInput(**asked, session=name, turn=turn, model=group.model, sampling=sampling, seed=0)
            made.append(await self.generate(turned))
            if made[-1].action.kind is not ActionKind.COMMAND:
                answer = made[-1].action.answer
                break
            command = {"turn": turn, "op_id": f"t{turn}", "command": made[-1].action.command}
            bounds = {"step_timeout_s": limits.step_timeout_s, "max_output_chars": limits.max_output_chars}
            await self.act(ActInput(lease=lease, **command, **bounds))
        verdict = await self.verify(VerifyInput(lease=lease, task=group.task, answer=answer))
        known = [version for turn in made for version in (turn.min_version, turn.max_version) if version is not None]
        ended |= {"min_version": min(known), "max_version": max(known)}
        ended["sampled_tokens"] = sum(turn.sampled_tokens for turn in made)
        outcome = Outcome.MODEL_SUCCESS if verdict.passed else Outcome.MODEL_FAILURE
        judged = {"outcome": outcome, "stop_reason": StopReason.FINISHED, "reward": verdict.reward}
        return EpisodeSummary(**ended, **judged, ended_at=time.time())


@asynccontextmanager
async def quick_workers(client: Client, script: QuickWorld) -> AsyncIterator[None]:
    """Workers on all the queues that a run needs; its evaluations are played for real."""
    options: dict[str, Any] = {"activities": script.activities, "workflow_runner": UnsandboxedWorkflowRunner()}
    async with (
        Worker(client, task_queue=Queue.CONTROL, workflows=ON_CONTROL, **options),
        Worker(client, task_queue=Queue.EPISODES, workflows=[ScriptedGroup, Episode, Evaluation], **options),
        Worker(client, task_queue=Queue.TRAINING, activities=script.activities),
        Worker(client, task_queue=engine_queue("h"), activities=script.activities),
        Worker(client, task_queue=sandbox_queue("h"), activities=script.activities),
    ):
        yield
