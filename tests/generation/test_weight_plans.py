"""Two real engines under load take new weights: every channel, every plan for what is in flight, every token's version.

The oracle is the reference model of each version, which says for every sampled token what it must have cost under the
weights that are said to have made it, given what the plan leaves in the cache.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.generation.activities import GenerationActivities
from activities.generation.loader import EngineLoader, OfferSource
from activities.generation.placement import order
from activities.generation.routing import EnginePool
from activities.generation.weights import WeightsCache
from activities.publication.manifest import Canary, listed_folder, read_manifest, write_manifest
from activities.publication.offers import Offers, OfferServer
from storage.database import open_database
from storage.objects import ObjectStore
from tests.conftest import S3, bucket_of
from tests.generation.conftest import CONTEXT
from tests.generation.policies import save_policy
from tests.generation.test_generate import OneTask, message
from tests.generation.test_vllm import PROBE, logprobs
from tests.generation.vllm_server import Server
from tests.generation.worlds import Publisher
from workflows.contracts import ApplyInput, GenerateOutput, InFlight, KvPlan, Sampling, Segment, WeightChannel

pytestmark = pytest.mark.engine
EPISODES = 4
TOKENS = 100
PLANS = [
    *itertools.product(WeightChannel, InFlight, [KvPlan.DROP]),
    (WeightChannel.DIRECT, InFlight.KEEP, KvPlan.SALT),
    (WeightChannel.DIRECT, InFlight.KEEP, KvPlan.KEEP),
    (WeightChannel.S3, InFlight.ABORT_CONTINUE, KvPlan.SALT),
]


@dataclass
class World:
    """One run over the session's two engines: every plan loads its next version."""

    servers: list[Server]
    loaders: list[EngineLoader]
    publisher: Publisher
    offers: Offers
    activities: GenerationActivities
    store: ObjectStore
    models: list[Any] = field(default_factory=list)

    def publish(self, channel: WeightChannel) -> str:
        """Key of the manifest of the next version, a random model of its own."""
        version, run = len(self.models), self.publisher.run
        folder = self.publisher.folder / f"{run}-{version}"
        self.models.append(save_policy(folder, seed=version + 1))
        key = self.publisher.upload(folder, version, Canary(token_ids=PROBE, logprobs=logprobs(self.models[-1], PROBE)))
        if channel is WeightChannel.S3:
            return key
        manifest = read_manifest(self.store, key)
        manifest = manifest.model_copy(update={"channel": channel, "files": listed_folder(folder)})
        self.offers.put(folder / "model.safetensors", manifest.weights_file.sha256)
        write_manifest(self.store, key, manifest)
        return key

    async def load(self, key: str, in_flight: InFlight, kv: KvPlan) -> None:
        outs = await asyncio.gather(
            *(
                loader.apply(
                    ApplyInput(
                        run=self.publisher.run,
                        engine=loader.client.info,
                        version=len(self.models) - 1,
                        manifest=key,
                        in_flight=in_flight,
                        kv=kv,
                    )
                )
                for loader in self.loaders
            )
        )
        assert [out.why for out in outs] == ["", ""]
        assert all(out.pause_s > 0 for out in outs)
        if kv is KvPlan.DROP:
            assert [out.cached_tokens_after for out in outs] == [0, 0]

    async def generate(self, number: int, kv: KvPlan) -> GenerateOutput:
        asked = message(
            self.servers[0].model,
            run=self.publisher.run,
            attempt_id=(attempt := f"{self.publisher.run}/g{1000 * len(self.models) + number}/e0/a0"),
            session=attempt,
            seed=number,
            sampling=Sampling(temperature=1.0, max_tokens=TOKENS, context_length=CONTEXT),
            kv=kv,
        )
        task = asked.task.model_copy(update={"task_id": at_home_on(self.servers[number % 2].client.info.name)})
        out: GenerateOutput = await ActivityEnvironment().run(
            self.activities.generate, asked.model_copy(update={"task": task})
        )
        return out


