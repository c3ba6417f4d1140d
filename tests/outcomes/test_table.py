"""The outcome table of the design: one test per row, each provoked for real.

`pytest -m outcomes -v` prints the list. The episodes run beside each other: the agents' rows against a scripted engine,
the engine's own against a real vLLM, the others while somebody takes their service away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from activities.generation.harness import initial_messages
from activities.generation.transcript import Template
from tests.generation.policies import save_drawn
from tests.generation.vllm_server import Server, started
from tests.outcomes import meddling, rows
from tests.outcomes.engine import ScriptedEngine, serving
from tests.outcomes.worlds import FAILURE_REWARD, LABEL, Ending, Row, Rows, World
from workflows.contracts import Outcome

pytestmark = [pytest.mark.outcomes, pytest.mark.docker, pytest.mark.engine]
AT_ONCE = 8
LONGEST_S = 500.0
SEEN: dict[str, ScriptedEngine] = {}


@pytest.fixture(scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    home, model = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("model") / "base"
    async with started(home, model, context_length=1024, save=save_drawn) as server:
        yield await meddling.prepared(server)


@pytest.fixture(scope="module")
async def endings(
    open_world: Callable[..., Any],
    vllm: Server,
    new_database: Callable[[], tuple[Path, Engine]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Ending | BaseException]:
    """What came of each row. One that could not be played holds its exception, for its own test to raise."""
    async with AsyncExitStack() as stack:
        engine = SEEN["scripted"] = ScriptedEngine({row.id: row.says for row in rows.ROWS}, label=LABEL)
        engine.refuses[rows.ENGINE_REFUSES.id] = 503
        disowned = ScriptedEngine({}, label="unproven")
        engines = [await stack.enter_async_context(serving(engine))]
        nobody = [await stack.enter_async_context(serving(disowned))]

        async def world(**parts: Any) -> World:
            opened: World = await stack.enter_async_context(
                open_world(rows=rows.ROWS, **({"engines": engines} | parts))
            )
            return opened

        main = await world()
        weights = await world(engines=nobody)
        tokens = await world(engines=[vllm.client.info], model=vllm.model)

        async def locked(**how: float) -> World:
            path, file = new_database()
            found = await world(database=file)
            found.mend = await stack.enter_async_context(meddling.locked(path, file, **how))
            return found

        gone, start = await stack.enter_async_context(meddling.daemon_gone(tmp_path_factory.mktemp("d")))
        dark = await world(backend=gone)
        dark.mend = start
        store = await stack.enter_async_context(meddling.store_killed(tmp_path_factory.mktemp("s3")))
        played = {rows.MAX_TOKENS.id: _with_vllm(tokens, vllm)}
        played |= {row.id: main.play(row) for row in [*rows.AGENT, rows.ENGINE_REFUSES]} | {
            rows.ENGINE_DISOWNED.id: weights.play(rows.ENGINE_DISOWNED),
            rows.DATABASE_LOCKED.id: (await locked()).play(rows.DATABASE_LOCKED),
            rows.DATABASE_HANGS.id: (await locked(waits_s=60)).play(rows.DATABASE_HANGS),
            rows.DAEMON_GONE.id: dark.play(rows.DAEMON_GONE),
            rows.STORE_KILLED.id: (await world(store=store)).play(rows.STORE_KILLED),
            rows.CONTAINER_REMOVED.id: meddling.while_it_runs(main, rows.CONTAINER_REMOVED, "rm", "-f"),
            rows.CONTAINER_KILLED.id: meddling.while_it_runs(main, rows.CONTAINER_KILLED, "kill"),
            rows.OTHERS_WERE_ENOUGH.id: meddling.told_that_others_were_enough(main, rows.OTHERS_WERE_ENOUGH),
            rows.CONTRADICTORY.id: meddling.killed_after_it_ran_out_of_memory(main, rows.CONTRADICTORY),
        }
        found = await _all(played)
        several = found.pop(rows.MAX_TOKENS.id)
        names = (rows.MAX_TOKENS.id, rows.CONTEXT_FULL.id, rows.ENGINE_KILLED.id)
        found |= dict(zip(names, several, strict=True)) if isinstance(several, list) else dict.fromkeys(names, several)
        async with meddling.verify_bounded(3):
            found |= await _all({rows.OVERDUE.id: main.play(rows.OVERDUE)})
        return found


async def _all(played: dict[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(playing: Coroutine[Any, Any, Any]) -> Any:
        async with turns:
            return await asyncio.wait_for(playing, LONGEST_S)

    endings = await asyncio.gather(*map(one, played.values()), return_exceptions=True)
    return dict(zip(played, endings, strict=True))


async def _with_vllm(world: World, server: Server) -> list[Ending]:
    """The three rows of the real engine, one after the other: the last one ends it."""
    template = Template.load(str(server.model))
    task = Rows([rows.CONTEXT_FULL]).load(rows.CONTEXT_FULL.id)
    prompt = template.initial(initial_messages(task))
    seed, context = await meddling.context_that_fills(server, prompt, template.end_of_turn)
    filled = Row(**(rows.CONTEXT_FULL.__dict__ | {"limits": {"context_length": context}}))
    return [
        await world.play(rows.MAX_TOKENS),
        await world.play(filled, seed),
        await meddling.killed_in_mid_request(world, server, rows.ENGINE_KILLED),
    ]


def ending_of(endings: dict[str, Ending | BaseException], row: Row) -> Ending:
    ending = endings[row.id]
    if isinstance(ending, BaseException):
        raise ending
    return ending


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.id)
async def test_row(endings: dict[str, Ending | BaseException], row: Row) -> None:
    ending = ending_of(endings, row)
    assert (ending.summary.stop_reason, ending.summary.outcome) == (row.stop_reason, row.outcome), "".join(
        ending.failures
    )
    assert ending.summary.reward == row.reward
    assert ending.left == set(), "its sandbox is still there"
    if not row.recorded:
        assert ending.recorded is None
        return
    assert ending.recorded is not None
    assert (ending.recorded.stop_reason, ending.recorded.outcome) == (row.stop_reason, row.outcome)
    assert (ending.recorded.reward, ending.recorded.tampered) == (row.reward, row.tampered)
    assert row.why in ending.recorded.why
    assert row.evidence.items() <= ending.recorded.evidence.items(), ending.recorded.evidence


def test_the_rows_cover_every_stop_reason_and_keep_to_the_tables_rewards() -> None:
    from workflows.outcome import TABLE, Rule

    assert {row.stop_reason for row in rows.ROWS} == set(TABLE)
    for row in rows.ROWS:
        rule = TABLE[row.stop_reason]
        assert (row.reward is None) is (rule in (Rule.INFRA, Rule.UNKNOWN, Rule.SURPLUS))
        assert (row.reward == FAILURE_REWARD) is (rule is Rule.FAILURE)


async def test_a_command_over_its_step_time_out_is_told_to_the_agent_which_goes_on(
    endings: dict[str, Ending | BaseException],
) -> None:
    ending = ending_of(endings, next(row for row in rows.AGENT if row.id == "step-time-out-is-no-ending"))
    assert "timed out after 1 s" in SEEN["scripted"].heard["step-time-out-is-no-ending"][1]
    assert [turn.timed_out for turn in ending.turns] == [True, False, False]
    assert ending.summary.outcome is Outcome.MODEL_SUCCESS


async def test_no_evidence_is_gathered_where_none_is_needed(endings: dict[str, Ending | BaseException]) -> None:
    for name in ("finished-passes", "finished-fails", "max_turns", "malformed_action"):
        ending = endings[name]
        assert isinstance(ending, Ending) and ending.recorded is not None
        assert ending.recorded.evidence == {}
