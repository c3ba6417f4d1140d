"""Agent programs of other people over a real engine: what is recorded of them is what the engine saw and made."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from temporalio.testing import ActivityEnvironment

from activities.agents.activities import AgentActivities, output_key
from activities.agents.endpoint import AgentEndpoint
from activities.agents.session import AgentSession
from activities.generation.activities import GenerationActivities
from activities.generation.engine import GENERATE_PATH, EngineClient
from activities.generation.harnesses import BASH
from activities.generation.routing import EnginePool
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tests.agents.mini import MINI_ENV, mini, mini_command
from tests.agents.worlds import LEASE, OneTask, Sandbox
from tests.generation.policies import HERMES, make_tokenizer, save_policy
from tests.generation.vllm_server import Server, started
from workflows.contracts import (
    AgentProgram,
    EngineInfo,
    RolloutLimits,
    RunAgentInput,
    RunAgentOutput,
    Segment,
    Split,
    StopReason,
    TaskRef,
    TurnRecord,
)

__all__ = ["mini"]

pytestmark = [pytest.mark.engine, pytest.mark.machines]
"""Another engine's start and a program from PyPI are too much for `make test`."""
RUN = "r"
CONTEXT = 1024


def save_with_tools(folder: Path, *, seed: int) -> Any:
    """The random policy, with a template that renders tools."""
    model = save_policy(folder, seed=seed)
    make_tokenizer(HERMES, eos="<|im_end|>").save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    home, model = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("model") / "base"
    async with started(home, model, context_length=CONTEXT, save=save_with_tools) as server:
        await server.client.set_label(f"{RUN}:3")
        yield server


class Wire(httpx.AsyncHTTPTransport):
    """The engine's connection, with what went over it: its own token ids, seen by neither side's code."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.answered: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path == GENERATE_PATH:
            await response.aread()
            self.asked.append(json.loads(request.content)["token_ids"])
            self.answered.append(response.json()["choices"][0])
        return response


class World:
    """A session's parts over the real engine."""

    def __init__(self, server: Server, store: ObjectStore, spool: Path) -> None:
        self.wire, self.store, self.model = Wire(), store, server.model
        self.template = Template.load(str(server.model))
        self.sandbox = Sandbox()

        def connect(info: EngineInfo) -> EngineClient:
            return EngineClient(info, transport=self.wire)

        self.pool = EnginePool([server.client.info], connect=connect)
        self.generation = GenerationActivities(self.pool, store, lambda _: OneTask())
        self.spool = spool

    def message(self, command: str = "true", **changes: Any) -> RunAgentInput:
        env = changes.pop("env", {})
        limits: dict[str, Any] = {
            "temperature": 1.0,
            "max_turns": 6,
            "max_tokens_per_turn": 48,
            "max_tokens": 400,
            "context_length": CONTEXT,
            "step_timeout_s": 5,
            "time_budget_s": 60,
            "max_output_chars": 400,
            "malformed_reminders": 1,
            "harness": "external",
            "agent": AgentProgram(command=command, env=env),
        }
        return RunAgentInput(
            run=RUN,
            attempt_id=f"{RUN}/g1/e0/a0",
            model=str(self.model),
            task=TaskRef(taskset="one", split=Split.TRAIN, task_id="t"),
            limits=RolloutLimits(**(limits | changes)),
            lease=LEASE,
            seed=11,
        )

    def segments(self, turns: list[TurnRecord]) -> list[Segment]:
        return [Segment.model_validate_json(self.store.get(str(turn.segment))) for turn in turns]

    def assert_exact(self, turns: list[TurnRecord]) -> dict[int, list[int]]:
        """By branch the ids that train. What is recorded of each turn is what went over the wire, token by token."""
        assert len(turns) == len(self.wire.answered) > 0
        branches: dict[int, list[int]] = {}
        for segment, asked, answer in zip(self.segments(turns), self.wire.asked, self.wire.answered, strict=True):
            made = len(answer["token_ids"])
            ids = branches.setdefault(segment.branch, [])
            ids += segment.token_ids
            assert ids == asked + answer["token_ids"]
            assert segment.loss_mask == [0] * (len(segment.token_ids) - made) + [1] * made
            assert segment.logprobs[-made:] == [item["logprob"] for item in answer["logprobs"]["content"]]
            assert segment.versions[-made:] == [3] * made
        return branches


@pytest.fixture
async def world(server: Server, object_store: ObjectStore, tmp_path: Path) -> AsyncIterator[World]:
    world = World(server, object_store, tmp_path / "spool")
    async with world.pool:
        yield world


async def test_openais_own_client_talks_to_the_engine_and_what_is_recorded_is_the_engines(world: World) -> None:
    session = AgentSession(world.message(), world.template, world.generation, world.sandbox.act)
    messages: list[Any] = [{"role": "system", "content": "cat"}, {"role": "user", "content": "How many?"}]
    async with (
        AgentEndpoint() as endpoint,
        endpoint.serving(session) as access,
        AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.key) as client,
    ):
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[BASH],  # type: ignore[list-item]
                stop=["\N{BULLET} no such text"],
            )
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
        with pytest.raises(openai.APIStatusError):
            for _ in range(4):
                await client.chat.completions.create(model="policy", messages=messages)
    branches = world.assert_exact(session.turns)
    # Its random answers go on as one conversation; the last ones, without the tools, are another.
    assert branches.keys() == {0, 1, 2}
    later = [turn for turn, segment in zip(session.turns, world.segments(session.turns), strict=True) if segment.turn]
    assert any(turn.cached_tokens > 0 for turn in later), "a turn finds the one before in the engine's cache"


async def test_a_stop_text_ends_an_answer_at_the_engine(world: World) -> None:
    """It is in the ids, as it was sampled, and not in what the program sees."""
    session = AgentSession(world.message(), world.template, world.generation, world.sandbox.act)
    asked: Any = [{"role": "user", "content": "How many?"}]
    async with (
        AgentEndpoint() as endpoint,
        endpoint.serving(session) as access,
        AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.key) as client,
    ):
        whole = await client.chat.completions.create(model="policy", messages=asked)
        text = whole.choices[0].message.content or ""
        stop = next(char for char in text[1:] if char.isascii() and char.isprintable())
        session._begun = 0  # the same turn, and so the same seed
        cut = await client.chat.completions.create(model="policy", messages=asked, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text.partition(stop)[0]
    made = world.wire.answered[-1]["token_ids"]
    assert stop in world.template.text(made) and len(made) < len(world.wire.answered[0]["token_ids"])


async def test_an_unmodified_mini_swe_agent_yields_trajectories_whose_ids_are_the_engines(
    world: World, mini: Path
) -> None:
    """Must show 5. It talks to the endpoint through litellm, and would act through `docker exec`."""
    command = mini_command(mini)
    async with AgentEndpoint() as endpoint:
        activities = AgentActivities(
            world.generation,
            world.sandbox.act,
            world.store,
            lambda _: OneTask(),
            endpoint,
            spool=world.spool,
            path=os.environ["PATH"],
        )
        out: RunAgentOutput = await ActivityEnvironment().run(
            activities.run_agent, world.message(command, env=MINI_ENV, max_turns=2)
        )
    printed = world.store.get(output_key(RUN, f"{RUN}/g1/e0/a0")).decode()
    assert out.stop_reason is StopReason.MAX_TURNS, printed[-3000:]
    assert len(out.turns) == 2
    branches = world.assert_exact(out.turns)
    assert 0 in branches
