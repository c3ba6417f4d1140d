from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from activities.generation.engine import EngineClient
from activities.generation.harness import initial_messages, observation_message, parse_action
from activities.generation.transcript import Template
from bench.durability import RUN, tokenizer_folder
from bench.round_robin import RoundRobin
from bench.stub_engine import COMMANDS, TURNS, StubEngine
from tasksets.shell import ShellTaskset
from workflows.contracts import ActionKind, EngineInfo


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template.load(str(tokenizer_folder(tmp_path_factory.mktemp("model"))))


async def play(client: EngineClient, template: Template) -> list[str]:
    """The texts of one episode's turns."""
    ids = template.initial(initial_messages(ShellTaskset().load("count-0001")))
    texts = []
    for turn in range(TURNS):
        made = await client.generate(
            ids, temperature=1.0, max_tokens=64, seed=turn, stop_token_ids=[template.end_of_turn]
        )
        assert made.labels == {f"{RUN}:0"}
        texts.append(template.text(made.token_ids))
        ids = ids + made.token_ids + template.continuation(made.token_ids[-1], observation_message("(no output)"))
    return texts


async def test_an_episode_gets_its_commands_in_order_and_then_an_answer(template: Template) -> None:
    async with TestServer(StubEngine(template, f"{RUN}:0").application()) as server:
        client = EngineClient(EngineInfo(name="local-e0", host="local", url=str(server.make_url(""))))
        assert await client.label() == f"{RUN}:0"
        actions = [parse_action(text) for text in await play(client, template)]
        await client.close()
    assert [action.command for action in actions[:-1]] == list(COMMANDS)
    assert actions[-1].kind is ActionKind.FINAL


async def test_round_robin_hands_requests_to_the_engines_in_turn(template: Template, tmp_path: Path) -> None:
    async with (
        TestServer(StubEngine(template, f"{RUN}:0").application()) as one,
        TestServer(StubEngine(template, f"{RUN}:1").application()) as other,
    ):
        urls = [str(server.make_url("")).rstrip("/") for server in (one, other)]
        async with TestServer(RoundRobin(urls).application()) as router:
            client = EngineClient(EngineInfo(name="router", host="local", url=str(router.make_url(""))))
            labels = [await client.label() for _ in range(4)]
            await client.close()
    assert labels == [f"{RUN}:0", f"{RUN}:1"] * 2
