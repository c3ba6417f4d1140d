"""Sandboxes that nobody has asked for yet, as they lie on this host: `<state>/pool/<key>/<member>/{labels.json,box/}`.

Owns the taking: it is one rename under the lock of the pool, so of many worker processes one gets a member, whoever
started it; before that, the folder's labels say whose it becomes, so that there is no moment at which a crash leaves
one that nobody finds. `starting` holds those that don't answer yet, `retired` those that go. Their owner is a file
beside the pool that a process holds a lock on for its life, which is seen across containers too. Blocking, a fraction
of a millisecond each; no daemon. Called by `WarmPool` and, when a member is to be removed, by `DockerBackend`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from activities.sandbox.boxes import CONTAINER, Boxes, Folder, folders_below, make_folder, read_labels, write_labels

PREFIX = "ratchet-pool-"
"""What a member's container is called, also once it is an attempt's."""
STARTING, RETIRED = "starting", "retired"
CONTAINER_ID, IMAGE_ID = "ratchet.container-id", "ratchet.image-id"
OWNER = "ratchet.owner"


@dataclass(frozen=True)
class Member:
    """One that answers and waits. `age_s` counts from then."""

    id: str
    age_s: float


class Members:
    """`root` is `<state>/pool`; `boxes` are the folders of those that were taken, on the same file system."""

    def __init__(self, root: Path, boxes: Boxes) -> None:
        self._root = root
        self._boxes = boxes
        self._owners = root.with_name(f"{root.name}-owners")
        self._owner = ""
        self._held: int | None = None
        self._owning = threading.Lock()

    def make(self, labels: dict[str, str]) -> tuple[str, Path]:
        """(id, box) of a member that is about to start."""
        member = PREFIX + uuid.uuid4().hex[:20]
        return member, make_folder(self._root / STARTING / member, labels | {OWNER: self._own()})

    def _own(self) -> str:
        """This process's name as an owner, which lives as long as it does."""
        with self._owning:
            if self._held is None:
                owner = uuid.uuid4().hex[:20]
                self._owners.mkdir(parents=True, exist_ok=True)
                self._held = os.open(self._owners / owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX)
                self._owner = owner
            return self._owner

    def disown(self) -> None:
        """What this process started and is still there is nobody's, as after its death."""
        with self._owning:
            if self._held is not None:
                (self._owners / self._owner).unlink(missing_ok=True)
                os.close(self._held)
                self._held = None

    def orphans(self) -> set[str]:
        """Those whose owner is dead."""
        owners: dict[str, str] = {}
        for path in self._root.glob(f"*/{PREFIX}*"):
            with suppress(OSError, ValueError):
                # No labels: it is being made, or was moved meanwhile.
                if labels := read_labels(path):
                    owners[path.name] = labels.get(OWNER, "")
        dead = {owner for owner in set(owners.values()) if not self._lives(owner)}
        for owner in dead - {""}:
            (self._owners / owner).unlink(missing_ok=True)
        return {member for member, owner in owners.items() if owner in dead}

    def _lives(self, owner: str) -> bool:
        try:
            descriptor = os.open(self._owners / owner, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def offer(self, member: str, key: str, *, container_id: str, image_id: str) -> None:
        """From now on it may be taken by whoever wants a sandbox of this key. One that was retired meanwhile is not."""
        folder = self._root / STARTING / member
        with self._locked(), suppress(FileNotFoundError):
            facts = {CONTAINER: member, CONTAINER_ID: container_id, IMAGE_ID: image_id}
            write_labels(folder, read_labels(folder) | facts)
            (self._root / key).mkdir(exist_ok=True)
            folder.rename(self._root / key / member)

    def take(self, key: str, sandbox_id: str, labels: dict[str, str], *, most_age_s: float) -> dict[str, str] | None:
        """Make the oldest member of the key, below that age, the sandbox `sandbox_id`: its labels from now on. None
        where there is none, or where the sandbox is there already."""
        with self._locked():
            ready = [member for member in self._below(key) if member.age_s < most_age_s]
            if not ready or self._boxes.there(sandbox_id):
                return None
            folder = self._root / key / max(ready, key=lambda member: member.age_s).id
            taken = read_labels(folder) | labels
            write_labels(folder, taken)
            self._boxes.root.mkdir(parents=True, exist_ok=True)
            self._boxes.root.chmod(0o700)
            folder.rename(self._boxes.root / sandbox_id)
            return taken

    def retire(self, member: str) -> bool:
        """Whether it may be removed: from now on nobody takes it. False for one that is an attempt's."""
        with self._locked():
            for folder in self._root.glob(f"*/{member}"):
                (self._root / RETIRED).mkdir(exist_ok=True)
                if folder.parent.name != RETIRED:
                    folder.rename(self._root / RETIRED / member)
                return True
            return all(folder.labels.get(CONTAINER) != member for folder in self._boxes.all(0.0).values())

    def forget(self, member: str) -> None:
        """Remove the folder of one that was retired."""
        shutil.rmtree(self._root / RETIRED / member, ignore_errors=True)

    def ready(self) -> dict[str, list[Member]]:
        """By key."""
        keys = [path.name for path in self._root.glob("*") if path.is_dir() and path.name not in (STARTING, RETIRED)]
        return {key: self._below(key) for key in keys}

    def unready(self) -> list[Member]:
        """Those that start or go; a long time after, whoever began that is dead."""
        return [*self._below(STARTING), *self._below(RETIRED)]

    def all(self, now: float) -> dict[str, Folder]:
        """The folders of all that are not taken, by id."""
        found: dict[str, Folder] = {}
        for path in self._root.glob("*"):
            if path.is_dir():
                found |= folders_below(path, now)
        return found

    def _below(self, key: str) -> list[Member]:
        now, found = time.time(), []
        for folder in (self._root / key).glob("*"):
            with suppress(FileNotFoundError):
                found.append(Member(folder.name, now - folder.stat().st_mtime))
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # The process's death lets go of it as well.
            os.close(descriptor)
