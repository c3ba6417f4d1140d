"""The trainer's activities: bring it up, make an update. Called by TrainingRun on the `training` queue.

Promises: an update is made once per batch id (a batch that is trained answers with what was recorded); it always begins
with the committed state of the step before; a try that was overtaken can't commit; what a killed try leaves behind is
never read.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sqlalchemy import Engine
from temporalio import activity

from activities.publication.manifest import training_state_key
from activities.training import ledger
from activities.training.batch import Trajectory, trajectory
from activities.training.checkpoints import load_training_state, save_training_state
from activities.training.engine import Trainer
from activities.training.service import TrainerService
from activities.training.update import make_update
from activities.training.work import Work
from storage.objects import ObjectStore
from workflows.config import RunConfig
from workflows.contracts import Segment, Timing, TrainerInput, TrainerOutput, UpdateInput, UpdateOutput
from workflows.errors import TrainerError

READERS = 8


class TrainingActivities:
    def __init__(self, trainer_service: TrainerService, store: ObjectStore, database: Engine, spool: Path) -> None:
        self._service = trainer_service
        self._store = store
        self._database = database
        self._spool = spool

    @activity.defn(name="start_trainer")
    async def start_trainer(self, message: TrainerInput) -> TrainerOutput:
        """Build the engine, take over `resume_checkpoint` if there is one, and make the state durable as step 0."""
        return await self._service.call(partial(self._start, message))

    @activity.defn(name="update")
    async def update(self, message: UpdateInput) -> UpdateOutput:
        """Make step `message.step` on its batch and commit it. Raises FencedError when a newer try has begun."""
        queued = _queued_s()
        started = time.monotonic()
        output = await self._service.call(partial(self._update, message))
        return output.model_copy(update={"timing": Timing(queue_s=queued, run_s=time.monotonic() - started)})

    def _start(self, message: TrainerInput, work: Work) -> TrainerOutput:
        config = RunConfig.model_validate(message.config)
        work.check(f"building the trainer of {config.model}")
        trainer = self._service.fresh(config)
        if message.resume_checkpoint:
            load_training_state(trainer, self._store, key=message.resume_checkpoint, spool=self._spool, work=work)
        key = training_state_key(message.run, 0)
        self._save(trainer, message.run, 0, key, work)
        self._service.holds(key)
        return TrainerOutput(checkpoint=key, parameters=trainer.parameters, world_size=trainer.world_size)

    def _update(self, message: UpdateInput, work: Work) -> UpdateOutput:
        row = ledger.batch_row(self._database, message.batch_id)
        if row.state != ledger.RESERVED:
            return UpdateOutput(step=row.step, checkpoint=row.checkpoint, metrics=row.metrics)
        fence = ledger.take_fence(self._database, message.batch_id)
        config = RunConfig.model_validate(message.config)
        seconds: dict[str, float] = {}
        clock = time.monotonic()

        def lap(part: str) -> None:
            nonlocal clock
            seconds[f"seconds/{part}"], clock = time.monotonic() - clock, time.monotonic()

        batch = self._trajectories(message.batch_id, work)
        lap("fetch")
        first = training_state_key(message.run, 0)
        before = ledger.checkpoint_before(self._database, message.run, message.step, first)
        trainer = self._service.at(before, config, work)
        lap("load")
        self._service.leaves_state()
        result = make_update(
            trainer, batch, config=config, step=message.step, policy_version=message.policy_version, work=work
        )
        lap("update")
        ledger.require_fence(self._database, message.batch_id, fence)
        key = training_state_key(message.run, message.step, fence)
        self._save(trainer, message.run, message.step, key, work)
        lap("save")
        metrics = result.metrics | seconds
        ledger.commit(
            self._database,
            message.batch_id,
            fence=fence,
            checkpoint=key,
            metrics=metrics,
            advantages=result.advantages,
        )
        self._service.holds(key)
        return UpdateOutput(step=message.step, checkpoint=key, metrics=metrics)

    def _save(self, trainer: Trainer, run: str, step: int, key: str, work: Work) -> None:
        save_training_state(trainer, self._store, run=run, step=step, key=key, spool=self._spool, work=work)

    def _trajectories(self, batch_id: str, work: Work) -> list[Trajectory]:
        """The batch's episodes as they were recorded. Raises TrainerError (final) where a record contradicts itself."""
        members = ledger.members_of(self._database, batch_id)
        work.check(f"reading {len(members)} trajectories")
        with ThreadPoolExecutor(READERS) as readers:
            read = list(readers.map(lambda item: [self._segment(key) for key in item.segments], members))
        try:
            return [
                trajectory(item.attempt_id, item.group_id, item.reward, segments)
                for item, segments in zip(members, read, strict=True)
            ]
        except ValueError as error:
            raise TrainerError(str(error), retryable=False) from error

    def _segment(self, key: str) -> Segment:
        return Segment.model_validate_json(self._store.get(key))


def _queued_s() -> float:
    """Seconds that the activity waited for this worker."""
    info = activity.info()
    return max(0.0, (info.started_time - info.current_attempt_scheduled_time).total_seconds())
