"""Group: the siblings of one task, which are scored against each other.

Owns the replacement of attempts that infrastructure broke (a fresh attempt with the same seed, up to a budget for the
group) and the closing: it reports exactly one GroupResult to its run by signal, whatever happens, so that the report
arrives after a continue-as-new of the run too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, FailureError, TemporalError, is_cancelled_exception
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attributes import REWARD, started
    from workflows.contracts import (
        EpisodeInput,
        EpisodeKind,
        EpisodeSummary,
        GroupInput,
        GroupResult,
        Outcome,
        derive_seed,
    )

EPISODE_LIMIT = timedelta(hours=4)
"""Backstop on one attempt; its own budgets end it long before."""


@workflow.defn(name="Group")
class Group:
    def __init__(self) -> None:
        self._endings: Counter[str] = Counter()
        self._replaced = 0
        self._first_sibling_at = 0.0

    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        self._input = input
        self._started_at = workflow.now().timestamp()
        try:
            siblings = await asyncio.gather(*(self._sibling(index) for index in range(input.group_size)))
            result = self._close([sibling for sibling in siblings if sibling is not None])
            await policies.call(
                "record_group",
                result,
                type(None),
                policies.LINEAGE,
                summary=f"{result.group_id}: {self._words(result)}",
            )
        except (asyncio.CancelledError, FailureError) as error:
            reason = "cancelled" if is_cancelled_exception(error) else f"failed: {error}"
            await self._report(self._ended(reason=reason, eligible=False))
            raise
        await self._report(result)
        workflow.set_current_details(f"**{result.group_id}**: {self._words(result)}, rewards {result.rewards}")
        return result

    async def _sibling(self, index: int) -> EpisodeSummary | None:
        """The sibling's first valid attempt; None when the group's replacement budget is spent."""
        attempt = 0
        while True:
            summary = await self._attempt(index, attempt)
            if not self._first_sibling_at:
                self._first_sibling_at = workflow.now().timestamp()
            if summary is not None and summary.valid:
                return summary
            if self._replaced >= self._input.max_replacements:
                return None
            self._replaced += 1
            attempt += 1

    async def _attempt(self, index: int, attempt: int) -> EpisodeSummary | None:
        """One attempt's summary; None when its workflow itself failed, which is our fault or an operator's."""
        input = self._input
        episode = EpisodeInput(
            run=input.run,
            group_id=input.group_id,
            index=index,
            attempt=attempt,
            kind=EpisodeKind.TRAIN,
            model=input.model,
            task=input.task,
            limits=input.limits,
            seed=derive_seed(input.seed, "sibling", index),
        )
        try:
            summary = await start_episode(episode)
        except ChildWorkflowError as error:
            if is_cancelled_exception(error):
                raise
            self._endings[Outcome.UNKNOWN] += 1
            return None
        self._endings[summary.outcome] += 1
        return summary

    def _close(self, siblings: list[EpisodeSummary]) -> GroupResult:
        rewards = [sibling.reward for sibling in siblings if sibling.reward is not None]
        if len(rewards) < self._input.group_size:
            reason = "short_group"
        elif max(rewards) == min(rewards):
            reason = "no_signal"
        else:
            reason = ""
        return self._ended(reason=reason, eligible=not reason, siblings=siblings)

    def _ended(self, *, reason: str, eligible: bool, siblings: list[EpisodeSummary] | None = None) -> GroupResult:
        input, siblings = self._input, siblings or []
        versions = [version for sibling in siblings for version in (sibling.min_version, sibling.max_version)]
        known = [version for version in versions if version is not None]
        return GroupResult(
            group_id=input.group_id,
            number=input.number,
            task_id=input.task.task_id,
            members=[sibling.attempt_id for sibling in siblings],
            rewards=[sibling.reward for sibling in siblings if sibling.reward is not None],
            eligible=eligible,
            reason=reason,
            min_version=min(known, default=None),
            max_version=max(known, default=None),
            outcomes=dict(self._endings),
            replaced=self._replaced,
            sampled_tokens=sum(sibling.sampled_tokens for sibling in siblings),
            started_at=self._started_at,
            closed_at=workflow.now().timestamp(),
            first_sibling_at=self._first_sibling_at,
        )

    async def _report(self, result: GroupResult) -> None:
        """A run that has ended meanwhile needs no report."""
        if result.rewards:
            mean = sum(result.rewards) / len(result.rewards)
            workflow.upsert_search_attributes([REWARD.value_set(mean)])
        with suppress(TemporalError):
            await workflow.get_external_workflow_handle(self._input.report_to).signal("group_done", result)

    def _words(self, result: GroupResult) -> str:
        return "eligible" if result.eligible else f"not eligible ({result.reason})"


async def start_episode(episode: EpisodeInput) -> EpisodeSummary:
    """Run an attempt as a child of the calling workflow. Raises ChildWorkflowError when its workflow fails."""
    summary: EpisodeSummary = await workflow.execute_child_workflow(
        "Episode",
        episode,
        id=episode.attempt_id,
        result_type=EpisodeSummary,
        execution_timeout=EPISODE_LIMIT,
        parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
        search_attributes=started(episode.run, episode.task.task_id),
        static_summary=f"{episode.task.task_id}, sibling {episode.index}, attempt {episode.attempt}",
    )
    return summary
