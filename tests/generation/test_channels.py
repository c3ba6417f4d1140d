"""Loads from the trainer's machine, and what becomes of requests and caches at a load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.generation.loader import EngineLoader, OfferSource
from activities.generation.loading import LOADS_IN_VAIN, EngineActivities, EngineKeeper
from activities.generation.weights import WeightsCache
from activities.publication.manifest import Manifest, listed_folder, read_manifest, weights_key, write_manifest
from activities.publication.offers import Offers
from storage.objects import ObjectStore
from tests.conftest import bucket_of, s3_server
from tests.generation.fakes import FakeEngine
from tests.generation.told import assert_told
from tests.generation.worlds import CANARY_IDS, Publisher, told_to_serve, write_model
from workflows.contracts import ApplyOutput, InFlight, KvPlan, RestInput, WeightChannel
from workflows.errors import EngineError, StorageError


@dataclass
class World:
    engine: FakeEngine
    loader: EngineLoader
    publisher: Publisher
    offers: Offers
    store: ObjectStore
    database: Engine
    home: Path

    async def apply(self, version: int, manifest: str = "", **plan: object) -> ApplyOutput:
        message = self.publisher.message(self.engine.info, version, manifest or self.publisher.publish(version))
        return await self.loader.apply(message.model_copy(update=plan))

    def offer(self, version: int, *, stored: bool = False, channel: WeightChannel = WeightChannel.COLOCATED) -> str:
        """Key of the manifest of a version that the trainer's machine offers."""
        key = self.publisher.publish(version)
        manifest, folder = read_manifest(self.store, key), self.publisher.folder / f"r-{version}"
        files = manifest.files if stored else listed_folder(folder)
        manifest = manifest.model_copy(update={"channel": channel, "files": files, "version": version})
        self.offers.put(folder / "model.safetensors", manifest.weights_file.sha256)
        write_manifest(self.store, key, manifest)
        return key


@pytest.fixture
def world(object_store: ObjectStore, database: Engine, tmp_path: Path) -> World:
    engine, home = FakeEngine(), tmp_path / "home"
    told_to_serve(home, engine.info, write_model(tmp_path / "base", version=99))
    offers = Offers(tmp_path / "offers")
    source = OfferSource("unix:/nowhere", offers.folder)
    cache = WeightsCache(object_store, home / "weights")
    loader = EngineLoader(engine.client(), object_store, cache, database, home, source, hold_s=0.2, come_back_s=0.5)
    return World(engine, loader, Publisher(object_store, tmp_path / "published"), offers, object_store, database, home)


async def test_offered_weights_are_staged_before_the_pause_and_need_no_download(world: World) -> None:
    out = await world.apply(0, world.offer(0))
    assert (out.proven, world.engine.weights, world.engine.label) == (True, 0, "r:0")
    calls = world.engine.calls
    assert calls.index("/update_weights") < calls.index("/pause") < calls.index("/finish_weight_update")
    assert not (world.home / "weights").exists() or not list((world.home / "weights").iterdir())


async def test_the_trainers_server_is_the_source_where_machines_differ(world: World) -> None:
    key = world.offer(0, channel=WeightChannel.DIRECT)
    # The fake engine reads files only: what it was told is what counts here.
    load = asyncio.create_task(world.apply(0, key))
    while world.engine.staged is None:
        await asyncio.sleep(0.01)
    file = read_manifest(world.store, key).weights_file
    assert world.engine.staged == {
        "source": "unix:/nowhere",
        "digest": file.sha256,
        "size": file.bytes,
        "bytes_per_s": 0,
    }
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load


async def test_weights_that_do_not_arrive_leave_the_engine_serving_what_it_served(world: World) -> None:
    await world.apply(0, world.offer(0))
    world.engine.staging_fails = "ConnectionRefusedError"
    with pytest.raises(StorageError, match=r"did not arrive from .*: ConnectionRefusedError") as caught:
        await world.apply(1, world.offer(1))
    assert caught.value.retryable
    assert (world.engine.label, world.engine.weights, world.engine.calls.count("/pause")) == ("r:0", 0, 1)
    assert_told(world.database, 1, "stage: ", "did not arrive from", "ConnectionRefusedError", "not served")


async def test_a_byte_that_flips_in_the_staged_memory_is_found_out(world: World) -> None:
    await world.apply(0, world.offer(0))
    key = world.offer(1)

    def flip() -> None:
        """The engine has verified the file that it maps; now it changes."""
        path = world.offers.path(read_manifest(world.store, key).weights_file.sha256)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    world.engine.on_reload = flip
    out = await world.apply(1, key)
    assert (out.proven, world.engine.label) == (False, "unproven")
    assert "embed as the engine was given it" in out.why
    assert_told(world.database, 1, "prove: the manifest has other checksums: embed")


async def test_a_stored_version_comes_from_the_store_when_the_trainer_is_gone(world: World) -> None:
    world.engine.staging_fails = "ConnectionRefusedError"
    key = world.offer(0, stored=True)
    write_model(world.publisher.folder / "again", version=0)
    assert (await world.apply(0, key)).proven
    assert world.engine.weights == 0


