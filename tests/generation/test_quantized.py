"""A real vLLM server on a published version in int8: proven, labelled, and telling how it serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from activities.generation.fingerprint import model_facts
from activities.generation.loading import EngineActivities
from activities.generation.proof import Desired
from activities.generation.quantized import QuantizedActivities
from activities.publication.manifest import Canary
from storage.objects import ObjectStore
from tests.generation.policies import save_policy
from tests.generation.test_vllm import PROBE, logprobs
from tests.generation.worlds import Publisher
from tests.stack import free_ports
from workers.stack.state import scratch_root
from workflows.contracts import ApplyOutput, EngineInfo, QuantizedInput
from workflows.errors import StorageError

pytestmark = pytest.mark.engine


class World:
    """One engine whose launcher waits to be told what to serve, and version 4 of run r with its model."""

    def __init__(self, home: Path, store: ObjectStore, database: Engine, published: Path) -> None:
        (port,) = free_ports(1)
        self.home = home
        self.info = EngineInfo(name="local-e0", host="local", url=f"http://127.0.0.1:{port}")
        self.loads = EngineActivities(store, database, home, start_s=240)
        self.activities = QuantizedActivities(self.loads, store)
        self.publisher = Publisher(store, published)
        self.folder = published / "r-4"
        self.model = save_policy(self.folder, seed=5)

    def message(self, *, off_by: float = 0.0) -> QuantizedInput:
        canary = Canary(token_ids=PROBE, logprobs=[0.0, *(value + off_by for value in logprobs(self.model, PROBE)[1:])])
        manifest = self.publisher.upload(self.folder, 4, canary)
        given: dict[str, Any] = {"run": "r", "engine": self.info, "version": 4, "manifest": manifest}
        return QuantizedInput(**given, model=str(self.folder), context_length=256, method="int8")

    async def serve(self, message: QuantizedInput) -> ApplyOutput:
        return await self.activities.serve_quantized(message)


@pytest.fixture
async def world(tmp_path: Path, object_store: ObjectStore, database: Engine) -> AsyncIterator[World]:
    home = tmp_path / "home"
    (home / "logs").mkdir(parents=True)
    made = World(home, object_store, database, tmp_path / "published")
    port = made.info.url.rpartition(":")[2]
    environment = os.environ | {"RATCHET_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with (home / "logs" / "local-e0.log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "workers.engine", "--name", "local-e0", "--port", port],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield made
    finally:
        await made.loads.close()
        launcher.kill()
        launcher.wait(10)
        shutil.rmtree(scratch_root(home), ignore_errors=True)


async def test_a_version_is_served_in_int8_proven_and_told(world: World) -> None:
    out = await world.serve(world.message())
    assert out.proven and 0 < out.canary_max_abs < 1
    client = world.loads.loader(world.info).client
    assert await client.label() == "r:4"
    told = await client.serving()
    assert told["quantization"] == "compressed-tensors" and "CompressedTensorsLinearMethod" in told["layers"]
    found = await client.score(PROBE)
    apart = [abs(mine - theirs) for mine, theirs in zip(found, logprobs(world.model, PROBE), strict=True)]
    assert max(apart) == pytest.approx(out.canary_max_abs) and max(apart) > 1e-4, "it is not the original"
    # Again, it is only asked; nobody else brings weights of another kind to this server.
    pid = (world.home / "engines" / "local-e0.pid").read_text()
    await client.set_label("default")
    assert (await world.serve(world.message())).proven
    assert (world.home / "engines" / "local-e0.pid").read_text() == pid and await client.label() == "r:4"
    assert Desired.read(world.home, "local-e0") is None
    # The tokenizer is the version's own.
    (folder,) = (world.home / "quantized").glob("*-int8")
    assert model_facts(folder)["tokenizer"] == model_facts(world.folder)["tokenizer"]
    # Weights whose canary is another model's are not proven, and carry no label.
    await client.set_label("default")
    wrong = await world.serve(world.message(off_by=0.5))
    assert not wrong.proven and "nats in the mean; 0.3 is allowed" in wrong.why
    assert await client.label() == "default"


async def test_what_is_not_the_version_is_refused(world: World) -> None:
    with pytest.raises(StorageError, match="not version 5 with a canary"):
        await world.serve(world.message().model_copy(update={"version": 5}))
