"""An attempt that loses its sandbox in a run with `replay_on_loss`: over a real server, with scripted activities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client

from tests.workflows.conftest import workers
from tests.workflows.fakes import ANSWER, COMMAND, World, final
from tests.workflows.test_episode import play
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    ActOutput,
    EpisodeRecord,
    EpisodeSummary,
    FailureType,
    JournalEntry,
    Outcome,
    ReplayInput,
    ReplayOutput,
    SandboxLease,
    StopReason,
    Timing,
)
from workflows.journal import PART_BYTES, Journal

Loses = Callable[[str, Any], bool]
LEASE = SandboxLease(sandbox_id="s0", container_id="c", image_id="i", host="h", attempt_id="r/g0/e0/a0")


class LossyWorld(World):
    """Three commands, then the answer. `loses(name, message)` says which calls find their sandbox gone."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: Loses = lambda name, message: False
        self.actions = lambda message: COMMAND if message.turn < 3 else ANSWER
        self.act_output = ActOutput(exit_code=0, output="42\n", command_s=1.0, total_bytes=3, output_digest="d")
        self.fail = self._lose
        self.replay_output = ReplayOutput(differs_at=None, timing=Timing(run_s=7.0))
        self.images: Callable[[int], str] = lambda generation: "sha256:i"

    def _lose(self, name: str, message: Any) -> None:
        if self.loses(name, message):
            raise final(FailureType.SANDBOX, "the container was removed")

    @activity.defn
    async def acquire(self, message: AcquireInput) -> AcquireOutput:
        self._note("acquire", message)
        lease = LEASE.model_copy(
            update={
                "sandbox_id": f"s{message.generation}",
                "image_id": self.images(message.generation),
                "attempt_id": message.attempt_id,
            }
        )
        return AcquireOutput(lease=lease)

    @activity.defn
    async def replay(self, message: ReplayInput) -> ReplayOutput:
        self._note("replay", message)
        return self.replay_output


@pytest.fixture
async def lossy(temporal: Client) -> Any:
    world = LossyWorld()
    async with workers(temporal, world):
        yield world


def at(name: str, *sandboxes: str, turn: int | None = None) -> Loses:
    """Calls of that name find these sandboxes gone."""
    return lambda called, message: (
        called == name and message.lease.sandbox_id in sandboxes and turn in (None, getattr(message, "turn", None))
    )


async def play_on(client: Client, world: World, **changes: Any) -> tuple[EpisodeSummary, EpisodeRecord]:
    return await play(client, world, **({"replay_on_loss": True, "max_turns": 5} | changes))


async def test_a_lost_sandbox_is_replaced_and_the_turn_goes_on_in_the_fresh_one(
    temporal: Client, lossy: LossyWorld
) -> None:
    lossy.loses = at("act", "s0", turn=2)
    summary, record = await play_on(temporal, lossy)
    assert (record.outcome, record.replays, summary.replays) == (Outcome.MODEL_SUCCESS, 1, 1)
    assert [message.turn for message in lossy.calls["generate"]] == [0, 1, 2, 3], "no turn is generated again"
    acts = [(message.turn, message.lease.sandbox_id) for message in lossy.calls["act"]]
    assert acts == [(0, "s0"), (1, "s0"), (2, "s0"), (2, "s1")]
    (replayed,) = lossy.calls["replay"]
    assert replayed.lease.sandbox_id == "s1"
    assert [(entry.turn, entry.op_id, entry.command) for entry in replayed.entries] == [
        (0, "t0", COMMAND.command),
        (1, "t1", COMMAND.command),
    ]
    assert {entry.output_digest for entry in replayed.entries} == {"d"}
    assert [turn.output_digest for turn in record.turns] == ["d", "d", "d", ""]
    assert lossy.calls["verify"][0].lease.sandbox_id == "s1"