async def test_colocated_engines_say_when_the_trainer_is_not_on_their_machine(world: World) -> None:
    key = world.offer(0)
    world.offers.keep_last(0)
    with pytest.raises(StorageError, match="colocated needs the trainer on this machine"):
        await world.apply(0, key)


async def test_an_engine_rests_and_the_next_load_wakes_it(world: World) -> None:
    client = world.engine.client()
    activities = EngineActivities(world.store, world.database, world.home, connect=lambda _: client)
    await world.apply(0, world.offer(0))
    await activities.rest(RestInput(run="r", engine=world.engine.info))
    assert world.engine.asleep
    async with EngineKeeper(activities, [world.engine.info]):
        await asyncio.sleep(1.2)
        assert world.engine.asleep, "the keeper leaves one alone that rests"
    await world.apply(1, world.offer(1))
    assert not world.engine.asleep


async def test_an_engine_that_rests_is_awake_after_the_version_that_it_serves_is_asked_for_again(world: World) -> None:
    key = world.offer(0)
    await world.apply(0, key)
    await world.loader.rest()
    await world.apply(0, key)
    assert not world.engine.asleep
    assert world.engine.calls.count("/pause") == 1


async def test_the_keeper_wakes_an_engine_whose_wake_up_nobody_saw_the_end_of(world: World) -> None:
    client = world.engine.client()
    activities = EngineActivities(world.store, world.database, world.home, connect=lambda _: client)
    key = world.publisher.publish(0)
    message = world.publisher.message(world.engine.info, 0, key)
    await activities.apply(message)
    await activities.rest(RestInput(run="r", engine=world.engine.info))
    world.engine.fail["/is_sleeping"] = 500
    with pytest.raises(EngineError):
        await activities.apply(message)
    world.engine.fail.clear()
    async with EngineKeeper(activities, [world.engine.info]), asyncio.timeout(20):
        while world.engine.asleep:
            await asyncio.sleep(0.01)


async def test_a_trainer_that_is_away_costs_no_engine_its_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.generation.loading.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("activities.generation.loading.LONGEST_BACKOFF_S", 0.01)
    monkeypatch.setattr("activities.generation.loading.LOOK_EVERY_S", 0.01)
    ended: list[str] = []
    monkeypatch.setattr("activities.generation.loading.end_server", lambda home, name: ended.append(name))
    client, source = world.engine.client(), OfferSource("unix:/nowhere", world.offers.folder)
    activities = EngineActivities(world.store, world.database, world.home, source, connect=lambda _: client)
    await activities.apply(world.publisher.message(world.engine.info, 0, world.offer(0)))
    world.engine.staging_fails = "ConnectionRefusedError"
    late = world.publisher.message(world.engine.info, 1, world.offer(1))
    with pytest.raises(StorageError):
        await activities.apply(late)
    before = world.engine.calls.count("/update_weights")
    async with EngineKeeper(activities, [world.engine.info]), asyncio.timeout(20):
        while world.engine.calls.count("/update_weights") < before + 2 * LOADS_IN_VAIN:
            await asyncio.sleep(0.01)
        assert world.engine.label == "r:0" and not ended
        world.engine.staging_fails = ""
        while world.engine.label != "r:1":
            await asyncio.sleep(0.01)


async def test_a_version_is_asked_for_before_its_turn_comes_and_an_older_load_does_not_overwrite_it(
    world: World,
) -> None:
    await world.apply(0)
    first, second = world.publisher.publish(1), world.publisher.publish(2)
    world.engine.held = asyncio.Event()
    older = asyncio.create_task(world.apply(1, first))
    while world.engine.label != "r:1?":
        await asyncio.sleep(0.01)
    newer = asyncio.create_task(world.apply(2, second))
    await asyncio.sleep(0.05)
    newer.cancel()
    world.engine.held.set()
    assert (await older).proven
    desired = world.loader.desired
    assert desired is not None and (desired.message.version, desired.proof) == (2, None)


async def test_an_interrupted_proof_under_salt_can_be_made_again(world: World) -> None:
    key = world.publisher.publish(0)
    # As a worker leaves it that died after it had scored the canary.
    world.engine.label = "r:0?"
    world.engine.cache.add(("r:0", tuple(CANARY_IDS)))
    out = await world.apply(0, key, kv=KvPlan.SALT)
    assert (out.proven, out.cached_tokens_after) == (True, 0)


@pytest.mark.parametrize(
    ("in_flight", "mode"),
    [(InFlight.FINISH, "wait"), (InFlight.ABORT_CONTINUE, "abort"), (InFlight.KEEP, "keep")],
)
@pytest.mark.parametrize(("kv", "clears"), [(KvPlan.DROP, "true"), (KvPlan.KEEP, "false"), (KvPlan.SALT, "false")])
async def test_the_plan_is_what_the_engine_is_told(
    world: World, in_flight: InFlight, mode: str, kv: KvPlan, clears: str
) -> None:
    assert (await world.apply(0, in_flight=in_flight, kv=kv)).proven
    assert world.engine.pauses == [(mode, clears)]


