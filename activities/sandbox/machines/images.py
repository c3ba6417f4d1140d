"""Images of tasks: pulled, or built from their Dockerfile by the daemon, once per content.

Owns their names and the build. An image that is built carries the hash of its build context as its tag, so whoever
comes first on a machine builds it and everybody else finds it. Where a base image is neither here nor to be had, a
Debian made here stands in for a well-known name, if that was asked for (`local_bases`): such an image has a tag of its
own and a label that says so. Called by `Machines`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.sandbox.boxes import named_disk
from activities.sandbox.daemon import Daemon, Refused, tolerated
from activities.sandbox.machines.bases import STAND_IN, ensure_debian, folder_of, stands_for
from activities.sandbox.machines.build import build
from activities.sandbox.machines.context import context_key
from activities.sandbox.machines.dockerfile import bases, with_bases
from activities.sandbox.snapshots import Snapshots
from tasksets.base import ImageSource
from workflows.errors import SandboxError

log = logging.getLogger(__name__)

REPOSITORY = "ratchet/task"
LOCAL = f"-local-{STAND_IN}"
"""Ending of the tag of an image that was built on a Debian made here."""
BASES = "ratchet.local-bases"
"""Label with the names that it stands for."""
PULL_S = 900.0
BUILDS = 2
"""At once."""
UNREACHABLE_S = 300.0
"""How long a registry that could not be reached is left alone."""


@dataclass(frozen=True)
class TaskImage:
    id: str
    local_bases: tuple[str, ...] = ()
    """Names of images for which a Debian made here stands in."""


class TaskImages:
    def __init__(self, daemon: Daemon, state: Path, *, local_bases: bool = False) -> None:
        self._daemon = daemon
        self._state = state
        self._locks = Snapshots(state / "image-locks")
        self._local_bases = local_bases
        self._builds = asyncio.Semaphore(BUILDS)
        self._keys: dict[str, str] = {}
        self._unreachable: dict[str, float] = {}

    async def ensure(self, source: ImageSource) -> TaskImage:
        """The image, made if it isn't there. Raises SandboxError, final where another try would fail the same way."""
        if source.reference:
            if found := await self._inspect(source.reference):
                return _image(found)
            if not source.context or not self._reaches(source.reference):
                return await self._pulled(source.reference)
            try:
                return await self._pulled(source.reference)
            except SandboxError as error:
                log.warning("%s; it is built from its Dockerfile instead", error)
        return await self._built(source)

    async def _built(self, source: ImageSource) -> TaskImage:
        key = await asyncio.to_thread(self._key, source)
        if found := await self._known(key):
            return found
        with named_disk():
            async with self._locks.alone(key):
                return await self._known(key) or await self._build(source, key)

    async def _known(self, key: str) -> TaskImage | None:
        for tag in (f"{REPOSITORY}:{key}", f"{REPOSITORY}:{key}{LOCAL}"):
            if found := await self._inspect(tag):
                return _image(found)
        return None

    def _key(self, source: ImageSource) -> str:
        """Read once per process, as the taskset is."""
        whole = source.model_dump_json()
        if whole not in self._keys:
            self._keys[whole] = context_key(Path(source.context), source.dockerfile, source.args)
        return self._keys[whole]

    async def _build(self, source: ImageSource, key: str) -> TaskImage:
        context = Path(source.context).resolve()
        if not (context / source.dockerfile).resolve().is_relative_to(context):
            raise SandboxError(f"{source.dockerfile} leads out of the build context", retryable=False)
        try:
            text = (Path(source.context) / source.dockerfile).read_text()
        except (OSError, ValueError) as error:
            raise SandboxError(f"{source.dockerfile} can't be read: {error}", retryable=False) from error
        instead = await self._instead(bases(text, source.args))
        tag = f"{REPOSITORY}:{key}{LOCAL if instead else ''}"
        labels = {BASES: json.dumps(sorted(instead)), "ratchet.task": key}
        async with self._builds:
            with tempfile.TemporaryFile() as archive:
                changed = with_bases(text, source.args, instead, {name: folder_of(name) for name in instead})
                await build(self._daemon, source, changed, tag, labels, archive)
        found = await self._inspect(tag)
        if found is None:
            raise SandboxError(f"{tag} was built and is not there")
        return _image(found)

    async def _instead(self, names: list[str]) -> dict[str, str]:
        """What stands in for base images; the others are there after this. Raises SandboxError."""
        instead = {}
        for name in names:
            if await self._inspect(name):
                continue
            if self._local_bases and stands_for(name):
                async with self._locks.alone("debian"):
                    instead[name] = await ensure_debian(self._daemon, self._state / "bases")
                log.warning("%s stands in for %s", instead[name], name)
            else:
                await self._pulled(name)
        return instead

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        with tolerated(404):
            found: dict[str, Any] = await self._daemon.call("inspect image", lambda client: client.images.inspect(name))
            return found
        return None

    def _reaches(self, name: str) -> bool:
        """Whether the registry of that name may be worth another try."""
        return time.monotonic() > self._unreachable.get(_registry(name), 0.0)

    async def _pulled(self, name: str) -> TaskImage:
        """Raises SandboxError that says what can be done."""
        hint = f"`docker load` it, or let a Debian made here stand in with RATCHET_LOCAL_BASES=1 ({name})"
        hint = hint if stands_for(name) and not self._local_bases else f"`docker load` it ({name})"
        if not self._reaches(name):
            raise SandboxError(f"the registry of {name} could not be reached a moment ago: {hint}")
        reference = name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"
        try:
            await self._daemon.call("pull", lambda client: client.images.pull(reference), queued=False, limit_s=PULL_S)
        except SandboxError as error:
            words = f"{name} is not on this machine and can't be pulled: {hint}: {error}"
            if isinstance(error, Refused) and error.status == 404:
                raise SandboxError(words, retryable=False) from error
            self._unreachable[_registry(name)] = time.monotonic() + UNREACHABLE_S
            raise SandboxError(words) from error
        found = await self._inspect(reference)
        if found is None:
            raise SandboxError(f"{name} was pulled and is not there")
        return _image(found)


def _image(found: dict[str, Any]) -> TaskImage:
    labels = (found.get("Config") or {}).get("Labels") or {}
    return TaskImage(str(found["Id"]), tuple(json.loads(labels.get(BASES, "[]"))))


def _registry(name: str) -> str:
    """The host that is asked for an image. Example: _registry("ghcr.io/a/b:c") == "ghcr.io"."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"
