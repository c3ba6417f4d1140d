"""One real vLLM server: started by the launcher, loaded, proven, interrupted and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from sqlalchemy import Engine

from activities.generation.activities import proven_versions
from activities.generation.answers import Generation, Prepared
from activities.generation.engine import EngineClient
from activities.generation.loader import EngineLoader, OfferSource
from activities.generation.server import BLOCK_TOKENS, EngineSpec
from activities.generation.serving import serve
from activities.generation.weights import WeightsCache
from activities.publication.manifest import Canary, listed_folder, read_manifest, write_manifest
from activities.publication.offers import Offers
from storage.cache_hits import reachable
from storage.objects import ObjectStore
from tests.generation.conftest import CONTEXT
from tests.generation.policies import save_policy
from tests.generation.vllm_server import Server
from tests.generation.worlds import Publisher, loader_of
from workflows.contracts import ApplyInput, WeightChannel
from workflows.errors import EngineError, StorageError

pytestmark = pytest.mark.engine
PROBE = [(7 * index) % 250 for index in range(64)]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def server(servers: list[Server]) -> Server:
    return servers[0]


@dataclass
class World:
    """One run's versions over the session's server: version n is the random model of seed n + 1."""

    server: Server
    loader: EngineLoader
    publisher: Publisher
    models: dict[int, Any] = field(default_factory=dict)

    def message(self, version: int, *, canary_of: int | None = None) -> ApplyInput:
        folder = self.publisher.folder / f"{self.publisher.run}-{version}"
        self.models[version] = save_policy(folder, seed=version + 1)
        scored = self.models[version if canary_of is None else canary_of]
        manifest = self.publisher.upload(folder, version, Canary(token_ids=PROBE, logprobs=logprobs(scored, PROBE)))
        return self.publisher.message(self.server.client.info, version, manifest)

    async def generate(self, prompt: list[int], max_tokens: int, seed: int = 5, salt: str | None = None) -> Generation:
        return await self.server.client.generate(
            prompt, temperature=1.0, max_tokens=max_tokens, seed=seed, stop_token_ids=[], cache_salt=salt
        )


def logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> list[float]:
    """The reference: Hugging Face's forward in float32."""
    import torch

    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, dim=-1)
    return [0.0, *scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


@pytest.fixture
def world(
    server: Server, object_store: ObjectStore, database: Engine, tmp_path: Path, request: pytest.FixtureRequest
) -> World:
    loader = loader_of(server.client, object_store, database, server.home)
    return World(server, loader, Publisher(object_store, tmp_path, run=request.node.name))


async def test_an_engine_starts_without_weights_of_any_run_and_is_left_alone_when_it_serves(server: Server) -> None:
    spec = EngineSpec.of(str(server.model), context_length=CONTEXT, dtype="auto")
    assert server.restarted
    assert server.first_label == "default"
    assert spec.dtype == "float32"
    assert not await serve(server.client, spec, server.home, wait_s=10)


async def test_logprobs_at_a_temperature_are_those_of_the_reference(world: World) -> None:
    assert (await world.loader.apply(world.message(0))).proven
    answer = await world.server.client.generate(
        PROBE, temperature=0.6, max_tokens=20, seed=1, stop_token_ids=[], priority=3
    )
    reference = logprobs(world.models[0], PROBE + answer.token_ids, temperature=0.6)
    assert answer.logprobs == pytest.approx(reference[len(PROBE) :], abs=1e-4)
    assert await proven_versions([world.server.client], world.publisher.run, answer) == [0] * len(answer.token_ids)


async def test_a_second_version_is_proven_also_in_the_tied_head_and_serves_from_no_old_cache(world: World) -> None:
    first, second = await world.loader.apply(world.message(0)), await world.loader.apply(world.message(1))
    assert (first.proven, second.proven, second.why) == (True, True, "")
    assert second.canary_max_abs < 1e-4
    assert second.cached_tokens_after == 0
    told = await world.server.client.checksums()
    assert second.checked == len(told.given) > 20, "every tensor was given as it was published"
    assert [EMBEDDING] in [names for _, names in told.held]
    assert 0 < second.pause_s < 5
    assert second.seconds["prepare"] > 0, "its matrices were packed before"
    # The same prompt under the same version comes from the cache.
    assert await world.server.client.cached_tokens(PROBE) == 32


async def test_weights_made_ready_before_the_pause_and_weights_loaded_in_it_are_the_same(world: World) -> None:
    """One after the other, each kind after each: what vLLM keeps for its own reload must not lead astray."""
    client, answers = world.server.client, dict[int, list[list[float]]]()
    folders = [world.server.home / "weights" / str(version) for version in range(2)]
    for version, folder in enumerate(folders):
        world.models[version] = save_policy(folder, seed=version + 1)
    for ready, version in ((True, 0), (False, 1), (False, 0), (True, 1), (True, 0), (False, 0), (True, 1)):
        path = str(folders[version])
        if ready:
            assert (await client.prepare(path=path)).why == ""
            asked = await client.score(PROBE)
            assert asked in answers.get(1 - version, [asked]) or asked in answers[version], "not before the exchange"
        await client.pause()
        await (client.exchange(path=path) if ready else client.reload(path))
        await client.resume()
        answers.setdefault(version, []).append(await client.score(PROBE))
        told = await client.checksums()
        assert len(told.given) > 20
        assert told.given[EMBEDDING] in [found for found, names in told.held if EMBEDDING in names]
    for version, found in answers.items():
        assert found == [found[0]] * len(found), "to the bit"
        assert found[0][1:] == pytest.approx(logprobs(world.models[version], PROBE)[1:], abs=1e-4)


async def test_weights_that_lack_a_tensor_are_not_made_ready(world: World) -> None:
    folder = world.server.home / "weights" / "short"
    save_policy(folder, seed=1)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.0.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    before = await world.server.client.score(PROBE)
    why, _ = await world.server.client.prepare(path=str(folder))
    assert why == "the weights lack model.layers.0.mlp.down_proj.weight"
    assert (await world.server.client.prepare(path=str(folder / "nothing"))).why
    with pytest.raises(EngineError, match="no weights to exchange: none are made ready"):
        await world.server.client.exchange(path=str(folder))
    assert await world.server.client.score(PROBE) == before


async def test_a_request_over_an_apply_goes_on_under_the_new_weights(world: World) -> None:
    await world.loader.apply(world.message(0))
    message = world.message(1)
    asked = [asyncio.create_task(world.generate(PROBE[: 10 + index], 400, seed=index)) for index in range(3)]
    await asyncio.sleep(0.3)
    assert (await world.loader.apply(message)).proven
    spanning = 0
    for prompt_length, answer in zip((10, 11, 12), await asyncio.gather(*asked), strict=True):
        versions = await proven_versions([world.server.client], world.publisher.run, answer)
        assert versions == sorted(versions)
        if set(versions) != {0, 1}:
            continue
        spanning += 1
        # Everything after the switch is what the new weights say of the whole sequence: no stale cache.
        reference = logprobs(world.models[1], PROBE[:prompt_length] + answer.token_ids)[prompt_length:]
        switch = versions.index(1)
        assert answer.logprobs[switch:] == pytest.approx(reference[switch:], abs=1e-4)
    assert spanning > 0


async def test_siblings_and_turns_find_what_they_share_under_one_salt_and_nothing_under_another(world: World) -> None:
    await world.loader.apply(world.message(0))
    siblings = await asyncio.gather(*(world.generate(PROBE, 20, seed=index, salt="a") for index in range(3)))
    # Also those that came at once: of 64 tokens one block, since the last must be put in again.
    assert sorted(sibling.cached_tokens for sibling in siblings) == [0, BLOCK_TOKENS, BLOCK_TOKENS]
    for sibling in siblings:
        said = PROBE + sibling.token_ids
        later = await world.generate([*said, *PROBE[:12]], 20, salt="a")
        assert later.cached_tokens == reachable(len(said), BLOCK_TOKENS) == 64
    assert (await world.generate(PROBE, 5, salt="b")).cached_tokens == 0


async def test_a_turn_over_a_weight_load_goes_on_and_the_next_one_finds_nothing_of_the_old_weights(
    world: World,
) -> None:
    await world.loader.apply(world.message(0))
    asked = asyncio.create_task(world.generate(PROBE, 400, salt="0"))
    await asyncio.sleep(0.3)
    assert (await world.loader.apply(world.message(1))).proven
    said = PROBE + (await asked).token_ids
    assert (await world.generate(said[:200], 5, salt="1")).cached_tokens == 0
    assert (await world.generate(said[:200], 5, salt="1")).cached_tokens == reachable(200, BLOCK_TOKENS)


async def test_an_engine_says_how_it_serves(world: World) -> None:
    import torch
    import vllm

    told = await world.server.client.serving()
    assert (told["engine_version"], told["torch_version"]) == (vllm.__version__, torch.__version__)
    assert (told["dtype"], told["kv_cache_dtype"], told["quantization"]) == ("float32", "float32", "none")
    assert told["attention_backend"] == "CPU_ATTN" and "UnquantizedLinearMethod" in told["layers"]
    assert (told["max_model_len"], told["block_size"], told["enforce_eager"]) == (CONTEXT, BLOCK_TOKENS, True)
    assert (told["prefix_caching"], told["chunked_prefill"]) == (True, False)
    assert told["logprobs_mode"] == "processed_logprobs"
    assert all(isinstance(value, str | int | float | bool) for value in told.values())
    await world.loader.apply(world.message(0))
    assert await world.server.client.serving() == told, "new weights are not another way to serve"


async def test_an_engine_tells_how_busy_it_is(world: World) -> None:
    await world.loader.apply(world.message(0))
    asked = list[asyncio.Task[Generation]]()
    async with asyncio.timeout(120):
        while (busy := await world.server.client.pressure()).running < 3:
            if all(task.done() for task in asked):  # On a busy machine they may be over before they were seen.
                asked = [asyncio.create_task(world.generate(PROBE, 400, seed=index)) for index in range(3)]
            await asyncio.sleep(0.02)
        assert 0 < busy.kv_usage < 1
        await asyncio.gather(*asked)
        while (idle := await world.server.client.pressure()).running:
            await asyncio.sleep(0.02)
    assert idle.waiting == 0
    assert idle.kv_usage < busy.kv_usage


async def test_a_corrupted_file_is_refused_and_the_engine_goes_on(world: World) -> None:
    await world.loader.apply(world.message(0))
    # Content that no other test has published: a verified copy on the disk would be used.
    message = world.message(7)
    store = world.publisher.store
    for key, size in store.keys(f"runs/{world.publisher.run}/objects/"):
        if size > 100_000:
            store.put(key, store.get(key)[: size // 2])
    with pytest.raises(StorageError):
        await world.loader.apply(message)
    answer = await world.generate(PROBE, 5)
    assert await proven_versions([world.server.client], world.publisher.run, answer) == [0] * 5


@pytest.mark.parametrize("channel", [WeightChannel.S3, WeightChannel.COLOCATED])
async def test_one_bit_that_flips_before_the_engine_reads_it_is_refused_though_the_canary_agrees(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Engine, channel: WeightChannel
) -> None:
    client, store, home = world.server.client, world.publisher.store, world.server.home
    world.publisher.run = f"flipped-{channel}"
    offers = Offers(tmp_path / "offers")
    cache = WeightsCache(store, home / "weights")
    loader = EngineLoader(client, store, cache, database, home, OfferSource("", offers.folder), hold_s=0.2)
    await loader.apply(world.message(0))
    # Content that no other test has published.
    message = world.message(8 + len(channel))
    offered = offers.path(read_manifest(store, message.manifest).weights_file.sha256)
    if channel is WeightChannel.COLOCATED:
        folder = world.publisher.folder / f"{world.publisher.run}-{message.version}"
        changes = {"channel": channel, "files": listed_folder(folder)}
        write_manifest(store, message.manifest, read_manifest(store, message.manifest).model_copy(update=changes))
        offers.put(folder / "model.safetensors", offered.name)

    def flip(path: Path) -> None:
        """The lowest bit of the last weight, in place: whoever has mapped the file sees it."""
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            octet = file.read(1)[0]
            file.seek(-4, os.SEEK_END)
            file.write(bytes([octet ^ 1]))

    async def prepare(**weights: str) -> Prepared:
        flip(Path(weights["path"]) / "model.safetensors" if "path" in weights else offered)
        return await EngineClient.prepare(client, **weights)

    with monkeypatch.context() as patched:
        patched.setattr(client, "prepare", prepare)
        wrong = await loader.apply(message)
    assert not wrong.proven and wrong.canary_max_abs < 1e-4
    assert "as the engine was given it" in wrong.why and "as the engine holds it" in wrong.why
    assert await client.label() == "unproven"
    if channel is WeightChannel.COLOCATED:
        flip(offered)
    right = await loader.apply(message)
    assert (right.proven, right.checked) == (True, wrong.checked + 1)


async def test_a_load_whose_canary_fails_is_disowned_until_one_is_proven(world: World) -> None:
    await world.loader.apply(world.message(0))
    wrong = await world.loader.apply(world.message(1, canary_of=0))
    assert not wrong.proven
    assert "differs from the trainer's" in wrong.why
    assert await world.server.client.label() == "unproven"
    assert (await world.loader.apply(world.message(2))).proven


async def test_a_cancelled_request_is_dropped_by_the_engine(world: World) -> None:
    await world.loader.apply(world.message(0))
    asked = asyncio.create_task(world.generate(PROBE[:9], 500))
    await asyncio.sleep(0.2)
    asked.cancel()
    await asyncio.sleep(0.3)
    metrics = (await world.server.client._http.get("/metrics")).text
    running = next(line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running"))
    assert float(running.split()[-1]) == 0


async def test_an_engine_killed_in_the_middle_of_a_load_serves_nothing_and_no_process_of_it_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.server
    await world.loader.apply(world.message(0))
    session = os.getsid(server.process.pid)
    pid = int((server.home / "engines" / "local-e0.pid").read_text())
    assert pid == server.process.pid
    assert any("EngineCore" in line for line in _members(session))
    exchange = server.client.exchange

    async def killed(**weights: str) -> None:
        os.kill(pid, signal.SIGKILL)
        await exchange(**weights)

    monkeypatch.setattr(server.client, "exchange", killed)
    with pytest.raises(EngineError) as caught:
        await world.loader.apply(world.message(1))
    assert caught.value.retryable
    desired = world.loader.desired
    assert desired is not None and (desired.message.version, desired.proof) == (1, None), "the keeper brings it back"
    assert await asyncio.to_thread(server.process.wait, 10) == -signal.SIGKILL
    async with asyncio.timeout(5):
        while any("EngineCore" in line for line in _members(session)):
            await asyncio.sleep(0.05)


def _members(session: int) -> list[str]:
    listed = subprocess.run(["ps", "-o", "args=", "-g", str(session)], capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()