async def test_requests_finish_under_the_old_weights_while_nothing_new_begins(world: World) -> None:
    await world.apply(0)
    world.engine.held, began = asyncio.Event(), asyncio.Event()
    world.engine.on_generate = began.set
    asked = asyncio.create_task(
        world.engine.client().generate([65], temperature=1, max_tokens=3, seed=1, stop_token_ids=[])
    )
    await began.wait()
    load = asyncio.create_task(world.apply(1, in_flight=InFlight.FINISH))
    while world.engine.label != "r:0~":
        await asyncio.sleep(0.01)
    while not world.engine.paused:
        await asyncio.sleep(0.01)
    assert (world.engine.label, world.engine.weights) == ("r:0~", 0), "nothing is exchanged under a running request"
    world.engine.held.set()
    assert (await asked).labels == {"r:0~"}
    out = await load
    assert out.proven and out.seconds["drain"] > 0
    assert world.engine.label == "r:1"


async def test_a_cache_that_is_kept_is_no_failure_and_its_figure_is_recorded(world: World) -> None:
    await world.apply(0, kv=KvPlan.KEEP)
    out = await world.apply(1, kv=KvPlan.KEEP)
    assert (out.proven, out.cached_tokens_after) == (True, len(CANARY_IDS) - 1)


async def test_a_salted_cache_stays_and_is_never_found_by_what_comes_after(world: World) -> None:
    await world.apply(0, kv=KvPlan.SALT)
    out = await world.apply(1, kv=KvPlan.SALT)
    assert (out.proven, out.cached_tokens_after) == (True, 0)
    assert len(world.engine.cache) == 2


async def test_an_engine_that_proves_nothing_again_and_again_is_started_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.generation.loading.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("activities.generation.loading.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("activities.generation.loader.HOLD_S", 0.01)
    ended: list[str] = []

    def end(home: Path, name: str) -> None:
        ended.append(name)
        # What the supervisor starts is as the engine was before its fault.
        world.engine.stale_reload, world.engine.label = False, "default"

    monkeypatch.setattr("activities.generation.loading.end_server", end)
    client = world.engine.client()
    activities = EngineActivities(world.store, world.database, world.home, connect=lambda _: client)
    activities.loader(world.engine.info)._hold_s = 0.01
    await activities.apply(world.publisher.message(world.engine.info, 0, world.publisher.publish(0)))
    world.engine.stale_reload = True
    out = await activities.apply(world.publisher.message(world.engine.info, 1, world.publisher.publish(1)))
    assert not out.proven
    async with EngineKeeper(activities, [world.engine.info]), asyncio.timeout(20):
        while world.engine.label != "r:1":
            await asyncio.sleep(0.01)
    assert ended == ["local-e0"]
    assert world.engine.calls.count("/pause") == 2 + LOADS_IN_VAIN + 1
    assert_told(
        world.database,
        1,
        f"prove: {out.why} ({LOADS_IN_VAIN + 1} times)",
        f"restart: {LOADS_IN_VAIN} loads in vain, the last: {out.why}",
        f"the engine was started anew; proven with try {LOADS_IN_VAIN + 2}, ",
    )


async def test_a_store_that_dies_in_the_middle_of_a_download_costs_nothing_but_the_load(
    database: Engine, tmp_path: Path
) -> None:
    (tmp_path / "s3").mkdir()
    engine, home = FakeEngine(), tmp_path / "home"
    told_to_serve(home, engine.info, write_model(tmp_path / "base", version=99, rows=1_000_000))
    with s3_server(tmp_path / "s3") as (access, server):
        store = bucket_of(access)
        cache = WeightsCache(store, home / "weights")
        loader = EngineLoader(engine.client(), store, cache, database, home, hold_s=0.2, come_back_s=0.5)
        publisher = Publisher(store, tmp_path / "published")
        first = publisher.message(engine.info, 0, publisher.publish(0, rows=1_000_000))
        assert (await loader.apply(first)).proven
        key = publisher.publish(1, rows=1_000_000)
        slow = read_manifest(store, key).model_copy(update={"max_mbytes_per_s": 2})
        write_manifest(store, key, slow)
        load = asyncio.create_task(loader.apply(publisher.message(engine.info, 1, key)))
        while not any(path.stat().st_size for path in home.glob("weights/*/*.part*")):
            await asyncio.sleep(0.01)
        server.kill()
        with pytest.raises(StorageError) as caught:
            await load
        assert caught.value.retryable
    assert (engine.label, engine.weights, engine.calls.count("/pause")) == ("r:0", 0, 1)
    assert_told(database, 1, f"fetch: {caught.value}", "not served by this engine yet")


def test_manifests_of_before_channels_are_read(world: World) -> None:
    key = world.publisher.publish(0)
    text = read_manifest(world.store, key).model_dump_json(exclude={"channel"})
    assert Manifest.model_validate_json(text).channel is WeightChannel.S3
    assert weights_key("r", 0) == key
