"""Published versions and engines that load them, over a real store and a real database."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from activities.generation.engine import EngineClient
from activities.generation.loader import EngineLoader
from activities.generation.proof import write_whole
from activities.generation.server import EngineSpec, spec_path
from activities.generation.weights import WeightsCache, stored_tensors
from activities.publication.manifest import (
    Canary,
    Manifest,
    upload_folder,
    weights_key,
    with_checksums,
    write_manifest,
)
from storage.objects import ObjectStore
from tests.generation.fakes import FakeEngine
from workflows.contracts import ApplyInput, EngineInfo

CANARY_IDS = [3, 1, 4, 1, 5]


def write_model(folder: Path, *, version: int, rows: int = 4) -> Path:
    """What the fake engine loads: `weights.txt` beside a real safetensors file."""
    folder.mkdir(parents=True)
    (folder / "weights.txt").write_text(str(version))
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file({"embed": np.full((rows, 2), version, dtype=np.float32)}, folder / "model.safetensors")
    return folder


class Publisher:
    """Publishes versions of a run; `engine` says what the trainer's canary would be."""

    def __init__(self, store: ObjectStore, folder: Path, *, run: str = "r") -> None:
        self.store, self.folder, self.run = store, folder, run

    def publish(
        self, version: int, *, content: int | None = None, rows: int = 4, off_by: float = 0.0, adapter: bytes = b""
    ) -> str:
        """Key of the manifest of weights `content`, by default the version; the canary is wrong by `off_by`."""
        content = version if content is None else content
        folder = write_model(self.folder / f"{self.run}-{version}", version=content, rows=rows)
        if adapter:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_model.safetensors").write_bytes(adapter)
        engine = FakeEngine()
        engine.weights = content
        logprobs = [0.0, *(engine.score(token) + off_by for token in CANARY_IDS[1:])]
        return self.upload(folder, version, Canary(token_ids=CANARY_IDS, logprobs=logprobs))

    def upload(self, folder: Path, version: int, canary: Canary) -> str:
        key = weights_key(self.run, version)
        manifest = Manifest(
            kind="weights",
            run=self.run,
            version=version,
            step=version,
            files=upload_folder(self.store, f"runs/{self.run}/objects", folder, progress=lambda _: None),
            tensors=with_checksums(stored_tensors(folder), folder),
            canary=canary,
        )
        write_manifest(self.store, key, manifest)
        return key

    def message(self, engine: EngineInfo, version: int, manifest: str) -> ApplyInput:
        return ApplyInput(run=self.run, engine=engine, version=version, manifest=manifest)


def told_to_serve(home: Path, engine: EngineInfo, model: Path) -> None:
    """As after `serve`."""
    path = spec_path(home, engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, EngineSpec(model=str(model), context_length=64, dtype="float32").model_dump_json())


def loader_of(client: EngineClient, store: ObjectStore, database: object, home: Path) -> EngineLoader:
    cache = WeightsCache(store, home / "weights")
    return EngineLoader(client, store, cache, database, home, hold_s=0.2, come_back_s=0.5)  # type: ignore[arg-type]
