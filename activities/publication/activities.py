"""The publication of a version: weights that engines can load and prove, in the object store. Called by TrainingRun.

Promises: the manifest is written after everything that it names is there and has been checked; a version that is
published answers with what was recorded; old versions go only after the newer one is published; the spool is empty
afterwards. Each try is a row from its first part on (storage/weight_tries.py), also of a publisher that is killed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import col, select, update
from temporalio import activity

from activities.publication.export import canary, export_folder, known_vocabulary
from activities.publication.manifest import (
    WEIGHTS_FILE,
    Manifest,
    listed_folder,
    objects_prefix,
    read_manifest,
    weights_key,
    with_checksums,
    write_manifest,
)
from activities.publication.offers import FOLDER, Offers
from activities.publication.repair import damaged, replaced
from activities.publication.retention import remove_old
from activities.publication.sending import Sending, adapter_base, builds_on, new_bytes, room, version_before
from activities.training.engine import Trainer
from activities.training.ledger import PUBLISHED, TRAINED
from activities.training.service import TrainerService
from activities.training.transit import transit_folder
from activities.training.work import Stopped, Work
from storage.database import session
from storage.objects import ObjectStore, sha256_file
from storage.tables import Batch, PolicyVersion, Publication
from storage.weight_tries import CANCELLED, FAILED, Trying
from storage.weight_tries import PUBLISHED as DONE
from workflows.config import RunConfig
from workflows.contracts import PublishInput, PublishOutput, WeightChannel
from workflows.errors import StorageError, TrainerError

KEPT_OFFERS = 2
"""The version that engines serve and the one that they are brought to."""
Lap = Callable[[str], None]
"""Begins a part, and ends the one before: its seconds are the time until the next call."""


class PublicationActivities:
    def __init__(self, trainer_service: TrainerService, store: ObjectStore, database: Engine, spool: Path) -> None:
        self._service = trainer_service
        self._store = store
        self._database = database
        self._spool = spool
        self._offers = Offers(spool / FOLDER)

    @activity.defn(name="publish")
    async def publish(self, message: PublishInput) -> PublishOutput:
        """Publish the weights of the training state `message.checkpoint` as `message.version`, then apply retention."""
        return await self._service.call(partial(self._publish, message))

    def _publish(self, message: PublishInput, work: Work) -> PublishOutput:
        config = RunConfig.model_validate(message.config)
        with session(self._database) as opened:
            row = opened.get(Publication, (message.run, message.version))
        with self._tried(message) as tried:
            if row is None:
                row = self._write(message, config, work, tried)
            elif config.weight_channel is not WeightChannel.S3:
                self._offer_again(row, message, config, work, tried)
            elif message.again:
                row = self._repair(row, message, config, work, tried)
            tried.at("retention")
            bases = int(config.publication.full_every > 1)
            self._offers.keep_last(bases if config.weight_channel is WeightChannel.S3 else KEPT_OFFERS)
            work.check("removing old versions")
            remove_old(self._store, self._database, run=message.run, config=config)
        return PublishOutput(
            version=row.version, manifest=row.manifest, digest=row.digest, bytes=row.bytes, seconds=row.seconds
        )

    @contextmanager
    def _tried(self, message: PublishInput) -> Iterator[Trying]:
        """The row of a try, with how it ended; a publisher that is killed leaves it as it is."""
        tried = Trying(self._database, run=message.run, version=message.version)
        try:
            yield tried
        except Stopped:
            tried.end(CANCELLED, "nobody waited for it any more")
            raise
        except Exception as error:
            tried.end(FAILED, str(error) or type(error).__name__)
            raise
        tried.end(DONE)

    def _write(
        self, message: PublishInput, config: RunConfig, work: Work, tried: Trying, *, digest: str = ""
    ) -> Publication:
        """`digest`: of what was published as this version before, which it must be again."""
        started = clock = time.monotonic()
        seconds: dict[str, float] = {}
        part = ""

        def lap(following: str) -> None:
            nonlocal clock, part
            now = time.monotonic()
            if part:
                seconds[part] = seconds.get(part, 0.0) + now - clock
            clock, part = now, following
            tried.at(following)

        lap("load")
        trainer = self._service.at(message.checkpoint, config, work)
        manifest, size = self._upload(trainer, message, config, work, lap)
        if digest and manifest.digest != digest:
            raise _other_weights(message)
        lap("manifest")
        key = weights_key(message.run, message.version)
        write_manifest(self._store, key, manifest)
        lap("rows")
        seconds["total"] = time.monotonic() - started
        row = Publication(
            run=message.run,
            version=message.version,
            manifest=key,
            digest=manifest.digest,
            bytes=size,
            seconds=seconds,
            published_at=time.time(),
        )
        self._record(row, message)
        return row

    def _upload(
        self, trainer: Trainer, message: PublishInput, config: RunConfig, work: Work, lap: Lap
    ) -> tuple[Manifest, int]:
        """Export, check and send everything but the manifest, which is returned, and the bytes that are new in it."""
        lap("export")
        rules, run = config.publication, message.run
        stored = rules.stores(message.version, config.weight_channel)
        before = version_before(self._database, self._store, run=run, version=message.version)
        compact = stored and rules.full_every > 1
        needed = room(trainer, compact=compact, adapter=config.training.lora_rank > 0)
        with transit_folder(self._spool, needed) as folder:
            sending = Sending(
                self._store,
                folder / "version",
                folder / "delta",
                objects_prefix(run) if stored else "",
                work.moved,
                math.ceil(rules.max_mbytes_per_s * 1e6),
            )
            export_folder(trainer, sending.folder)
            files = listed_folder(sending.folder, sending.prefix)
            tensors = with_checksums(trainer.tensors, sending.folder)
            if compact and before:
                lap("delta")
                work.check(f"comparing version {message.version} with the one before")
                files = sending.compacted(files, tensors, before, self._offers, rules.full_every)
            lap("upload")
            if stored:
                work.check(f"uploading version {message.version}")
                sending.send(files)
            manifest = Manifest(
                kind="weights",
                run=message.run,
                version=message.version,
                step=message.step,
                world_size=trainer.world_size,
                channel=config.weight_channel,
                files=files,
                tensors=tensors,
                builds_on=builds_on(files, before),
                max_mbytes_per_s=rules.max_mbytes_per_s,
            )
            only_stored, weights = config.weight_channel is WeightChannel.S3, manifest.weights_file
            base = adapter_base(manifest, before, sending.folder) if compact and only_stored else None
            if not only_stored or (compact and not weights.adapter):
                lap("offer")
                self._offer(sending.folder, weights.sha256)
        lap("canary")
        probe = canary(trainer, seed=config.seed, vocabulary=known_vocabulary(trainer))
        manifest = manifest.model_copy(update={"canary": probe, "adapter_base": base})
        return manifest, new_bytes(manifest, before)

    def _offer(self, folder: Path, digest: str) -> None:
        self._offers.put(folder / WEIGHTS_FILE, digest)
        self._offers.keep_last(KEPT_OFFERS)

    def _offer_again(
        self, row: Publication, message: PublishInput, config: RunConfig, work: Work, tried: Trying
    ) -> None:
        """Offer a published version where this machine does not, as it is another one or has lost its disk."""
        manifest = read_manifest(self._store, row.manifest)
        digest = manifest.weights_file.sha256
        if self._offers.path(digest).is_file():
            return
        tried.at("offer")
        with self._exported_again(row, message, config, work, digest) as folder:
            self._offer(folder, digest)

    def _repair(
        self, row: Publication, message: PublishInput, config: RunConfig, work: Work, tried: Trying
    ) -> Publication:
        """Replace those objects of a published version that are damaged in the store, or missing there."""
        tried.at("check")
        try:
            manifest = read_manifest(self._store, row.manifest)
            if manifest.digest != row.digest:
                raise StorageError(f"{row.manifest}: not what was published", retryable=False)
        except StorageError as error:
            if error.retryable:
                raise
            tried.note(f"{row.manifest} is damaged in the object store, or missing")
            return self._write(message, config, work, tried, digest=row.digest)
        work.check(f"checking the objects of version {row.version}")
        with transit_folder(self._spool, max(file.bytes for file in manifest.files)) as folder:
            gone = damaged(self._store, manifest, folder, progress=work.moved)
        base = manifest.adapter_base
        # Engines' hosts may add otherwise than this one: what no engine could load by its adapter goes whole.
        if adapter := manifest.weights_file.adapter:
            gone.add(adapter.key)
        if not gone:
            return self._restore_manifest(row, manifest, message, config, work, tried)
        tried.at("repair")
        tried.note(f"{', '.join(sorted(gone))} damaged in the object store")
        with self._exported_again(row, message, config, work, manifest.weights_file.sha256) as folder:
            whole = listed_folder(folder, objects_prefix(message.run))
            manifest, again = replaced(self._restated(manifest, folder, message, config, work), whole, gone)
            for file in again:
                self._store.put_file(file.key, folder / file.name, progress=work.moved)
        if base and base.key in gone and manifest.weights_file.key != base.key:
            # What it was is nowhere to be had: nothing more is laid upon it.
            manifest = manifest.model_copy(update={"adapter_base": None})
        write_manifest(self._store, row.manifest, manifest)
        return row

    def _restore_manifest(
        self,
        row: Publication,
        manifest: Manifest,
        message: PublishInput,
        config: RunConfig,
        work: Work,
        tried: Trying,
    ) -> Publication:
        """Write the manifest again where what it says of its weights is damaged: no engine can prove them by that."""
        try:
            with self._exported_again(row, message, config, work, manifest.weights_file.sha256) as folder:
                restated = self._restated(manifest, folder, message, config, work)
        except TrainerError:
            # A machine that makes other weights of the state can't tell what is true of these; whole objects stay.
            return row
        if restated != manifest:
            tried.at("repair")
            tried.note(f"checksums or canary in {row.manifest} damaged in the object store")
            write_manifest(self._store, row.manifest, restated)
        return row

    def _restated(
        self, manifest: Manifest, folder: Path, message: PublishInput, config: RunConfig, work: Work
    ) -> Manifest:
        """With the checksums and the canary of the weights in `folder`, which the trainer holds."""
        trainer = self._service.at(message.checkpoint, config, work)
        probe = canary(trainer, seed=config.seed, vocabulary=known_vocabulary(trainer))
        return manifest.model_copy(update={"tensors": with_checksums(trainer.tensors, folder), "canary": probe})

    @contextmanager
    def _exported_again(
        self, row: Publication, message: PublishInput, config: RunConfig, work: Work, digest: str
    ) -> Iterator[Path]:
        """The folder of a published version, made from the training state once more. Raises TrainerError (final) where
        that gives other weights than those of sha256 `digest`."""
        trainer = self._service.at(message.checkpoint, config, work)
        with transit_folder(self._spool, trainer.parameters * trainer.dtype.itemsize) as transit:
            folder = transit / "version"
            export_folder(trainer, folder)
            if sha256_file(folder / WEIGHTS_FILE) != digest:
                raise _other_weights(message)
            yield folder

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


def _other_weights(message: PublishInput) -> TrainerError:
    return TrainerError(
        f"{message.checkpoint} gives other weights here than were published as version {message.version}: start a run"
        " from it with resume_from",
        retryable=False,
    )
