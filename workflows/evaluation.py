"""Evaluation: held-out tasks under one policy version.

Owns the mean that a run reports as its held-out reward. Runs its episodes a bounded number at a time, replaces what
infrastructure broke, and writes its row before it returns. The run makes no update meanwhile, so the version is one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attempts import play
    from workflows.attributes import POLICY_VERSION, REWARD
    from workflows.contracts import (
        EpisodeInput,
        EpisodeKind,
        EpisodeSummary,
        EvaluationInput,
        EvaluationRecord,
        EvaluationResult,
        TaskRef,
        derive_seed,
    )

MAX_ATTEMPTS = 4


@workflow.defn(name="Evaluation")
class Evaluation:
    @workflow.run
    async def run(self, input: EvaluationInput) -> EvaluationResult:
        self._input = input
        self._slots = asyncio.Semaphore(input.concurrency)
        self._done = 0
        self._total = len(input.tasks) * input.samples_per_task
        episodes = [
            self._episode(index * input.samples_per_task + sample, task)
            for index, task in enumerate(input.tasks)
            for sample in range(input.samples_per_task)
        ]
        rewards: dict[str, list[float]] = defaultdict(list)
        for kind, reward in await asyncio.gather(*episodes):
            if reward is not None:
                rewards[kind].append(reward)
        flat = [reward for kind in rewards.values() for reward in kind]
        result = EvaluationResult(
            version=input.version,
            episodes=len(flat),
            mean_reward=sum(flat) / len(flat) if flat else 0.0,
            by_kind={kind: sum(values) / len(values) for kind, values in sorted(rewards.items())},
            excluded=self._total - len(flat),
        )
        await policies.call(
            "record_evaluation",
            EvaluationRecord(run=input.run, result=result),
            type(None),
            policies.LINEAGE,
            summary=f"version {input.version}: mean reward {result.mean_reward:.3f} over {result.episodes}",
        )
        workflow.upsert_search_attributes(
            [POLICY_VERSION.value_set(input.version), REWARD.value_set(result.mean_reward)]
        )
        return result

    async def _episode(self, index: int, task: TaskRef) -> tuple[str, float | None]:
        """(kind of task, reward) of one held-out episode; no reward when infrastructure took all its attempts."""
        kind = task.task_id.rsplit("-", 1)[0]
        async with self._slots:
            for attempt in range(MAX_ATTEMPTS):
                summary = await self._attempt(index, attempt, task)
                if summary.valid:
                    self._progress()
                    return kind, summary.reward
        self._progress()
        return kind, None

    async def _attempt(self, index: int, attempt: int, task: TaskRef) -> EpisodeSummary:
        input = self._input
        episode = EpisodeInput(
            run=input.run,
            group_id=input.evaluation_id,
            index=index,
            attempt=attempt,
            kind=EpisodeKind.EVALUATION,
            model=input.model,
            task=task,
            limits=input.limits,
            seed=derive_seed(input.seed, "evaluation", index),
            priority=-1,
        )
        return await play(episode)

    def _progress(self) -> None:
        self._done += 1
        workflow.set_current_details(f"version {self._input.version}: {self._done} of {self._total} episodes")
