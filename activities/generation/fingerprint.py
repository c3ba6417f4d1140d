"""The `fingerprint` activity, and the watch beside the engines: what serves, asked of the engines that serve.

A serving fingerprint is a flat record: the engine's part is its own account (serving_facts.py), the weights are those
of the manifest that its label stands for, the rest is what it is sent: template, prompts, tasks, sampling. Promises:
nothing in it is assumed from a configuration, and what any engine was last seen to serve is a row, by which a report
knows that an earlier result is not of what serves now. Called by the Evaluation workflow.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy import Engine
from temporalio import activity

from activities.generation.engine import EngineClient
from activities.publication.manifest import read_manifest
from storage import evaluations
from storage.database import session
from storage.objects import ObjectStore
from tasksets.base import ImageSource, Task, Taskset
from workflows.contracts import (
    WEIGHTS,
    EngineInfo,
    Fact,
    FingerprintInput,
    FingerprintOutput,
    RolloutLimits,
    TaskRef,
    parse_policy_label,
    policy_label,
)
from workflows.errors import EngineError, RatchetError

DIGITS = 16
"""Of a digest within a fingerprint."""
LOOK_EVERY_S = 20.0
NOT_OF_IT = {"kv", "generate_timeout_s", "replay_on_loss", "sandboxes", "runtime", "context_length"}
"""Limits of an episode that change nothing of what it is worth, or that another field says."""
HARNESS = ("harness.py", "harnesses.py", "tool_calls.py")
"""What the agent is told and how its text is read, beside this module."""

Connect = Callable[[EngineInfo], EngineClient]
log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """One engine that carries the version."""

    facts: dict[str, Fact]
    parameters: str
    """Digest of those that it holds."""


class FingerprintActivities:
    """`open_taskset` gives the taskset of a name."""

    def __init__(
        self,
        store: ObjectStore,
        database: Engine,
        open_taskset: Callable[[str], Taskset],
        *,
        connect: Connect = EngineClient,
    ) -> None:
        self._store = store
        self._database = database
        self._open_taskset = open_taskset
        self._connect = connect

    @activity.defn(name="fingerprint")
    async def fingerprint(self, message: FingerprintInput) -> FingerprintOutput:
        """Ask every engine. Raises EngineError, retryable, while none carries the version; StorageError; InvalidConfig
        for a task that is not there."""
        asked = await asyncio.gather(*(self._ask(engine, message) for engine in message.engines))
        pairs = list(zip(message.engines, asked, strict=True))
        seen = {engine.name: found for engine, found in pairs if isinstance(found, Seen)}
        left_out = {engine.name: found for engine, found in pairs if isinstance(found, str)}
        if not seen:
            found = "; ".join(f"{name} {why}" for name, why in left_out.items()) or "none is configured"
            raise EngineError(f"no engine carries version {message.version} of {message.run}: {found}")
        if refused := _differences(seen):
            return FingerprintOutput(left_out=left_out, refused=refused)
        manifest = await asyncio.to_thread(read_manifest, self._store, message.manifest)
        own = await asyncio.to_thread(self._own, message)
        first = next(iter(seen.values()))
        for name, one in seen.items():
            await asyncio.to_thread(note, self._database, message.run, message.version, name, one.facts)
        return FingerprintOutput(
            fields=first.facts | {WEIGHTS: manifest.digest[:DIGITS]} | own,
            engines={name: one.parameters for name, one in seen.items()},
            left_out=left_out,
        )

    async def _ask(self, engine: EngineInfo, message: FingerprintInput) -> Seen | str:
        """What it serves; in words where that is not the version."""
        client = self._connect(engine)
        try:
            label = await client.label()
            if label != policy_label(message.run, message.version):
                return f"carries {label!r}"
            return Seen(await client.serving(), await client.digest())
        except EngineError as error:
            return f"does not answer: {error}"
        finally:
            await client.close()

    def _own(self, message: FingerprintInput) -> dict[str, Fact]:
        """What the engines are sent."""
        tasks = [self._open_taskset(ref.taskset).load(ref.task_id) for ref in message.tasks]
        return {
            **model_facts(Path(message.model)),
            "harness_digest": _digest(_sources()),
            "taskset": ", ".join(sorted({ref.taskset for ref in message.tasks})),
            "taskset_digest": taskset_digest(message.tasks, tasks),
            **sampling_facts(message.limits),
        }


def note(database: Engine, run: str, version: int, engine: str, facts: dict[str, Fact]) -> None:
    """Write down what an engine was seen to serve."""
    with session(database) as opened:
        evaluations.put_serving(opened, run=run, version=version, engine=engine, facts=facts, seen_at=time.time())


def _differences(seen: dict[str, Seen]) -> str:
    """Why engines that all carry the version are not one; empty where they are."""
    (first, reference), *others = seen.items()
    for name, one in others:
        names = sorted(reference.facts.keys() | one.facts.keys())
        apart = [key for key in names if reference.facts.get(key) != one.facts.get(key)]
        if apart:
            what = ", ".join(f"{key} {reference.facts.get(key)} and {one.facts.get(key)}" for key in apart)
            return f"{first} and {name} serve differently, and one result may not mix them: {what}"
        if reference.parameters != one.parameters:
            return f"{first} and {name} hold different parameters under the same version"
    return ""


def model_facts(folder: Path) -> dict[str, Fact]:
    """Digests of what stands between words and token ids, and of the architecture."""
    written = folder / "chat_template.jinja"
    settings = folder / "tokenizer_config.json"
    template: bytes = b""
    if written.is_file():
        template = written.read_bytes()
    elif settings.is_file():
        template = str(json.loads(settings.read_text()).get("chat_template", "")).encode()
    return {
        "architecture": _digest(_present(folder / "config.json")),
        "tokenizer": _digest(_present(folder / "tokenizer.json")),
        "chat_template": _digest([template]),
    }


def _present(path: Path) -> list[bytes]:
    return [path.read_bytes()] if path.is_file() else []


def _sources() -> Iterable[bytes]:
    return (part for name in HARNESS for part in _present(Path(__file__).with_name(name)))


def sampling_facts(limits: RolloutLimits) -> dict[str, Fact]:
    """What an episode may use, and how its tokens are drawn."""
    own = {"context_length": limits.context_length, **limits.model_dump(mode="json", exclude=NOT_OF_IT)}
    return {name: value if isinstance(value, Fact) else json.dumps(value) for name, value in own.items()}


def taskset_digest(refs: Sequence[TaskRef], tasks: Sequence[Task]) -> str:
    """Digest of what these tasks are, in the order of their ids: instructions, setups, verifiers, files of machines.
    Where those lie on this host is not part of it."""
    content = hashlib.sha256()
    for ref, task in sorted(zip(refs, tasks, strict=True), key=lambda pair: (pair[0].taskset, pair[0].task_id)):
        content.update(json.dumps([ref.task_id, _content(task)], sort_keys=True).encode())
    return content.hexdigest()[:DIGITS]


def _content(task: Task) -> dict[str, object]:
    made = task.model_dump(mode="json", exclude={"notes": True, "machine": {"image": True, "grading": True}})
    if task.machine is not None:
        grading = task.machine.grading
        made["image"] = _image(task.machine.image)
        made["grading"] = grading.model_dump(mode="json", exclude={"tests", "image"})
        made["grading_image"] = _image(grading.image) if grading.image is not None else None
        made["tests"] = [tree_digest(Path(path)) for path in grading.tests]
    return made


def _image(source: ImageSource) -> dict[str, object]:
    own = source.model_dump(mode="json", exclude={"context"})
    return own | {"context": tree_digest(Path(source.context)) if source.context else ""}


def tree_digest(path: Path) -> str:
    """Digest of a file, or of the names and contents of all files below a folder."""
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path)}\0".encode())
        content.update(hashlib.sha256(file.read_bytes()).digest())
    return content.hexdigest()[:DIGITS]


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:DIGITS]


class ServingWatch:
    """Looks at this host's engines every now and then and writes down what each serves, where that has changed: an
    engine that was started anew with other settings makes earlier results stale before anybody evaluates again. An
    async context manager."""

    def __init__(self, database: Engine, engines: Sequence[EngineInfo], *, connect: Connect = EngineClient) -> None:
        self._database = database
        self._clients = [connect(engine) for engine in engines]
        self._noted: dict[str, tuple[str, dict[str, Fact]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for client in self._clients:
            await client.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.gather(*(self.look(client) for client in self._clients))

    async def look(self, client: EngineClient) -> None:
        """One look at one engine; one that does not answer, or carries nothing proven, is left for the next."""
        name = client.info.name
        try:
            label = await client.label()
            policy = parse_policy_label(label)
            if policy is None or not policy[2]:
                return
            facts = await client.serving()
            if self._noted.get(name) != (label, facts):
                await asyncio.to_thread(note, self._database, policy[0], policy[1], name, facts)
                self._noted[name] = (label, facts)
        except EngineError:
            return
        except RatchetError as error:
            log.warning("%s: what it serves could not be written down: %s", name, error)
