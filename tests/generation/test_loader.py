from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from activities.generation.answers import Checksums
from activities.generation.loader import EngineLoader
from activities.generation.loading import EngineActivities, EngineKeeper
from activities.generation.proof import compared
from activities.publication.manifest import TensorInfo, read_manifest
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLoad
from storage.weight_tries import Trying
from tests.generation.fakes import FakeEngine
from tests.generation.told import assert_nothing_told, assert_told, tries
from tests.generation.worlds import CANARY_IDS, Publisher, loader_of, told_to_serve, write_model
from workflows.contracts import ApplyOutput
from workflows.errors import EngineError, StorageError

Content = Callable[[], None]


@dataclass
class World:
    engine: FakeEngine
    loader: EngineLoader
    publisher: Publisher
    store: ObjectStore
    database: Engine
    home: Path

    async def apply(self, version: int, manifest: str) -> ApplyOutput:
        return await self.loader.apply(self.publisher.message(self.engine.info, version, manifest))

    def row(self, version: int) -> EngineLoad | None:
        with session(self.database) as opened:
            return opened.get(EngineLoad, ("r", version, self.engine.info.name))


@pytest.fixture
def world(object_store: ObjectStore, database: Engine, tmp_path: Path) -> World:
    engine, home = FakeEngine(), tmp_path / "home"
    told_to_serve(home, engine.info, write_model(tmp_path / "base", version=99))
    loader = loader_of(engine.client(), object_store, database, home)
    return World(engine, loader, Publisher(object_store, tmp_path / "published"), object_store, database, home)


async def test_a_load_is_paused_proven_and_recorded(world: World) -> None:
    out = await world.apply(0, world.publisher.publish(0))
    assert (out.proven, out.why, out.cached_tokens_after, out.canary_max_abs) == (True, "", 0, pytest.approx(0))
    assert (world.engine.label, world.engine.weights, world.engine.paused) == ("r:0", 0, False)
    order = [call for call in world.engine.calls if call in ("/pause", "/collective_rpc", "/resume")]
    assert order == ["/collective_rpc", "/pause", "/collective_rpc", "/resume", "/collective_rpc", "/collective_rpc"]
    assert world.engine.methods == ["ratchet_prepare", "ratchet_reload", "ratchet_digest", "ratchet_checksums"]
    row = world.row(0)
    assert row is not None
    assert (row.proven, row.pause_s, row.checked) == (True, out.pause_s, 1)
    assert tries(world.database, 0) == [("prove", "proven")]
    assert_nothing_told(world.database)


async def test_weights_are_made_ready_before_the_pause_where_the_engine_can(world: World) -> None:
    world.engine.slices = 3
    out = await world.apply(0, world.publisher.publish(0))
    assert (out.proven, world.engine.label, world.engine.weights) == (True, "r:0", 0)
    assert world.engine.methods[:4] == [*["ratchet_prepare"] * 3, "ratchet_exchange"]
    assert "ratchet_reload" not in world.engine.methods
    calls = [call for call in world.engine.calls if call in ("/pause", "/collective_rpc")]
    assert calls.index("/pause") == 3, "requests went on meanwhile"
    assert out.seconds["prepare"] > 0 and out.slice_s == 0.05


async def test_weights_that_an_engine_gives_up_on_making_ready_are_loaded_in_its_pause(world: World) -> None:
    world.engine.slices, world.engine.unfit = 3, "a second set of weights needs 2 MiB of memory and 1 are left"
    out = await world.apply(0, world.publisher.publish(0))
    assert (out.proven, world.engine.weights) == (True, 0)
    assert world.engine.methods[:2] == ["ratchet_prepare", "ratchet_reload"]


