"""The trainer's activities: bring it up, make an update. Called by TrainingRun on the `training` queue.

Promises: an update is made once per batch id (a batch that is closed answers with what was recorded); it always
begins with the committed state of the step before; a try that was overtaken can't commit; what a killed try leaves
behind is never read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlalchemy import Engine
from temporalio import activity

from activities.publication.manifest import training_state_key
from activities.training import ledger
from activities.training.batch import Trajectory, trajectories
from activities.training.checkpoints import load_training_state, note_state, save_training_state
from activities.training.engine import Trainer
from activities.training.scoring import divergences
from activities.training.service import TrainerService
from activities.training.update import make_update, require_finite, warning_of
from activities.training.work import Work
from storage.groups import left_out
from storage.objects import ObjectStore
from storage.scores import Scores, scores_key, write_scores
from storage.tables import VOID, Batch
from workflows.config import RunConfig, model_folder
from workflows.contracts import (
    ScoreInput,
    ScoreOutput,
    Segment,
    Timing,
    TrainerInput,
    TrainerOutput,
    UpdateInput,
    UpdateOutput,
    WeightChannel,
)
from workflows.errors import TrainerError

READERS = 8
log = logging.getLogger(__name__)


class TrainingActivities:
    """`models_dir` holds the bootstrapped policies by name."""

    def __init__(
        self, trainer_service: TrainerService, store: ObjectStore, database: Engine, spool: Path, models_dir: Path
    ) -> None:
        self._service = trainer_service
        self._models_dir = models_dir
        self._store = store
        self._database = database
        self._spool = spool
        trainer_service.redo = self._redo

    async def get_ready(self) -> None:
        """Take up the state that the running run's next update begins with, while its groups are still being played:
        after a restart the libraries and the state take longer than a small update. Nobody waits for this, so what
        fails here is only logged; the update meets it again and tells it."""
        try:
            found = await asyncio.to_thread(ledger.running_state, self._database)
            if found is None:
                return
            run, raw, checkpoint = found
            config = RunConfig.model_validate(raw)
            if config.weight_channel is WeightChannel.COLOCATED:
                # The device is the engines' until they make room.
                return
            # The workflow's own configuration names the folder, the run's row what run.json has.
            config = config.model_copy(update={"model": str(model_folder(config.model, self._models_dir))})
            key = checkpoint or training_state_key(run, 0)
            await self._service.call(lambda work: self._service.at(key, config, work))
            log.info("%s: ready to go on from %s", run, key)
        except Exception:
            log.exception("not ready before the update")

    @activity.defn(name="start_trainer")
    async def start_trainer(self, message: TrainerInput) -> TrainerOutput:
        """Build the engine, take over `resume_checkpoint` if there is one, and make the state durable as step 0."""
        return await self._service.call(partial(self._start, message))

    @activity.defn(name="update")
    async def update(self, message: UpdateInput) -> UpdateOutput:
        """Make step `message.step` on its batch and commit it; a batch that teaches nothing is committed as void, with
        the trainer as it was. Raises FencedError when a newer try has begun."""
        queued = _queued_s()
        started = time.monotonic()
        output = await self._service.call(partial(self._update, message))
        return output.model_copy(update={"timing": Timing(queue_s=queued, run_s=time.monotonic() - started)})

    @activity.defn(name="score")
    async def score(self, message: ScoreInput) -> ScoreOutput:
        """How far each group's policy is from the state `message.checkpoint`; changes nothing."""
        queued = _queued_s()
        started = time.monotonic()
        found = await self._service.call(partial(self._score, message))
        return ScoreOutput(divergences=found, timing=Timing(queue_s=queued, run_s=time.monotonic() - started))

    def _score(self, message: ScoreInput, work: Work) -> list[float]:
        config = RunConfig.model_validate(message.config)
        ids = [f"{message.run}/g{number}" for number in message.groups]
        members = [one for group_id in ids for one in ledger.members_of_group(self._database, group_id)]
        batch = self._trajectories(members, work)
        found = divergences(self._service.at(message.checkpoint, config, work), batch, config=config, work=work)
        return [found[group_id] for group_id in ids]

    def _start(self, message: TrainerInput, work: Work) -> TrainerOutput:
        config = RunConfig.model_validate(message.config)
        work.check(f"building the trainer of {config.model}")
        trainer = self._service.fresh(config)
        if message.resume_checkpoint:
            key, reshape = message.resume_checkpoint, config.training.reshape_checkpoint
            load_training_state(trainer, self._store, key=key, spool=self._spool, work=work, reshape=reshape)
        key = training_state_key(message.run, 0)
        self._save(trainer, message.run, 0, key, work)
        self._service.holds(key)
        return TrainerOutput(checkpoint=key, parameters=trainer.parameters, world_size=trainer.world_size)

    def _update(self, message: UpdateInput, work: Work) -> UpdateOutput:
        config = RunConfig.model_validate(message.config)
        row = ledger.batch_row(self._database, message.batch_id)
        if row.state != ledger.RESERVED:
            return _answer(row, config)
        fence = ledger.take_fence(self._database, message.batch_id)
        seconds: dict[str, float] = {}
        clock = time.monotonic()

        def lap(part: str) -> None:
            nonlocal clock
            seconds[f"seconds/{part}"], clock = time.monotonic() - clock, time.monotonic()

        batch = self._trajectories(ledger.members_of(self._database, message.batch_id), work)
        lap("fetch")
        first = training_state_key(message.run, 0)
        before = ledger.checkpoint_before(self._database, message.run, message.step, first)
        trainer = self._service.at(before, config, work)
        lap("load")
        self._service.leaves_state()
        result = make_update(
            trainer, batch, config=config, step=message.step, policy_version=message.policy_version, work=work
        )
        require_finite(result.metrics, message.step)
        lap("update")
        if result.scores:
            scores = Scores(policy_version=message.policy_version, logprobs=result.scores)
            write_scores(self._store, scores_key(message.run, message.step, fence), scores)
        metrics = result.metrics | {"groups/short_share": ledger.short_share(self._database, message.batch_id)}
        if result.void:
            ledger.commit_void(
                self._database, message.batch_id, fence=fence, reason=result.void, metrics=metrics | seconds
            )
            self._service.holds(before)
        else:
            ledger.require_fence(self._database, message.batch_id, fence)
            key = training_state_key(message.run, message.step, fence)
            if message.step % config.training.checkpoint_every and message.step < config.training.steps:
                note_state(
                    self._store,
                    run=message.run,
                    step=message.step,
                    key=key,
                    before=before,
                    batch_id=message.batch_id,
                )
            else:
                self._save(trainer, message.run, message.step, key, work)
            lap("save")
            ledger.commit(
                self._database,
                message.batch_id,
                fence=fence,
                checkpoint=key,
                metrics=metrics | seconds,
                advantages=result.advantages,
            )
            self._service.holds(key)
        return _answer(ledger.batch_row(self._database, message.batch_id), config)

    def _redo(self, trainer: Trainer, batch_id: str, config: RunConfig, work: Work) -> None:
        """The step that a committed batch made, on the state that it began with."""
        row = ledger.batch_row(self._database, batch_id)
        batch = self._trajectories(ledger.members_of(self._database, batch_id), work)
        make_update(trainer, batch, config=config, step=row.step, policy_version=row.policy_version, work=work)

    def _save(self, trainer: Trainer, run: str, step: int, key: str, work: Work) -> None:
        save_training_state(trainer, self._store, run=run, step=step, key=key, spool=self._spool, work=work)

    def _trajectories(self, members: list[ledger.Member], work: Work) -> list[Trajectory]:
        """Episodes as they were recorded. Raises TrainerError (final) where a record contradicts itself."""
        work.check(f"reading {len(members)} trajectories")
        with ThreadPoolExecutor(READERS) as readers:
            read = list(readers.map(lambda item: [self._segment(key) for key in item.segments], members))
        try:
            return [
                replace(branch, replayed=item.replayed)
                for item, segments in zip(members, read, strict=True)
                for branch in trajectories(item.attempt_id, item.group_id, item.reward, segments)
            ]
        except ValueError as error:
            raise TrainerError(str(error), retryable=False) from error

    def _segment(self, key: str) -> Segment:
        return Segment.model_validate_json(self._store.get(key))


def _answer(row: Batch, config: RunConfig) -> UpdateOutput:
    """What the committed row says: the same from the try that wrote it and from any later one."""
    void = row.reason if row.state == VOID else ""
    return UpdateOutput(
        step=row.step,
        checkpoint=row.checkpoint,
        metrics=row.metrics,
        void=void,
        dropped=left_out(row.metrics),
        warning=warning_of(row.metrics, config.training),
    )


def _queued_s() -> float:
    """Seconds that the activity waited for this worker."""
    info = activity.info()
    return max(0.0, (info.started_time - info.current_attempt_scheduled_time).total_seconds())
