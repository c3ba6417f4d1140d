"""The publication of a version: weights that engines can load and prove, in the object store. Called by TrainingRun.

Promises: the manifest is written after everything that it names is there and has been checked; a version that is
published answers with what was recorded; old versions go only after the newer one is published; the spool is empty
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import col, select, update
from temporalio import activity

from activities.publication.export import canary, export_folder, known_vocabulary
from activities.publication.manifest import Manifest, objects_prefix, upload_folder, weights_key, write_manifest
from activities.publication.retention import remove_old
from activities.training.engine import Trainer
from activities.training.ledger import PUBLISHED, TRAINED
from activities.training.service import TrainerService
from activities.training.transit import transit_folder
from activities.training.work import Work
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch, PolicyVersion, Publication
from workflows.config import RunConfig
from workflows.contracts import PublishInput, PublishOutput

Lap = Callable[[str], None]


class PublicationActivities:
    def __init__(self, trainer_service: TrainerService, store: ObjectStore, database: Engine, spool: Path) -> None:
        self._service = trainer_service
        self._store = store
        self._database = database
        self._spool = spool

    @activity.defn(name="publish")
    async def publish(self, message: PublishInput) -> PublishOutput:
        """Publish the weights of the training state `message.checkpoint` as `message.version`, then apply retention."""
        return await self._service.call(partial(self._publish, message))

    def _publish(self, message: PublishInput, work: Work) -> PublishOutput:
        config = RunConfig.model_validate(message.config)
        with session(self._database) as opened:
            row = opened.get(Publication, (message.run, message.version))
        if row is None:
            row = self._write(message, config, work)
        work.check("removing old versions")
        remove_old(self._store, self._database, run=message.run, keep_last=config.publication.keep_last)
        return PublishOutput(
            version=row.version, manifest=row.manifest, digest=row.digest, bytes=row.bytes, seconds=row.seconds
        )

    def _write(self, message: PublishInput, config: RunConfig, work: Work) -> Publication:
        started = clock = time.monotonic()
        seconds: dict[str, float] = {}

        def lap(part: str) -> None:
            nonlocal clock
            seconds[part], clock = time.monotonic() - clock, time.monotonic()

        trainer = self._service.at(message.checkpoint, config, work)
        lap("load")
        manifest = self._upload(trainer, message, config, work, lap)
        key = weights_key(message.run, message.version)
        write_manifest(self._store, key, manifest)
        lap("manifest")
        seconds["total"] = time.monotonic() - started
        row = Publication(
            run=message.run,
            version=message.version,
            manifest=key,
            digest=manifest.digest,
            bytes=manifest.total_bytes,
            seconds=seconds,
            published_at=time.time(),
        )
        self._record(row, message)
        return row

    def _upload(self, trainer: Trainer, message: PublishInput, config: RunConfig, work: Work, lap: Lap) -> Manifest:
        """Export, check and send everything but the manifest."""
        with transit_folder(self._spool, trainer.parameters * trainer.dtype.itemsize) as folder:
            export_folder(trainer, folder)
            lap("export")
            work.check(f"uploading version {message.version}")
            files = upload_folder(self._store, objects_prefix(message.run), folder, progress=work.moved)
            lap("upload")
        probe = canary(trainer, seed=config.seed, vocabulary=known_vocabulary(trainer))
        lap("canary")
        return Manifest(
            kind="weights",
            run=message.run,
            version=message.version,
            step=message.step,
            world_size=trainer.world_size,
            files=files,
            tensors=trainer.tensors,
            canary=probe,
        )

    def _record(self, row: Publication, message: PublishInput) -> None:
        """The version's rows, idempotent: the primary keys decide, a repetition writes the same."""
        with session(self._database) as opened:
            opened.merge(row)
            trained = select(Batch.id).where(
                Batch.run == message.run, Batch.step == message.step, col(Batch.state).in_((TRAINED, PUBLISHED))
            )
            batch_id = opened.exec(trained).first()
            opened.merge(
                PolicyVersion(
                    run=message.run,
                    version=message.version,
                    step=message.step,
                    batch=batch_id,
                    checkpoint=message.checkpoint,
                    created_at=row.published_at,
                )
            )
            opened.exec(
                update(Batch).where(col(Batch.id) == batch_id, col(Batch.state) == TRAINED).values(state=PUBLISHED)
            )
