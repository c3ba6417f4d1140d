"""A run as it lies in lineage and in the object store, with all that may be left behind."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from sqlalchemy import Engine
from sqlmodel import SQLModel

from activities.publication.manifest import (
    Manifest,
    ManifestFile,
    objects_prefix,
    training_state_key,
    weights_key,
    write_manifest,
)
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch, EngineLoad, Evaluation, PolicyVersion, Publication, Run
from workflows.contracts import RunState


@dataclass
class MadeRun:
    """`run` with `keep_last` 1; each version has an object of its own and shares one with the others."""

    run: str
    store: ObjectStore
    database: Engine
    state: RunState = RunState.FAILED
    ended_at: float | None = 1.0
    namespace: str = ""
    objects: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = {"model": "tiny", "publication": {"keep_last": 1}}
        self.add(
            Run(
                id=self.run,
                state=self.state,
                config=config,
                mode="async",
                seed=0,
                started_at=0.0,
                temporal_namespace=self.namespace,
                ended_at=self.ended_at,
            )
        )

    def add(self, *rows: SQLModel) -> None:
        with session(self.database) as opened:
            for row in rows:
                opened.add(row)

    def put(self, content: str) -> ManifestFile:
        data = content.encode()
        digest = hashlib.sha256(data).hexdigest()
        key = self.objects[content] = f"{objects_prefix(self.run)}/{digest}"
        self.store.put(key, data)
        return ManifestFile(name=content, key=key, bytes=len(data), sha256=digest)

    def write(self, key: str, *contents: str) -> str:
        files = [self.put(content) for content in contents]
        write_manifest(self.store, key, Manifest(kind="weights", run=self.run, version=0, step=0, files=files))
        return key

    def publish(self, version: int) -> None:
        """Weights and training state of `version`, with their rows."""
        manifest = self.write(weights_key(self.run, version), "shared", f"weights {version}")
        checkpoint = self.write(training_state_key(self.run, version, 2), f"state {version}")
        self.add(
            Publication(run=self.run, version=version, manifest=manifest, digest="", bytes=1, published_at=1.0),
            PolicyVersion(run=self.run, version=version, step=version, checkpoint=checkpoint, created_at=1.0),
        )

    def loaded(self, version: int, engine: str, *, at: float, proven: bool = True) -> None:
        self.add(EngineLoad(run=self.run, version=version, engine=engine, proven=proven, loaded_at=at))

    def evaluated(self, version: int) -> None:
        self.add(Evaluation(run=self.run, version=version, episodes=1, mean_reward=1.0, ended_at=1.0))

    def trained(self, step: int, checkpoint: str) -> None:
        self.add(
            Batch(
                id=f"{self.run}/b{step}",
                run=self.run,
                step=step,
                policy_version=step - 1,
                state="trained",
                checkpoint=checkpoint,
                reserved_at=1.0,
            )
        )

    @property
    def left(self) -> set[str]:
        """Contents of the objects that are there, and the manifests by `<kind>/<version or step>[/<fence>]`."""
        keys = {key for key, _ in self.store.keys(f"runs/{self.run}/")}
        names = {key.removeprefix(f"runs/{self.run}/").removesuffix("/manifest.json") for key in keys}
        contents = {f"objects/{key.rpartition('/')[2]}": content for content, key in self.objects.items()}
        return {contents.get(name, name) for name in names}


def a_moment() -> float:
    """A time between what was written before and what is written afterwards."""
    time.sleep(0.05)
    now = time.time()
    time.sleep(0.05)
    return now