@pytest.fixture(scope="module")
async def world(
    servers: list[Server], s3_endpoint: S3, migrated: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("plans")
    store, database = bucket_of(s3_endpoint), open_database(f"sqlite:///{shutil.copy(migrated, folder / 'lineage.db')}")
    offers = Offers(folder / "offers")
    address = f"unix:{folder / 's'}"
    loaders = [
        EngineLoader(
            server.client,
            store,
            WeightsCache(store, server.home / "weights"),
            database,
            server.home,
            OfferSource(address, offers.folder),
            hold_s=0.2,
        )
        for server in servers
    ]
    with OfferServer(address, offers):
        async with EnginePool([server.client.info for server in servers]) as pool:
            activities = GenerationActivities(pool, store, lambda _: OneTask())
            made = World(servers, loaders, Publisher(store, folder / "p", run="plans"), offers, activities, store)
            await made.load(made.publish(WeightChannel.S3), InFlight.FINISH, KvPlan.DROP)
            yield made
    database.dispose()
    for server in servers:
        shutil.rmtree(server.home / "weights", ignore_errors=True)


@pytest.mark.parametrize(("channel", "in_flight", "kv"), PLANS)
async def test_the_version_of_every_token_over_a_load_is_that_of_the_weights_that_made_it(
    world: World, channel: WeightChannel, in_flight: InFlight, kv: KvPlan
) -> None:
    # A busy machine may stop this process for so long that all answers end before the load: then once more.
    for _ in range(5):
        judged = await over_a_load(world, channel, in_flight, kv)
        if kv is KvPlan.KEEP:
            await world.load(world.publish(channel), in_flight, KvPlan.DROP)
        if in_flight is InFlight.FINISH or judged.spanning:
            break
    assert judged.kept >= 2 if kv is KvPlan.KEEP else judged.kept == 0
    if in_flight is InFlight.FINISH:
        assert judged.spanning == 0, "what was in flight ended under the old weights"
    else:
        assert judged.spanning > 0, "no request went over the load"


@dataclass
class Judged:
    answers: int = 0
    spanning: int = 0
    kept: int = 0


async def over_a_load(world: World, channel: WeightChannel, in_flight: InFlight, kv: KvPlan) -> Judged:
    """What the answers of a load of the next version show, each compared with the oracle."""
    old = len(world.models) - 1
    key = world.publish(channel)
    loaded, outs = asyncio.Event(), list[GenerateOutput]()

    async def play(number: int) -> None:
        """One answer after the other, so that there is always one in flight."""
        while not loaded.is_set():
            outs.append(await world.generate(number, kv))
            number += EPISODES

    players = [asyncio.create_task(play(number)) for number in range(EPISODES)]
    while {out.engine for out in outs} != {server.client.info.name for server in world.servers}:
        await asyncio.sleep(0.01)
    await world.load(key, in_flight, kv)
    loaded.set()
    await asyncio.gather(*players)
    outs += [await world.generate(number, kv) for number in range(2)]
    segments = [Segment.model_validate_json(world.store.get(out.segment or "")) for out in outs]
    assert len({segment.engine for segment in segments}) == 2, "both engines were under load"
    judged = Judged()
    for segment in segments:
        prompt = segment.loss_mask.index(1)
        versions = segment.versions[prompt:]
        assert versions == sorted(versions) and set(versions) <= {old, old + 1}
        judged.answers, judged.spanning = judged.answers + 1, judged.spanning + len(set(versions)) - 1
        if kv is KvPlan.KEEP and old not in versions:
            judged.kept += 1
            switch = segment.cached_tokens
            assert switch > 0, "a prompt that was there under the old weights is in the cache that they left"
        else:
            # The last token of the old weights was sampled and not put in.
            spans = stale(in_flight, kv) and len(set(versions)) == 2
            switch = prompt + versions.index(old + 1) - 1 if spans else 0
        expected = oracle(world.models[old:], segment.token_ids, prompt, [v - old for v in versions], switch)
        assert segment.logprobs[prompt:] == pytest.approx(expected, abs=2e-4)
    return judged


def at_home_on(engine: str) -> str:
    """Id of a task whose prompt prefers this engine."""
    names = ["local-e0", "local-e1"]
    return next(f"t{n}" for n in itertools.count() if order(f"one/train/t{n}", names)[0] == engine)


def stale(in_flight: InFlight, kv: KvPlan) -> bool:
    """Whether requests go on with what the old weights left in the cache of them."""
    return in_flight is InFlight.KEEP and kv is not KvPlan.DROP


def oracle(models: list[Any], ids: list[int], prompt: int, versions: list[int], switch: int) -> list[float]:
    """Log-probability of each sampled token under the weights of its version. The new weights find what the old ones
    left in the cache of the first `switch` ids, and have put in the rest."""
    import torch

    scored = [logprobs(model, ids) for model in models]
    if switch:
        with torch.no_grad():
            old = models[0](torch.tensor([ids[:switch]]), use_cache=True)
            new = models[1](torch.tensor([ids[switch:]]), past_key_values=old.past_key_values, use_cache=True)
            scores = torch.log_softmax(new.logits[0].float(), dim=-1)
        later = scores[:-1].gather(1, torch.tensor(ids[switch + 1 :])[:, None])[:, 0].tolist()
        scored[1] = scored[1][: switch + 1] + later
    return [scored[version][prompt + index] for index, version in enumerate(versions)]
