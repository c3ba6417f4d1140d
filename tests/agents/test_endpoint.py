"""The OpenAI-compatible endpoint under OpenAI's own client: conversations, tools, streaming, budgets, errors, keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from activities.agents.endpoint import AgentEndpoint
from activities.generation.harnesses import BASH
from storage.objects import ObjectStore
from tests.agents.clients import ASKED, MORE, client_of, dumped, say
from tests.agents.worlds import AgentWorld
from tests.generation.policies import LLAMA3, LLAMA3_SPECIAL, REWRITING
from tests.generation.test_harnesses import CALL, HERMES_LS, LLAMA3_LS, THOUGHT
from workflows.contracts import FinishReason, StopReason
from workflows.errors import EngineError


async def test_a_conversation_that_goes_on_is_one_trajectory_of_the_engines_own_ids(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.says = ["Three.", "Two.", "None."]
    session = world.session()
    messages: list[Any] = list(ASKED)
    async with client_of(endpoint, session) as client:
        for question in (MORE, {"role": "user", "content": "Birds?"}, None):
            answer = await say(client, messages)
            messages += [dumped(answer.choices[0].message), *([question] if question else [])]
    assert [message["content"] for message in messages if message["role"] == "assistant"] == world.says
    (ids,) = world.branches(session.turns)
    texts = [{"role": message["role"], "content": message["content"]} for message in messages]
    assert [*ids[:-1]] == world.rendered(texts)[: len(ids) - 1]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids) - len(world.made[2]), len(world.made[2]))


async def test_sampled_ids_are_kept_where_their_text_has_other_ones(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    session = world.session()
    world.encode = lambda text: [world.tokenizer.convert_tokens_to_ids(letter) for letter in text]  # type: ignore[method-assign]
    world.says = ["cat", "cat"]
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED)
        await say(client, [*ASKED, dumped(answer.choices[0].message), MORE])
    (ids,) = world.branches(session.turns)
    assert world.made[0] == [*(world.tokenizer.convert_tokens_to_ids(letter) for letter in "cat"), ids[-1]]


async def test_the_first_prompt_is_the_templates_own(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    async with client_of(endpoint, world.session()) as client:
        parts = [{"type": "text", "text": "How many "}, {"type": "text", "text": "cats?"}]
        await say(client, [ASKED[0], {"role": "user", "content": parts}], tools=[BASH])
    assert world.engine.requests[0]["token_ids"] == world.rendered(ASKED, [BASH])


@pytest.mark.parametrize("family", ["hermes", "llama3"])
async def test_tools_go_to_the_model_and_its_calls_come_back_in_openais_shape(
    family: str, endpoint: AgentEndpoint, object_store: ObjectStore, tmp_path: Path, world: AgentWorld
) -> None:
    if family == "llama3":
        world = AgentWorld(object_store, tmp_path / "llama3", LLAMA3, special=LLAMA3_SPECIAL)
    world.says = [HERMES_LS if family == "hermes" else LLAMA3_LS, "Two."]
    session = world.session()
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED, tools=[BASH])
        said = answer.choices[0].message
        (call,) = said.tool_calls
        assert (answer.choices[0].finish_reason, said.content) == ("tool_calls", None)
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            *("bash", {"command": "ls"}),
        )
        seen = {"role": "tool", "tool_call_id": call.id, "content": "cat1\ncat2"}
        await say(client, [*ASKED, dumped(said), seen], tools=[BASH])
    assert len(world.branches(session.turns)) == 1
    whole = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, seen]
    assert world.engine.requests[1]["token_ids"] == world.rendered(whole, [BASH])


async def test_calls_are_not_read_where_no_tools_were_offered_and_broken_ones_are_text(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.says = [HERMES_LS, "<tool_call>ls"]
    async with client_of(endpoint, world.session()) as client:
        for options in ({}, {"tools": [BASH]}):
            answer = await say(client, ASKED, **options)
            assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
            assert "tool_call" in answer.choices[0].message.content


async def test_thoughts_that_a_program_drops_stay_where_they_were_sampled(
    endpoint: AgentEndpoint, object_store: ObjectStore, tmp_path: Path
) -> None:
    """Also under a template that would drop them itself: nothing is rendered again."""
    world = AgentWorld(object_store, tmp_path, REWRITING)
    world.says = [THOUGHT + "Three.", THOUGHT + "Two."]
    session = world.session()
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED)
        said = answer.choices[0].message
        assert (said.content, said.model_dump()["reasoning_content"]) == ("Three.", "hm")
        await say(client, [*ASKED, {"role": "assistant", "content": said.content}, MORE])
    (ids,) = world.branches(session.turns)
    assert world.tokenizer.decode(ids).count("hm") == 2


async def test_another_history_is_another_branch_and_all_that_was_sampled_trains_once(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.says = ["Three.", "Two.", "Four.", "Five."]
    session = world.session()
    async with client_of(endpoint, session) as client:
        first = dumped((await say(client, ASKED)).choices[0].message)
        await say(client, [*ASKED, first, MORE])
        # A fork: the second question is asked otherwise.
        await say(client, [*ASKED, first, {"role": "user", "content": "And mice?"}])
        # A summary, with which nothing known begins.
        await say(client, [ASKED[0], {"role": "user", "content": "Three cats. And dogs?"}])
    branches = world.branches(session.turns)
    segments = world.segments(session.turns)
    assert [segment.branch for segment in segments] == [0, 0, 1, 2]
    shared = len(segments[0].token_ids)
    assert branches[1][:shared] == branches[0][:shared], "a fork begins with the ids of what it forks from"
    assert segments[2].loss_mask[:shared] == [0] * shared
    trained = [sum(segment.loss_mask) for segment in segments]
    assert trained == [len(ids) for ids in world.made]


async def test_an_answer_that_the_program_edits_begins_a_branch_of_its_own(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    session = world.session()
    async with client_of(endpoint, session) as client:
        await say(client, ASKED)
        edited = [*ASKED, {"role": "assistant", "content": "Four."}, MORE]
        await say(client, edited)
    assert [segment.branch for segment in world.segments(session.turns)] == [0, 1]
    assert world.engine.requests[1]["token_ids"] == world.rendered(edited)


async def test_other_tools_are_another_conversation(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    session = world.session()
    async with client_of(endpoint, session) as client:
        said = dumped((await say(client, ASKED)).choices[0].message)
        await say(client, [*ASKED, said, MORE], tools=[BASH])
    assert [segment.branch for segment in world.segments(session.turns)] == [0, 1]


async def test_a_streamed_answer_is_the_same_answer(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    world.says = ["I look." + HERMES_LS]
    session = world.session()
    async with client_of(endpoint, session) as client:
        chunks = [
            chunk
            async for chunk in await say(
                client, ASKED, tools=[BASH], stream=True, stream_options={"include_usage": True}
            )
        ]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "bash")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(world.made[0])


async def test_the_run_says_how_is_sampled_and_the_engine_is_asked_as_for_a_turn(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    async with client_of(endpoint, world.session(temperature=0.7)) as client:
        await say(client, ASKED, temperature=0, seed=1, top_p=0.5, max_tokens=9, tool_choice="required")
    sampling = world.engine.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"]) == (0.7, 9)
    assert "top_p" not in sampling and sampling["seed"] != 1
    assert world.engine.headers[0]["x-session-id"] == "r/g1/e0/a0"


async def test_stop_texts_reach_the_engine_and_are_not_shown(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    world.says = ["Look.\nObservation: 3"]
    session = world.session()
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED, stop=["\nObservation:"])
        await say(client, [*ASKED, dumped(answer.choices[0].message), MORE])
    assert world.engine.requests[0]["sampling_params"]["stop"] == ["\nObservation:"]
    assert answer.choices[0].message.content == "Look."
    assert len(world.branches(session.turns)) == 1


async def test_an_answer_cut_at_its_budget_says_so(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    session = world.session(max_tokens_per_turn=4)
    async with client_of(endpoint, session) as client:
        answer = await say(client, ASKED)
    assert (answer.choices[0].finish_reason, session.turns[0].finish_reason) == ("length", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 1}, StopReason.MAX_TURNS), ({"max_tokens": 5}, StopReason.MAX_TOKENS)]
)
async def test_a_spent_budget_is_an_error_that_the_client_does_not_repeat(
    limits: dict[str, int], reason: StopReason, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    session = world.session(**limits)
    async with client_of(endpoint, session) as client:
        await say(client, ASKED)
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await say(client, ASKED)
    assert (caught.value.code, caught.value.type) == (reason.value, "insufficient_quota")
    assert session.spent is not None and session.spent.reason is reason
    assert len(world.engine.requests) == 1


async def test_a_full_context_is_openais_error_and_a_shorter_conversation_goes_on(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    room = len(world.rendered(ASKED)) + 40
    session = world.session(context_length=room)
    async with client_of(endpoint, session) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await say(client, [ASKED[0], {"role": "user", "content": "cats " * 100}])
        assert caught.value.code == "context_length_exceeded" and "maximum context length" in str(caught.value)
        assert session.spent is not None and session.spent.reason is StopReason.CONTEXT_FULL
        await say(client, ASKED)
    assert session.spent is None
    assert [turn.turn for turn in session.turns] == [0], "a refusal is no turn"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": []}, "invalid_request"),
        ({"messages": [{"content": "x"}]}, "invalid_request"),
        ({"messages": ASKED, "n": 2}, "unsupported_parameter"),
        ({"messages": ASKED, "response_format": {"type": "json_object"}}, "unsupported_parameter"),
        ({"messages": ASKED, "logprobs": True}, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "invalid_request"),
        ([], "invalid_request"),
    ],
)
async def test_what_is_not_there_is_refused_in_openais_shape(
    body: Any, code: str, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    session = world.session()
    async with endpoint.serving(session) as access, httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {access.key}"}
        answer = await http.post(f"{access.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code and error["message"] and error["type"] == "invalid_request_error"
    assert session.turns == [] and world.engine.requests == []


async def test_a_key_opens_its_own_attempt_for_as_long_as_that_lasts(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    one, other = world.session(), world.session()
    async with client_of(endpoint, one) as client:
        async with client_of(endpoint, other) as second:
            await say(second, ASKED)
        assert (len(one.turns), len(other.turns)) == (0, 1)
        for key in (second.api_key, "sk-no"):
            async with AsyncOpenAI(base_url=client.base_url, api_key=key) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await say(stranger, ASKED)
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert endpoint.url.startswith("http://127.0.0.1:")


async def test_a_program_that_hangs_up_ends_its_request_and_leaves_no_turn(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.engine.held = asyncio.Event()
    session = world.session()
    async with client_of(endpoint, session) as client:
        asked = asyncio.create_task(say(client, ASKED))
        async with asyncio.timeout(5):
            while not world.engine.running:
                await asyncio.sleep(0.01)
            asked.cancel()
            while world.engine.running:
                await asyncio.sleep(0.01)
        world.engine.held.set()
        await say(client, ASKED)
    assert [turn.turn for turn in session.turns] == [1]


async def test_an_engine_that_comes_back_is_waited_for(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.session.FIRST_PAUSE_S", 0.01)
    world.engine.fail["/inference/v1/generate"] = 503
    session = world.session()
    async with client_of(endpoint, session) as client:
        asked = asyncio.create_task(say(client, ASKED))
        async with asyncio.timeout(5):
            while world.engine.calls.count("/inference/v1/generate") < 4:
                await asyncio.sleep(0.01)
        world.engine.fail.clear()
        assert (await asked).choices[0].message.content == "Answer: 3"
    assert session.broken is None


async def test_an_engine_that_does_not_come_back_breaks_the_attempt_and_is_no_answer(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.session.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("activities.agents.session.TRIES", 2)
    world.engine.fail["/inference/v1/generate"] = 503
    session = world.session()
    async with client_of(endpoint, session) as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                await say(client, ASKED)
            assert caught.value.code == "episode_over"
    assert isinstance(session.broken, EngineError) and session.turns == []


async def test_calls_beside_each_other_share_the_budget_and_fork(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    session = world.session()
    async with client_of(endpoint, session) as client:
        said = dumped((await say(client, ASKED)).choices[0].message)
        questions = [{"role": "user", "content": f"And {name}?"} for name in ("dogs", "mice", "birds")]
        await asyncio.gather(*(say(client, [*ASKED, said, question]) for question in questions))
    assert sorted(segment.branch for segment in world.segments(session.turns)) == [0, 0, 1, 2]
    assert sorted(turn.turn for turn in session.turns) == [0, 1, 2, 3]
