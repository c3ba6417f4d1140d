"""The janitor's part on rows and objects: runs whose workflow is gone, stale uploads, what nothing refers to.

A run that is open is never touched here: its own publication applies the retention. Promises: of a run that is over
stays all that `keep_last`, an engine, an evaluation or its last checkpoint refers to; an object younger than the grace
stays; a manifest goes before its objects; what lineage knows nothing of, and a run that was started in another Temporal
namespace, is somebody else's; where the namespace does not answer, nothing goes. Called by the Janitor workflow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlmodel import Session, col, select
from temporalio import activity

from activities.janitor.objects import sweep_run
from activities.janitor.rules import run_of_key, runs_of_pass, stale
from activities.lineage.activities import LineageActivities
from activities.lineage.runs import RunControlActivities
from storage import queries
from storage.database import in_transaction
from storage.objects import MissingObject, ObjectStore, Upload
from storage.tables import Run
from workflows.config import PublicationConfig
from workflows.contracts import JanitorInput, Swept
from workflows.errors import StorageError

Value = TypeVar("Value")

NEWEST, OTHERS = 10, 10
"""Runs that are over at which one pass looks: those that ended last, and as many of the others in turns."""
PASS_S = 300
"""Passes are counted in units of this many seconds."""


class RecordJanitorActivities:
    def __init__(
        self,
        lineage: LineageActivities,
        control: RunControlActivities,
        database: Engine,
        store: ObjectStore,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._lineage = lineage
        self._control = control
        self._database = database
        self._store = store
        self._now = now

    @activity.defn(name="close_gone_runs")
    async def close_gone_runs(self, limits: JanitorInput) -> Swept:
        """Close the row of each open run whose workflow does not run any more; its engines become free.

        Raises RPCError, as `sweep_store` does, where the namespace is not there."""
        namespace = await self._control.namespace()
        runs = await self._read(lambda opened: _open_runs(opened, namespace))
        gone = [run for run in runs if not await self._control.lives(run)]
        for run in gone:
            await self._lineage.close_gone(run)
        return Swept(removed={"runs_closed": len(gone)})

    @activity.defn(name="sweep_store")
    async def sweep_store(self, limits: JanitorInput) -> Swept:
        """Stale uploads and unreferenced objects of runs that are over. Raises StorageError."""
        before = self._now() - limits.object_grace_s
        namespace = await self._control.namespace()
        ended = await self._read(lambda opened: _runs_over(opened, before, namespace))
        turn = int(self._now() // PASS_S)
        parts = [await self._sweep_uploads(ended.keys(), before)]
        parts += [
            await self._sweep_objects(run, ended[run], before)
            for run in runs_of_pass(list(ended), turn, newest=NEWEST, others=OTHERS)
        ]
        return Swept.together(parts)

    async def _sweep_uploads(self, ended: Collection[str], before: float) -> Swept:
        uploads = await asyncio.to_thread(self._store.uploads, "runs/")
        owners = {run_of_key(upload.key) for upload in uploads} & set(ended)
        over = {run for run in owners if await self._control.is_over(run)}
        aborted = await asyncio.to_thread(self._abort, stale(uploads, over=over, before=before))
        return Swept(removed={"uploads": aborted})

    def _abort(self, uploads: list[Upload]) -> int:
        for upload in uploads:
            with suppress(MissingObject):
                self._store.abort_upload(upload)
        return len(uploads)

    async def _sweep_objects(self, run: str, keep: PublicationConfig, before: float) -> Swept:
        if not await self._control.is_over(run):
            return Swept()
        try:
            found = await asyncio.to_thread(sweep_run, self._store, self._database, run=run, keep=keep, before=before)
        except StorageError as error:
            return Swept(errors=[f"objects of {run}: {error}"])
        return Swept(removed={"manifests": found.manifests, "objects": found.objects}, bytes=found.bytes)

    async def _read(self, work: Callable[[Session], Value]) -> Value:
        return await in_transaction(self._database, work)


def _open_runs(opened: Session, namespace: str) -> list[str]:
    statement = select(Run.id).where(col(Run.state).not_in(queries.OVER), queries.judged_by(namespace))
    return list(opened.exec(statement).all())


def _runs_over(opened: Session, before: float, namespace: str) -> dict[str, PublicationConfig]:
    """Run -> what it keeps, of the namespace's runs that ended before `before`, the last that ended first."""
    ended = col(Run.state).in_(queries.OVER), col(Run.ended_at) < before
    statement = select(Run).where(*ended, queries.judged_by(namespace))
    rows = opened.exec(statement.order_by(col(Run.ended_at).desc(), Run.id)).all()
    return {row.id: _kept(row.config.get("publication", {})) for row in rows}


def _kept(publication: dict[str, Any]) -> PublicationConfig:
    """Of a row that another build may have written."""
    known = {name: publication[name] for name in ("keep_last", "keep_every") if name in publication}
    return PublicationConfig.model_validate(known)