async def test_an_engine_that_can_not_make_weights_ready_goes_on_with_what_it_serves(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    world.engine.fail["ratchet_prepare"] = 500
    with pytest.raises(EngineError):
        await world.apply(1, world.publisher.publish(1))
    assert (world.engine.label, world.engine.weights, world.engine.calls.count("/pause")) == ("r:0", 0, 1)
    assert_told(world.database, 1, "prepare: local-e0 /collective_rpc: HTTP 500", "not served")


async def test_weights_that_were_made_ready_for_nothing_give_their_memory_back(world: World) -> None:
    world.engine.slices = 2
    world.engine.fail["/pause"] = 500
    with pytest.raises(EngineError):
        await world.apply(0, world.publisher.publish(0))
    assert world.engine.methods[-1] == "ratchet_forget"


async def test_a_cancelled_load_forgets_the_weights_that_were_being_made_ready(world: World) -> None:
    world.engine.slices = 10**9
    load = asyncio.create_task(world.apply(0, world.publisher.publish(0)))
    while world.engine.prepared < 2:
        await asyncio.sleep(0.01)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert world.engine.methods[-1] == "ratchet_forget"


async def test_an_engine_that_restarted_between_has_nothing_to_exchange_and_is_loaded_again(world: World) -> None:
    world.engine.slices = 2
    manifest = world.publisher.publish(0)
    pause = world.engine.pauses

    def restarted() -> None:
        if pause:
            world.engine.prepared = 0

    world.engine.on_call = restarted
    with pytest.raises(EngineError, match="no weights to exchange: none are made ready"):
        await world.apply(0, manifest)
    assert world.engine.label == "unproven"
    world.engine.on_call = lambda: None
    assert (await world.apply(0, manifest)).proven


async def test_a_version_that_is_served_and_proven_is_not_loaded_again_also_by_a_new_worker(world: World) -> None:
    manifest = world.publisher.publish(0)
    first = await world.apply(0, manifest)
    again = loader_of(world.engine.client(), world.store, world.database, world.home)
    assert await again.apply(world.publisher.message(world.engine.info, 0, manifest)) == first
    assert world.engine.calls.count("/pause") == 1


async def test_the_label_is_unproven_from_before_the_reload_until_the_proof(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    seen: list[str] = []
    world.engine.on_reload = lambda: seen.append(world.engine.label)
    world.engine.on_generate = lambda: seen.append(world.engine.label)
    await world.apply(1, world.publisher.publish(1))
    assert set(seen) == {"r:1?"}
    assert world.engine.label == "r:1"


async def test_a_corrupted_file_is_refused_without_a_load(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    before = {key for key, _ in world.store.keys("runs/r/objects/")}
    manifest = world.publisher.publish(1)
    for key in {key for key, _ in world.store.keys("runs/r/objects/")} - before:
        world.store.put(key, world.store.get(key)[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(StorageError, match="sha256"):
            await world.apply(1, manifest)
    assert (world.engine.label, world.engine.weights) == ("r:0", 0)
    assert world.engine.calls.count("/pause") == 1
    assert_told(world.database, 1, "fetch: runs/r/objects/", "sha256 differs", "(2 times)", "not served by this engine")
    assert (await world.apply(2, world.publisher.publish(2))).proven
    assert_told(world.database, 1, "overtaken by version 2")


async def test_weights_of_another_shape_are_refused_without_a_load(world: World) -> None:
    with pytest.raises(EngineError, match=r"embed is \[5, 2\] in the file, \[4, 2\] in base") as caught:
        await world.apply(0, world.publisher.publish(0, rows=5))
    assert not caught.value.retryable
    assert "/pause" not in world.engine.calls


async def test_a_canary_that_the_engine_scores_otherwise_disowns_the_load(world: World) -> None:
    out = await world.apply(0, world.publisher.publish(0, off_by=0.01))
    assert not out.proven
    assert "differs from the trainer's by 0.01 nats" in out.why
    assert (world.engine.label, world.engine.paused) == ("unproven", False)
    assert "/abort_requests" in world.engine.calls
    row = world.row(0)
    assert row is not None
    assert (row.proven, row.why) == (False, out.why)
    assert_told(world.database, 0, f"prove: {out.why}", "not served by this engine yet")


async def test_a_byte_that_flips_between_the_disk_and_the_engine_is_found_out_however_little_it_changes(
    world: World,
) -> None:
    await world.apply(0, world.publisher.publish(0))
    manifest = world.publisher.publish(1)

    def flip() -> None:
        """After the files were verified and before the engine reads them; the fake scores as before."""
        for path in world.home.glob("weights/*/model.safetensors"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    world.engine.on_reload = flip
    out = await world.apply(1, manifest)
    assert out.why == "the manifest has other checksums: embed as the engine was given it"
    assert (out.proven, out.checked, world.engine.label) == (False, 0, "unproven")
    world.engine.on_reload = lambda: None
    assert (await world.apply(1, manifest)).proven
    assert tries(world.database, 1) == [("prove", "unproven"), ("prove", "proven")]
    assert_told(world.database, 1, "prove: the manifest has other checksums: embed", "proven with try 2, ")


def test_an_engine_that_was_not_given_all_tensors_is_found_out(world: World) -> None:
    key = world.publisher.publish(0)
    told = read_manifest(world.store, key)
    more = TensorInfo(name="head", shape=[4, 2], dtype="float32", checksum="0" * 16)
    checked, why = compared([*told.tensors, more], Checksums({"embed": told.tensors[0].checksum}, []))
    assert (checked, why) == (1, "the manifest has other checksums: head, which the engine was not given")


def test_a_fused_parameter_is_compared_with_what_it_is_made_of() -> None:
    parts = [TensorInfo(name=name, shape=[2, 2], dtype="float32", checksum=f"{n:016x}") for n, name in enumerate("qkv")]
    given = {item.name: item.checksum for item in parts}
    assert compared(parts, Checksums(given, [(f"{3:016x}", ["q", "k", "v"])])) == (3, "")
    assert compared(parts, Checksums(given, [(f"{4:016x}", ["q", "k", "v"])])) == (
        3,
        "the manifest has other checksums: q + k + v as the engine holds it",
    )


async def test_an_engine_that_kept_its_old_weights_is_found_out(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    world.engine.stale_reload = True
    out = await world.apply(1, world.publisher.publish(1))
    assert (out.proven, world.engine.label) == (False, "unproven")


async def test_a_change_below_the_tolerance_must_show_too(world: World) -> None:
    # A trainer that moved by less than the tolerance, and an engine that did not move at all.
    await world.apply(0, world.publisher.publish(0))
    world.engine.stale_reload = True
    out = await world.apply(1, world.publisher.publish(1, off_by=0.01 + 1e-5))
    assert out.why == "the canary is what it was under the version before"


async def test_an_adapter_that_moved_by_less_than_the_weights_show_needs_no_change(world: World) -> None:
    await world.apply(0, world.publisher.publish(0, adapter=b"one"))
    out = await world.apply(1, world.publisher.publish(1, content=0, adapter=b"another"))
    assert (out.proven, out.why, world.engine.label) == (True, "", "r:1")


async def test_weights_that_did_not_change_need_not_show_a_change(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    assert (await world.apply(1, world.publisher.publish(1, content=0))).proven


async def test_a_prefix_cache_that_survives_the_load_is_found_out(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    world.engine.keep_cache = True
    out = await world.apply(1, world.publisher.publish(1))
    assert out.cached_tokens_after == len(CANARY_IDS) - 1
    assert "cache of earlier weights" in out.why


async def test_a_reload_that_fails_leaves_the_engine_disowned_and_running(world: World) -> None:
    await world.apply(0, world.publisher.publish(0))
    world.engine.fail["ratchet_reload"] = 500
    with pytest.raises(EngineError):
        await world.apply(1, world.publisher.publish(1))
    assert (world.engine.label, world.engine.paused) == ("unproven", False)
    assert_told(world.database, 1, "swap: local-e0 /collective_rpc: HTTP 500 told to fail", "not served")
    world.engine.fail.clear()
    assert (await world.apply(1, "runs/r/weights/v000001/manifest.json")).proven
    assert_told(world.database, 1, "proven with try 2, ")


async def test_a_load_that_nobody_ended_is_disowned_before_it_is_done_again(world: World) -> None:
    manifest = world.publisher.publish(0)
    world.engine.label, world.engine.paused = "r:0?", True
    labels: list[str] = []
    load = asyncio.create_task(world.apply(0, manifest))
    while not load.done():
        labels.append(world.engine.label)
        await asyncio.sleep(0.01)
    assert (await load).proven
    assert list(dict.fromkeys(labels))[:2] == ["r:0?", "unproven"]


async def test_a_cancelled_load_does_not_leave_the_engine_paused(world: World) -> None:
    manifest = world.publisher.publish(0)
    load = asyncio.create_task(world.apply(0, manifest))
    world.engine.on_reload = lambda: load.cancel() and None
    with pytest.raises(asyncio.CancelledError):
        await load
    assert not world.engine.paused
    assert world.engine.label == "r:0?"
    assert_told(world.database, 0, "swap: nobody waited for it any more")


def test_a_load_whose_worker_is_killed_is_named_by_the_next_one(world: World) -> None:
    script = (
        "import sys, time; from storage.database import open_database; from storage.weight_tries import Trying\n"
        "tried = Trying(open_database(sys.argv[1]), run='r', version=0, engine='local-e0')\n"
        "tried.at('fetch'); tried.at('swap'); print('begun', flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", script, str(world.database.url)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + 20
        while tries(world.database, 0) != [("swap", "")] and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.kill()
    assert tries(world.database, 0) == [("swap", "")]
    assert_nothing_told(world.database)
    assert asyncio.run(world.apply(0, world.publisher.publish(0))).proven
    assert tries(world.database, 0) == [("swap", "interrupted"), ("prove", "proven")]
    assert_told(world.database, 0, "swap: its process ended in the middle of it", "proven with try 2, ")


async def test_a_record_that_cannot_be_written_fails_no_load(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with session(world.database) as opened:
        opened.connection().execute(text("DROP TABLE weighttry"))
    assert (await world.apply(0, world.publisher.publish(0))).proven
    assert "its try is not on record" in caplog.text


def test_only_the_first_end_of_a_try_counts(world: World) -> None:
    tried = Trying(world.database, run="r", version=0, engine="local-e0")
    tried.end("proven", part="reach")
    tried.end("cancelled", part="reach")
    assert tries(world.database, 0) == [("reach", "proven")]


async def test_an_engine_that_does_not_come_back_is_a_retryable_failure(world: World) -> None:
    world.engine.down = True
    with pytest.raises(EngineError) as caught:
        await world.apply(0, world.publisher.publish(0))
    assert caught.value.retryable
    assert_told(world.database, 0, "reach: local-e0 /weight_info: ConnectError", "not served by this engine yet")


async def test_a_manifest_that_is_not_there_is_named(world: World) -> None:
    with pytest.raises(StorageError):
        await world.apply(3, "runs/r/weights/v000003/manifest.json")
    assert_told(world.database, 3, "fetch: ", "v000003/manifest.json")


async def test_two_versions_stay_on_the_disk(world: World) -> None:
    for version in range(4):
        assert (await world.apply(version, world.publisher.publish(version))).proven
    assert len(list((world.home / "weights").iterdir())) == 2


async def test_the_keeper_brings_a_restarted_engine_back(world: World) -> None:
    client = world.engine.client()
    activities = EngineActivities(world.store, world.database, world.home, connect=lambda _: client)
    await activities.apply(world.publisher.message(world.engine.info, 0, world.publisher.publish(0)))
    async with EngineKeeper(activities, [world.engine.info]):
        world.engine.label, world.engine.weights = "default", 99
        async with asyncio.timeout(10):
            while world.engine.label != "r:0":
                await asyncio.sleep(0.05)
    assert world.engine.weights == 0


async def test_the_keeper_leaves_an_engine_alone_that_nobody_asked_for_anything(world: World) -> None:
    client = world.engine.client()
    activities = EngineActivities(world.store, world.database, world.home, connect=lambda _: client)
    async with EngineKeeper(activities, [world.engine.info]):
        await asyncio.sleep(1.2)
    assert world.engine.calls == []


def test_the_desired_version_outlives_the_worker(world: World) -> None:
    asyncio.run(world.apply(0, world.publisher.publish(0)))
    record = json.loads((world.home / "engines" / "local-e0.desired.json").read_text())
    assert record["message"]["version"] == 0
    assert record["proof"]["proven"] is True
