"""What nobody owns any more: pure rules over what was listed and what was asked. Called by the janitor's activities.

The lists are made before the questions are asked: what came to life in between is not in a list, and whoever is asked
about was there before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from activities.sandbox.owned import Owned
from storage.objects import StoredObject, Upload
from workflows.config import PublicationConfig
from workflows.contracts import JanitorInput

UNOWNED = "unowned"


def due(owned: Iterable[Owned], limits: JanitorInput) -> list[Owned]:
    """Those that are old enough to go if nobody owns them, the oldest first."""
    old = [item for item in owned if item.age_s >= (limits.sandbox_grace_s if item.attempt else limits.unowned_grace_s)]
    return sorted(old, key=lambda item: (-item.age_s, item.id))


def reason_to_remove(item: Owned, endings: Mapping[str, str]) -> str:
    """Why it goes: its episode's ending, or that it is no attempt's; empty where it stays. `endings` holds the empty
    text for an episode that runs; one that was not asked about stays."""
    return endings.get(item.attempt, "") if item.attempt else UNOWNED


def run_of_key(key: str) -> str:
    """`<run>` of `runs/<run>/objects/...`, where a run's id may hold slashes; empty for a key of another kind."""
    head, mark, _ = key.rpartition("/objects/")
    return head.removeprefix("runs/") if mark and head.startswith("runs/") else ""


def stale(uploads: Iterable[Upload], *, over: Collection[str], before: float) -> list[Upload]:
    """Uploads of runs that are over which began before `before`, in seconds since the epoch."""
    return [upload for upload in uploads if upload.started < before and run_of_key(upload.key) in over]


def runs_of_pass(over: Sequence[str], turn: int, *, newest: int, others: int) -> list[str]:
    """The runs that a pass looks at: the `newest`, and `others` of the rest, which come round in turns.

    `over` is ordered from the last that ended to the first; `turn` is the number of the pass."""
    rest = list(over[newest:])
    start = (turn * others) % len(rest) if rest else 0
    return [*over[:newest], *(rest[start:] + rest[:start])[:others]]


def kept_versions(
    published: Collection[int], *, in_use: Collection[int], evaluated: Collection[int], keep: PublicationConfig
) -> set[int]:
    """Versions of a run that is over which stay: those that its configuration keeps, what an engine serves or may still
    be loading, and what an evaluation speaks of."""
    newest = set(sorted(published)[-keep.keep_last :])
    for_good = {version for version in published if keep.keep_every and version % keep.keep_every == 0}
    return newest | for_good | (set(published) & (set(in_use) | set(evaluated)))


def unreferenced(stored: Iterable[StoredObject], referred: Collection[str], *, before: float) -> list[StoredObject]:
    """Objects to which nothing that stays refers and which were written before `before`."""
    return [item for item in stored if item.key not in referred and item.modified < before]
