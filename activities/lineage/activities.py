"""The lineage activities: short idempotent database writes that the workflows ask for.

Here is what a run notes as it goes: its tasks in order, episodes, groups, batches, evaluations. What is of its own row
is in run_row.py, what draws and changes its tasks in tasks.py. Every write goes through storage/queries.py in one short
transaction, in a thread.
"""

from __future__ import annotations

from sqlmodel import Session
from temporalio import activity

from activities.lineage.run_row import RunActivities
from activities.lineage.tasks import put_task
from storage import archive, evaluations, finish_order, queries
from storage.groups import batch_reward, reserved, sound, trainable
from storage.quarantine import REASON as QUARANTINED
from storage.tables import VOID, Batch
from storage.waiting import wait_of
from tasksets import pick
from workflows.contracts import (
    EpisodeRecord,
    EvaluationRecord,
    GroupResult,
    PickTasksInput,
    PickTasksOutput,
    QuarantineInput,
    RecordedEvaluation,
    RecordedGroup,
    ReserveBatchInput,
    ReserveBatchOutput,
)


class LineageActivities(RunActivities):
    """All of them; RunActivities says what they are handed."""

    @activity.defn(name="pick_tasks")
    async def pick_tasks(self, message: PickTasksInput) -> PickTasksOutput:
        """The next tasks of the run's order, with their rows."""

        def work(opened: Session) -> PickTasksOutput:
            taskset = self._open_taskset(message.taskset)
            refs = pick(taskset, message.split, message.seed, message.cursor, message.count)
            for ref in refs:
                put_task(opened, taskset, ref)
            return PickTasksOutput(tasks=refs)

        return await self._write(work)

    @activity.defn(name="record_episode")
    async def record_episode(self, message: EpisodeRecord) -> None:
        await self._write(lambda opened: queries.put_episode(opened, record=message))

    @activity.defn(name="record_group")
    async def record_group(self, message: GroupResult) -> RecordedGroup:
        """Write the group's row; an archived success may join it."""
        run = message.group_id.rpartition("/")[0]

        def work(opened: Session) -> RecordedGroup:
            replay = archive.replay_for(opened, run=run, result=message)
            queries.put_group(opened, run=run, result=message.joined_by(replay))
            return RecordedGroup(replay=replay)

        return await self._write(work)

    @activity.defn(name="record_quarantine")
    async def record_quarantine(self, message: QuarantineInput) -> None:
        def work(opened: Session) -> None:
            queries.put_quarantine(opened, run=message.run, task=message.task, why=message.why, since=message.since)

        await self._write(work)

    @activity.defn(name="record_evaluation")
    async def record_evaluation(self, message: EvaluationRecord) -> RecordedEvaluation | None:
        """Write the result: a run's own is a point of its curve, and all have a row with their fingerprint. What the
        episodes' rows add up to; None for a record that is older than fingerprints."""
        result, measured = message.result, message.measured

        def work(opened: Session) -> RecordedEvaluation | None:
            if not result.refused and (measured is None or measured.in_run):
                queries.put_evaluation(opened, run=message.run, result=result)
            if measured is None:
                return None
            return evaluations.put_evaluation(opened, run=message.run, result=result, measured=measured)

        return await self._write(work)

    @activity.defn(name="reserve_batch")
    async def reserve_batch(self, message: ReserveBatchInput) -> ReserveBatchOutput:
        """Reserve every valid episode of the groups, each once ever, but for those in quarantine. A batch that they
        were all of is void; one that was reserved before stays as it is."""

        def work(opened: Session) -> ReserveBatchOutput:
            queries.hold_batches(opened, run=message.run)
            finish_order.settle(opened, run=message.run)
            queries.drop_groups(opened, run=message.run, dropped=message.dropped)
            new = opened.get(Batch, message.batch_id) is None
            if new:
                asked = [trainable(opened, group_id=f"{message.run}/g{group.number}") for group in message.groups]
                groups = sound(opened, run=message.run, groups=asked)
            else:
                groups = reserved(opened, batch_id=message.batch_id)
            kept = {group.group_id for group in groups}
            out = [group.number for group in message.groups if f"{message.run}/g{group.number}" not in kept]
            queries.drop_groups(opened, run=message.run, dropped={QUARANTINED: out})
            wait = wait_of(opened, groups=groups, opened_at=message.opened_at, complete_at=message.complete_at)
            episodes = queries.reserve_batch(
                opened,
                batch_id=message.batch_id,
                run=message.run,
                step=message.step,
                policy_version=message.policy_version,
                groups=groups,
                wait=wait,
            )
            batch = opened.get_one(Batch, message.batch_id)
            if new:
                archive.use(opened, batch_id=message.batch_id, group_ids=sorted(kept))
            if new and not groups:
                batch.state, batch.reason = VOID, f"all its {len(message.groups)} groups are in quarantine"
                opened.add(batch)
            reward = batch_reward(opened, batch_id=message.batch_id)
            return ReserveBatchOutput(
                batch_id=message.batch_id,
                episodes=episodes,
                reward=reward,
                wait=wait,
                dropped={QUARANTINED: len(out)} if out else {},
                void=batch.reason if batch.state == VOID else "",
            )

        return await self._write(work)
