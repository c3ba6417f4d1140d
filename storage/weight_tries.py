"""The record of tries at weight updates: what was begun, in which part it was, how it ended. Written by the publisher
and by each engine's loader, read by the report.

A try is a row from its first part on, so that one whose process is killed is there all the same: the next try at the
same place completes it. Nothing waits for these writes but a try's end, and none of them can fail a load.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from sqlalchemy import Engine
from sqlmodel import Session, col, select, update

from storage.database import session
from storage.queries import upsert
from storage.tables import EngineLoad, Publication, WeightTry
from workflows.errors import StorageError

PUBLISHED = "published"
PROVEN = "proven"
UNPROVEN = "unproven"
FAILED = "failed"
CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
RESTARTED = "restarted"
GOOD = (PUBLISHED, PROVEN)
LOST_SIGHT = "its process ended in the middle of it"
WHY_CHARS = 1000

log = logging.getLogger(__name__)


class Trying:
    """One try. `engine` empty: at the publication of the version. For one thread at a time."""

    def __init__(self, database: Engine, *, run: str, version: int, engine: str = "") -> None:
        self._database = database
        self._values: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "run": run,
            "version": version,
            "engine": engine,
            "part": "",
            "began_at": time.time(),
        }
        self._noted: tuple[str, str] | None = None
        self._writer: ThreadPoolExecutor | None = None

    def at(self, part: str) -> None:
        """The part that begins now. Returns at once."""
        self._values["part"] = part
        self._write()

    def end(self, ended: str, why: str = "", *, part: str = "") -> None:
        """How it ended; returns once that is written. `part` where none was begun. Only the first end counts."""
        if "ended" in self._values:
            return
        if self._noted and ended in GOOD:
            part, why = self._noted
            self._values["part"] = part
        elif self._noted:
            why = f"{self._noted[1]}; {why}"
        self._values |= {"ended": ended, "why": why[:WHY_CHARS], "ended_at": time.time()}
        self._values["part"] = self._values["part"] or part
        self._write().result()
        if self._writer is not None:
            self._writer.shutdown()

    def note(self, why: str) -> None:
        """What this part has to put right: kept, whatever the end."""
        self._noted = (self._values["part"], why)
        self._values["why"] = why[:WHY_CHARS]
        self._write()

    @property
    def begun(self) -> bool:
        return bool(self._values["part"])

    def _write(self) -> Future[None]:
        first = self._writer is None
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="weight-try")
        return self._writer.submit(self._put, dict(self._values), first)

    def _put(self, values: dict[str, Any], first: bool) -> None:
        same = (col(WeightTry.run) == values["run"], col(WeightTry.engine) == values["engine"])
        left = update(WeightTry).where(*same, col(WeightTry.ended) == "", col(WeightTry.id) != values["id"])
        try:
            with session(self._database) as opened:
                if first:
                    opened.exec(left.values(ended=INTERRUPTED, why=LOST_SIGHT, ended_at=time.time()))
                upsert(opened, WeightTry(**values))
        except StorageError as error:
            log.warning("version %d: its try is not on record: %s", values["version"], error)


def wrong(row: WeightTry) -> bool:
    """Whether it did not go as it should: it failed, or found something that it had to put right."""
    return bool(row.ended) and (row.ended not in GOOD or bool(row.why))


class Trouble(NamedTuple):
    """A version that was not published, or not proven by an engine, at the first try."""

    version: int
    engine: str
    """Empty: its publication."""
    tries: list[WeightTry]
    """In the order in which they began, restarts of the engine among them."""
    overtaken_by: int | None
    """A later version that got there; None where this one did in the end, or nothing has since."""


def troubles(opened: Session, *, run: str) -> list[Trouble]:
    """In the order in which they began."""
    rows = opened.exec(select(WeightTry).where(WeightTry.run == run).order_by(col(WeightTry.began_at))).all()
    tried: dict[tuple[int, str], list[WeightTry]] = defaultdict(list)
    for row in rows:
        tried[row.version, row.engine].append(row)
    there = _there(opened, run)
    found = []
    for (version, engine), tries in tried.items():
        if not any(wrong(row) for row in tries):
            continue
        good = any(row.ended in GOOD for row in tries)
        later = [other for other in there[engine] if other > version]
        found.append(Trouble(version, engine, tries, min(later) if later and not good else None))
    return sorted(found, key=lambda trouble: trouble.tries[0].began_at)


def _there(opened: Session, run: str) -> dict[str, set[int]]:
    """By engine the versions that it has proven; under the empty name, those that were published."""
    found: dict[str, set[int]] = defaultdict(set)
    found[""].update(opened.exec(select(Publication.version).where(Publication.run == run)).all())
    for load in opened.exec(select(EngineLoad).where(EngineLoad.run == run, EngineLoad.proven)).all():
        found[load.engine].add(load.version)
    return found
