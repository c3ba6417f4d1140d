"""Group: the siblings of one task, which are scored against each other.

Owns the replacement of attempts that infrastructure broke, or whose workflow an operator ended (a fresh attempt with
the same seed, up to a budget for the group), and the closing: it reports exactly one GroupResult to its run by signal,
whatever happens, so that the report arrives after a continue-as-new of the run too.

It closes with its first `group_size` valid siblings; spare ones (`redundancy`) take the places of those that broke, and
what still goes on at the closing is told to end as surplus. So is all of a group whose run sends `surplus`. Each time
that half of its siblings are left which were, it says so, and their places go to another group.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from temporalio import workflow
from temporalio.exceptions import FailureError, TemporalError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attempts import play
    from workflows.attributes import REWARD
    from workflows.closing import close_group
    from workflows.contracts import (
        EpisodeInput,
        EpisodeKind,
        EpisodeSummary,
        GroupInput,
        GroupResult,
        Outcome,
        RecordedGroup,
        SiblingsLeft,
        derive_seed,
    )


@workflow.defn(name="Group")
class Group:
    def __init__(self) -> None:
        self._endings: Counter[str] = Counter()
        self._begun = 0
        self._over = 0
        """Siblings that take no further attempt."""
        self._replaced = 0
        self._spared = 0
        self._first_sibling_at = 0.0
        self._valid: dict[int, EpisodeSummary] = {}
        """By sibling, the first valid ones to end."""
        self._enough = asyncio.Event()
        """No further attempt is needed."""
        self._unwanted = False

    @workflow.signal
    def surplus(self) -> None:
        """Its batch was cut without it: its siblings end, and it closes as surplus."""
        self._unwanted = True
        self._enough.set()

    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        self._input = input
        self._started_at = workflow.now().timestamp()
        try:
            playing = asyncio.gather(*(self._sibling(index) for index in range(input.siblings)))
            await self._until_closable(playing)
            result = self._closed()
            recorded = await policies.call_optional(
                "record_group",
                result,
                RecordedGroup,
                policies.LINEAGE,
                summary=f"{result.group_id}: {self._words(result)}",
            )
            result = result.joined_by(recorded.replay if recorded is not None else "")
        except (asyncio.CancelledError, FailureError) as error:
            reason = "cancelled" if is_cancelled_exception(error) else f"failed: {error}"
            await self._report(self._without_members(reason))
            raise
        await self._report(result)
        workflow.set_current_details(f"**{result.group_id}**: {self._words(result)}, rewards {result.rewards}")
        with suppress(FailureError):
            await playing
        return result

    async def _until_closable(self, playing: asyncio.Future[list[None]]) -> None:
        """The group is whole, or all its siblings have ended."""
        try:
            await workflow.wait_condition(lambda: self._whole or playing.done())
            if playing.done():
                await playing
        except asyncio.CancelledError:
            playing.cancel()
            with suppress(asyncio.CancelledError, FailureError):
                await playing
            raise

    @property
    def _whole(self) -> bool:
        return len(self._valid) == self._input.group_size

    async def _sibling(self, index: int) -> None:
        await self._attempts(index)
        self._over += 1
        left = self._input.siblings - self._over
        if self._input.tells_left and left in _halves(self._input.siblings) and not self._enough.is_set():
            with suppress(TemporalError):
                word = SiblingsLeft(number=self._input.number, left=left)
                await workflow.get_external_workflow_handle(self._input.report_to).signal("siblings_left", word)

    async def _attempts(self, index: int) -> None:
        """Attempts until one is valid, a spare sibling stands in, or the group's replacement budget is spent."""
        attempt = 0
        while not self._enough.is_set():
            summary = await self._attempt(index, attempt)
            if not self._first_sibling_at:
                self._first_sibling_at = workflow.now().timestamp()
            if summary.valid:
                self._take(index, summary)
                return
            if self._spared < self._input.redundancy:
                self._spared += 1
                return
            if self._enough.is_set() or self._replaced >= self._input.max_replacements:
                return
            self._replaced += 1
            attempt += 1

    def _take(self, index: int, summary: EpisodeSummary) -> None:
        if not self._whole:
            self._valid[index] = summary
        if self._whole:
            self._enough.set()

    async def _attempt(self, index: int, attempt: int) -> EpisodeSummary:
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
        self._begun += 1
        summary = await play(episode, enough=self._enough)
        self._endings[summary.outcome] += 1
        return summary

    def _closed(self) -> GroupResult:
        if self._unwanted and not self._whole:
            return self._without_members("surplus")
        return self._kept(close_group(self._input, [self._valid[index] for index in sorted(self._valid)]))

    def _without_members(self, reason: str) -> GroupResult:
        """The group as it was cancelled, failed or surplus: no sibling counts, and that says nothing of the task."""
        return self._kept(
            GroupResult(
                group_id=self._input.group_id,
                number=self._input.number,
                task_id=self._input.task.task_id,
                members=[],
                rewards=[],
                eligible=False,
                reason=reason,
            )
        )

    def _kept(self, result: GroupResult) -> GroupResult:
        """`result` with what the group counted and timed."""
        # What an operator ended, or what failed, ends otherwise.
        going = self._begun - self._endings.total() if self._whole or self._unwanted else 0
        counted = {
            "outcomes": dict(self._endings + Counter({Outcome.SURPLUS.value: going})),
            "replaced": self._replaced,
            "started_at": self._started_at,
            "closed_at": workflow.now().timestamp(),
            "first_sibling_at": self._first_sibling_at,
            "draw": self._input.draw,
        }
        return result.model_copy(update=counted)

    async def _report(self, result: GroupResult) -> None:
        """A run that has ended meanwhile needs no report."""
        if result.rewards:
            mean = sum(result.rewards) / len(result.rewards)
            workflow.upsert_search_attributes([REWARD.value_set(mean)])
        with suppress(TemporalError):
            await workflow.get_external_workflow_handle(self._input.report_to).signal("group_done", result)

    def _words(self, result: GroupResult) -> str:
        joined = f", joined by {result.replay}" if result.replay else ""
        return f"eligible{joined}" if result.eligible else f"not eligible ({result.reason})"


def _halves(count: int) -> set[int]:
    """Half of it, half of that, and so on to 1."""
    found = {count >> shift for shift in range(1, count.bit_length())}
    return found - {0}
