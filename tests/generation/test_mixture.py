"""A mixture of experts on a real engine: what it tells of its experts, and that a load of weights reaches them."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from activities.generation.answers import Generation
from tests.generation.policies import save_mixture
from tests.generation.test_vllm import logprobs
from tests.generation.vllm_server import Server, started
from workers.align import Sampled, compare

pytestmark = pytest.mark.engine
PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """In bfloat16, where engine and trainer choose different experts here and there."""
    home, model = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("model") / "base"
    async with started(home, model, context_length=256, save=save_mixture, dtype="bfloat16") as server:
        # Recording begins with the first request for it.
        await answer(server, [1, 2], 1)
        yield server


async def answer(server: Server, prompt: list[int], tokens: int, *, seed: int = 0, routed_from: int = 0) -> Generation:
    return await server.client.generate(
        prompt, temperature=1.0, max_tokens=tokens, seed=seed, stop_token_ids=[], routed_from=routed_from
    )


def experts(made: Generation) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(made.routed_experts)))
    return found


async def test_an_engine_tells_the_experts_of_every_token_that_went_through_it(server: Server) -> None:
    first = await answer(server, PROMPT, 12)
    assert experts(first).shape == (len(PROMPT) + 11, 2, 4)
    assert experts(first).min() >= 0 and experts(first).max() < 16
    assert len({tuple(row) for row in experts(first)[:, 0]}) > 10
    history = PROMPT + first.token_ids
    second = await answer(server, [*history, 7, 8], 5, routed_from=len(history) - 1)
    assert experts(second).shape == (3 + 4, 2, 4) and experts(second).min() >= 0
    assert 0 < second.cached_tokens < len(history), "tokens that it does not ask for come from the cache"
    sibling = await answer(server, PROMPT, 3, seed=1)
    assert sibling.cached_tokens == 32
    assert (experts(sibling)[:32] == -1).all() and (experts(sibling)[32:] >= 0).all(), "cached ones went through none"


async def test_the_engines_experts_lower_the_mismatch(server: Server) -> None:
    sampled = []
    for seed in range(12):
        prompt = [(seed * 31 + index * 7) % 250 for index in range(16)]
        made = await answer(server, prompt, 48, seed=seed)
        sampled.append(Sampled(prompt, made.token_ids, made.logprobs, 1.0, made.routed_experts, together=False))
    rows = compare(server.model, sampled, "bfloat16", "bfloat16", "sdpa")
    replayed, own = (next(row for row in rows if row.routing == way) for way in ("replayed", "own"))
    assert replayed.mismatch_kl < 0.7 * own.mismatch_kl and replayed.mismatch_kl_max < own.mismatch_kl_max
    assert replayed.far_share == 0 < own.far_share


async def test_a_load_of_weights_reaches_the_experts(server: Server, tmp_path: Path) -> None:
    """On CPU they are packed for their kernel when the engine starts; vLLM's own reload leaves them unpacked."""
    other = save_mixture(tmp_path / "other", seed=1)
    before = await server.client.score(PROMPT)
    for folder in (tmp_path / "other", server.model, tmp_path / "other"):
        await server.client.pause()
        # What is packed besides its matrices is no matter of a twin.
        assert (await server.client.prepare(path=str(folder))).why.startswith("model.layers.0.mlp")
        await server.client.reload(str(folder))
        await server.client.resume()
        found = await server.client.score(PROMPT)
        if folder == server.model:
            assert found == before
    assert np.abs(np.array(found) - logprobs(other, PROMPT)).max() < 0.2
    assert np.abs(np.array(found) - before).max() > 0.5
