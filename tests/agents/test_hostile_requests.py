"""Requests to an attempt's endpoint that a careful program would not send: none ends it or holds up others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from activities.agents.endpoint import MOST_CALLS, AgentEndpoint
from activities.generation.harnesses import BASH
from tests.agents.clients import ASKED, client_of, post, say
from tests.agents.worlds import AgentWorld
from workflows.contracts import StopReason


@pytest.mark.parametrize(("stop", "asked"), [("", None), ([""], None), (["", "END"], ["END"])])
async def test_an_empty_stop_text_is_none(
    stop: Any, asked: list[str] | None, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    session = world.session()
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED, stop=stop)
    assert answer.choices[0].message.content == "Answer: 3"
    assert world.engine.requests[0]["sampling_params"].get("stop") == asked and len(session.turns) == 1


async def test_bytes_that_are_no_text_reach_the_model_and_the_sandbox_replaced(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    """A program in Python makes halves of characters of them (surrogateescape)."""
    session = world.session()
    async with endpoint.serving(session) as access:
        chat = b'{"messages": [{"role": "user", "content": "caf\\udce9 \\ud83d\\ude00"}]}'
        assert (await post(access, "/v1/chat/completions", chat)).status_code == 200
        assert (await post(access, "/sandbox/run", b'{"command": "cat caf\\udce9"}')).status_code == 200
    seen = [{"role": "user", "content": "caf\ufffd \U0001f600"}]
    assert world.engine.requests[0]["token_ids"] == world.rendered(seen)
    assert world.sandbox.commands == ["cat caf\ufffd"]


async def test_a_call_that_can_not_be_written_as_text_goes_out_as_content(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    deep = '<tool_call>{"name": "bash", "arguments": {"command": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"
    world.says = [deep]
    session = world.session(max_tokens_per_turn=20_000, max_tokens=20_000, context_length=40_000)
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED, tools=[BASH])
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == deep


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sandbox/run"])
async def test_a_body_that_is_nested_without_end_is_refused(
    path: str, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    async with endpoint.serving(world.session()) as access:
        answer = await post(access, path, b'{"messages": ' + b"[" * 100_000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_request"


async def test_megabytes_are_a_full_context_before_anybody_makes_tokens_of_them(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.session(context_length=500)
    rendered: list[Any] = []
    monkeypatch.setattr(world.template, "_render", lambda *given, **_: rendered.append(given))
    async with client_of(endpoint, session) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await say(client, [{"role": "user", "content": "cats " * 1_000_000}])
    assert caught.value.code == "context_length_exceeded" and "maximum context length" in str(caught.value)
    assert rendered == [] and session.spent is not None and session.spent.reason is StopReason.CONTEXT_FULL


async def test_a_command_that_no_shell_takes_is_answered_as_a_shell_would(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    """What can't be started for a reason of its own would look like somebody else's fault."""
    async with endpoint.serving(world.session()) as access:
        answer = await post(access, "/sandbox/run", json.dumps({"command": "echo " + "x" * 200_000}).encode())
    assert answer.json()["exit_code"] == 126 and "Argument list too long" in answer.json()["output"]
    assert world.sandbox.commands == []


async def test_of_a_program_that_calls_without_end_a_few_calls_are_read_at_a_time(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    """The others get their answers later, and none once the attempt is over."""
    world.engine.held = asyncio.Event()
    session = world.session(max_turns=100, max_tokens=400_000)
    chat = json.dumps({"messages": ASKED, "max_tokens": 40}).encode()
    most = 0
    async with endpoint.serving(session) as access:
        calls = [asyncio.create_task(post(access, "/v1/chat/completions", chat)) for _ in range(3 * MOST_CALLS)]
        async with asyncio.timeout(20):
            while world.engine.running < MOST_CALLS:
                await asyncio.sleep(0.01)
            command = await post(access, "/sandbox/run", b'{"command": "ls"}')
            assert command.status_code == 200, "commands have places of their own"
            most = world.engine.running
            world.engine.held.set()
            answered = await asyncio.gather(*calls)
            world.engine.held.clear()
            late = [asyncio.create_task(post(access, "/v1/chat/completions", chat)) for _ in range(2 * MOST_CALLS)]
            while world.engine.running < MOST_CALLS:
                await asyncio.sleep(0.01)
    assert most == MOST_CALLS and {answer.status_code for answer in answered} == {200}
    refused = [answer.json()["error"]["code"] for answer in await asyncio.gather(*late)]
    assert sorted({*refused}) == ["episode_over", "invalid_api_key"]
    turns = len(session.turns)
    world.engine.held.set()
    await asyncio.sleep(0)
    assert len(session.turns) == turns and world.engine.running == 0