async def test_a_replay_costs_the_agent_none_of_its_time(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("act", "s0", turn=2)
    _, record = await play_on(temporal, lossy, time_budget_s=3.5)
    assert record.outcome is Outcome.MODEL_SUCCESS and record.boot_s == 7.0
    assert [message.step_timeout_s for message in lossy.calls["act"]] == [3.5, 2.5, 1.5, 1.5]


async def test_a_sandbox_that_is_lost_before_the_verdict_is_replayed_whole(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("verify", "s0")
    _, record = await play_on(temporal, lossy)
    assert (record.outcome, record.replays) == (Outcome.MODEL_SUCCESS, 1)
    assert [len(message.entries) for message in lossy.calls["replay"]] == [3]
    assert [message.lease.sandbox_id for message in lossy.calls["verify"]] == ["s0", "s1"]


async def test_a_sandbox_that_is_lost_before_its_first_command_needs_no_replay(
    temporal: Client, lossy: LossyWorld
) -> None:
    lossy.loses = at("act", "s0")
    _, record = await play_on(temporal, lossy)
    assert (record.outcome, record.replays) == (Outcome.MODEL_SUCCESS, 1) and not lossy.calls["replay"]


async def test_a_replay_that_differs_ends_the_attempt_and_names_the_turn(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("act", "s0", turn=2)
    lossy.replay_output = ReplayOutput(differs_at=1, why="exit 1, 9 bytes, recorded was exit 0, 3 bytes")
    _, record = await play_on(temporal, lossy)
    assert (record.stop_reason, record.outcome) == (StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE)
    assert "the container was removed; replayed, turn 1 differed: exit 1, 9 bytes" in record.why
    assert len(lossy.calls["act"]) == 3 and not lossy.calls["verify"]


async def test_a_third_loss_ends_the_attempt(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("act", "s0", "s1", "s2", turn=2)
    _, record = await play_on(temporal, lossy)
    assert (record.stop_reason, record.replays) == (StopReason.SANDBOX_LOST, 2)
    assert "2 replays are spent" in record.why
    assert [message.generation for message in lossy.calls["acquire"]] == [0, 1, 2]


async def test_a_loss_within_a_replay_begins_it_anew(temporal: Client, lossy: LossyWorld) -> None:
    act, replay = at("act", "s0", turn=2), at("replay", "s1")
    lossy.loses = lambda name, message: act(name, message) or replay(name, message)
    _, record = await play_on(temporal, lossy)
    assert (record.outcome, record.replays) == (Outcome.MODEL_SUCCESS, 2)
    assert {message.lease.sandbox_id for message in lossy.calls["replay"]} == {"s1", "s2"}
    assert [message.lease.sandbox_id for message in lossy.calls["act"]][-1] == "s2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exit_code": None, "timed_out": True}, "the command of turn 0 had timed out"),
        ({"exit_code": None, "signal": 9}, "the command of turn 0 had no exit code"),
        ({"output_digest": ""}, "the output of turn 0 was not recorded"),
    ],
)
async def test_a_journal_that_can_not_be_compared_is_not_replayed(
    temporal: Client, lossy: LossyWorld, changes: dict[str, Any], said: str
) -> None:
    lossy.act_output = lossy.act_output.model_copy(update=changes)
    lossy.loses = at("act", "s0", turn=2)
    _, record = await play_on(temporal, lossy)
    assert record.stop_reason is StopReason.SANDBOX_LOST and said in record.why
    assert len(lossy.calls["acquire"]) == 1 and not lossy.calls["replay"]


async def test_a_fresh_sandbox_of_another_image_is_no_substitute(temporal: Client, lossy: LossyWorld) -> None:
    lossy.images = "sha256:i{}".format
    lossy.loses = at("act", "s0", turn=2)
    _, record = await play_on(temporal, lossy)
    assert record.stop_reason is StopReason.SANDBOX_LOST and "another image: sha256:i1" in record.why


async def test_without_the_option_a_loss_ends_the_attempt(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("act", "s0", turn=2)
    _, record = await play(temporal, lossy, max_turns=5)
    assert (record.stop_reason, record.outcome, record.replays) == (
        StopReason.SANDBOX_LOST,
        Outcome.INFRA_FAILURE,
        0,
    )
    assert len(lossy.calls["acquire"]) == 1 and not lossy.calls["replay"]


async def test_a_person_sees_the_loss_and_the_replay_in_the_ui(temporal: Client, lossy: LossyWorld) -> None:
    lossy.loses = at("act", "s0", turn=2)
    summary, _ = await play_on(temporal, lossy)
    handle = temporal.get_workflow_handle(summary.attempt_id)
    details = str(await handle.query("__temporal_workflow_metadata"))
    assert "sandbox lost" in details and "2 commands replayed into a fresh sandbox" in details
    summaries = [
        event.user_metadata.summary.data.decode()
        async for event in handle.fetch_history_events()
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert '"fresh sandbox for count-0001"' in summaries and '"replay 2 commands, loss 1"' in summaries


def entries(journal: Journal) -> Iterator[JournalEntry]:
    for part in journal.parts():
        assert sum(len(entry.command) for entry in part) <= PART_BYTES
        yield from part


def test_a_long_journal_goes_in_parts_that_fit_a_message_each() -> None:
    journal = Journal(100)
    for turn in range(40):
        message = ActInput(
            lease=LEASE, op_id=f"t{turn}", turn=turn, command="x" * 5000, step_timeout_s=1, max_output_chars=100
        )
        journal.add(message, ActOutput(exit_code=0, output_digest="d"))
    assert [entry.turn for entry in entries(journal)] == list(range(40))
    assert len(journal.parts()) == 7 and journal.obstacle == ""
    assert all(len(journal.message(LEASE, part).model_dump_json()) < 60_000 for part in journal.parts())
