"""One attempt as its parent sees it: the child workflow, and what is recorded where it ended without its own word.

Called by Group and Evaluation. An Episode reports every ending that it lives to see. One that an operator cancelled or
terminated reports nothing: its sandbox went away without the agent's doing, so it counts as infrastructure's failure,
and the parent goes on. One whose workflow failed or timed out is unknown. Both get their rows here. One that its parent
needs no more is told so, and ends itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, TemporalError, TerminatedError, is_cancelled_exception
from temporalio.workflow import ChildWorkflowHandle, ParentClosePolicy

from workflows import policies
from workflows.attributes import shorten, started
from workflows.contracts import EpisodeInput, EpisodeRecord, EpisodeSummary, StopReason
from workflows.failures import sentence
from workflows.outcome import judge

EPISODE_LIMIT = timedelta(hours=4)
"""Backstop on one attempt; its own budgets end it long before."""


async def play(episode: EpisodeInput, *, enough: asyncio.Event | None = None) -> EpisodeSummary:
    """Run an attempt to its end, whatever its end is; once `enough` is set, it ends as surplus. Raises
    ChildWorkflowError when the calling workflow is cancelled, with its attempts."""
    started_at = workflow.now().timestamp()
    try:
        return await _start(episode, enough)
    except ChildWorkflowError as error:
        if workflow.cancellation_reason() is not None:
            raise
        record = _record(episode, error, started_at)
    await policies.call(
        "record_episode", record, type(None), policies.LINEAGE, summary=f"{record.outcome}: {shorten(record.why)}"
    )
    return EpisodeSummary(**{name: getattr(record, name) for name in EpisodeSummary.model_fields})


async def _start(episode: EpisodeInput, enough: asyncio.Event | None) -> EpisodeSummary:
    handle = await workflow.start_child_workflow(
        "Episode",
        episode,
        id=episode.attempt_id,
        result_type=EpisodeSummary,
        execution_timeout=EPISODE_LIMIT,
        task_timeout=policies.TASK_TIMEOUT,
        parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
        search_attributes=started(episode.run, episode.task.task_id),
        static_summary=f"{episode.task.task_id}, sibling {episode.index}, attempt {episode.attempt}",
    )
    if enough is None:
        return await _ended(handle)
    telling = asyncio.create_task(_tell(handle, enough))
    try:
        return await _ended(handle)
    finally:
        if not enough.is_set():
            telling.cancel()


async def _ended(handle: ChildWorkflowHandle[Any, Any]) -> EpisodeSummary:
    summary: EpisodeSummary = await handle
    return summary


async def _tell(handle: ChildWorkflowHandle[Any, Any], enough: asyncio.Event) -> None:
    """An attempt that has ended meanwhile can't be told any more."""
    await enough.wait()
    if not handle.done():
        with suppress(TemporalError):
            await handle.signal("surplus")


def _record(episode: EpisodeInput, error: ChildWorkflowError, started_at: float) -> EpisodeRecord:
    if is_cancelled_exception(error):
        reason, why = StopReason.SANDBOX_LOST, "an operator cancelled the attempt's workflow"
    elif isinstance(error.cause, TerminatedError):
        reason, why = StopReason.SANDBOX_LOST, "an operator terminated the attempt's workflow"
    else:
        reason, why = StopReason.UNDETERMINED, f"the attempt's workflow failed: {sentence(error)}"
    return EpisodeRecord(
        attempt_id=episode.attempt_id,
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        run=episode.run,
        kind=episode.kind,
        task=episode.task,
        attempt=episode.attempt,
        outcome=judge(reason, None, episode.limits.failure_reward).outcome,
        stop_reason=reason,
        reward=None,
        why=shorten(why, 400),
        seed=episode.seed,
        started_at=started_at,
        ended_at=workflow.now().timestamp(),
    )
