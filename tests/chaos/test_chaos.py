"""A real run that is hit every few seconds, against the same run left alone.

`make chaos` takes twenty minutes of hits (CHAOS_STEPS, CHAOS_EVERY, CHAOS_SEED, CHAOS_HITS, CHAOS_ENGINES); in
`make test` it is a short form, one round of hits, in which each process dies once. A run that ends before that is
followed by another, of which the same is asked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from sqlmodel import col, select

from storage.database import session
from storage.tables import Batch, BatchMember, Episode, Turn
from tests.account import assert_complete, seconds, span, weights
from tests.chaos.hits import PROCESSES, Hits, parts_of
from tests.chaos.schedule import draw_schedule
from tests.pace import Pace, measured
from tests.stack import STEPS, Stack, straight_run, wait_for
from workflows.contracts import VALID

EVERY_S = float(os.environ.get("CHAOS_EVERY", "5"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
MOST_HITS = int(os.environ.get("CHAOS_MOST", "12"))
LEAST_HITS = int(os.environ.get("CHAOS_HITS", "7"))
LEAST_RATIO = float(os.environ.get("CHAOS_RATIO", "0"))
"""Least effective time ratio, at the speed that the machine had; 0 measures it only: a short run is all recovery."""
LIMIT_S = 3600.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LIMIT_S)]


@dataclass
class Account:
    """What was done to the run, and what it cost."""

    runs: list[str]
    hits: list[tuple[float, str, str]]
    attempts: set[str]
    straight_s: float
    """Of as many undisturbed runs."""
    run_s: float
    slower: float
    """What the same arithmetic took while the run was hit, as a multiple of what it took undisturbed."""
    restarts: Counter[str]
    """By part."""
    turns_lost: int
    turns_lost_with_their_sandbox: int

    @property
    def ratio(self) -> float:
        """Effective time ratio: what the run takes undisturbed, at the machine's speed under the hits, as a share of
        what it took."""
        return self.straight_s * self.slower / self.run_s

    def __str__(self) -> str:
        lines = [f"{at_s:7.1f} s  {kind:16} {what}" for at_s, kind, what in self.hits]
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(k for _, k, _ in self.hits).items()))
        return "\n".join(
            [
                "",
                *lines,
                f"runs                  {len(self.runs)}",
                f"hits                  {len(self.hits)} ({counts})",
                f"restarts of parts     {self.restarts.total()}",
                f"undisturbed           {self.straight_s:.0f} s",
                f"under hits            {self.run_s:.0f} s",
                f"machine's slowness    {self.slower:.2f} of what it was undisturbed",
                f"effective time ratio  {self.ratio:.2f} at one speed, {self.straight_s / self.run_s:.2f} by the clock",
                f"turns lost            {self.turns_lost} while the sandbox lived,"
                f" {self.turns_lost_with_their_sandbox} with a sandbox that was taken away",
            ]
        )


@pytest.fixture(scope="session", autouse=True)
def pace() -> Iterator[Pace]:
    """Begun before the undisturbed run."""
    with measured() as found:
        yield found


@pytest.fixture(scope="module")
def account(pace: Pace, stack: Stack, straight: str) -> Account:
    before = restarts(stack)
    hits = Hits(stack, SEED)
    runs, done = hit_run_after_run(stack, hits)
    for run in runs:
        stack.finish(run, 600)
    wait_for(lambda: stack.ratchet("status", check=False).returncode == 0, 120)
    lived, died = turns_lost(stack, runs, hits.attempts)
    return Account(
        runs=runs,
        hits=done,
        attempts=hits.attempts,
        straight_s=len(runs) * seconds(stack, straight),
        run_s=sum(seconds(stack, run) for run in runs),
        slower=pace.cost([span(stack, run) for run in runs]) / pace.cost([span(stack, straight)]),
        restarts=restarts(stack) - before,
        turns_lost=lived,
        turns_lost_with_their_sandbox=died,
    )


def hit_run_after_run(stack: Stack, hits: Hits) -> tuple[list[str], list[tuple[float, str, str]]]:
    """Until a run ends after each process has been hit, or after the most hits."""
    runs, done = list[str](), list[tuple[float, str, str]]()
    wanted = set(PROCESSES) & set(hits.kinds)
    schedule = draw_schedule(SEED, sorted(hits.kinds), EVERY_S, PROCESSES)
    due = next(schedule)
    began, paused_s = time.monotonic(), 0.0
    while len(done) < MOST_HITS and not wanted <= {kind for _, kind, _ in done}:
        between = time.monotonic()
        wait_for(lambda: stack.ratchet("status", check=False).returncode == 0, 120)
        runs.append(f"chaos-{len(runs) + 1}")
        hits.run = runs[-1]
        stack.start(hits.run, straight_run() | {"evaluation": {"tasks": 0}})
        wait_for(lambda: stack.status(hits.run).get("groups_in_flight", 0) > 0, 200)
        paused_s += time.monotonic() - between
        while len(done) < MOST_HITS and stack.closed(hits.run)[0] in ("", "RUNNING"):
            at_s = time.monotonic() - began - paused_s
            assert at_s < LIMIT_S, stack.status(hits.run)
            if at_s < due.at_s:
                time.sleep(0.2)
            else:
                if what := land(hits.kinds[due.kind]):
                    done.append((at_s, due.kind, what))
                    print(f"{at_s:7.1f} s  {due.kind:16} {what}", flush=True)
                due = next(schedule)
    return runs, done


def land(hit: Callable[[], str]) -> str:
    """Hit as soon as there is something to hit, as a process that is being restarted or a sandbox; bounded."""
    for _ in range(20):
        if what := hit():
            return what
        time.sleep(0.5)
    return ""


def restarts(stack: Stack) -> Counter[str]:
    return Counter({part["name"]: part["restarts"] for part in stack.supervised()["parts"]})


def turns_lost(stack: Stack, runs: list[str], taken: set[str]) -> tuple[int, int]:
    """Turns of attempts that did not count: of those whose sandbox lived, and of those whose sandbox was taken."""
    with session(stack.database()) as opened:
        lost = opened.exec(
            select(Turn.episode)
            .join(Episode, col(Turn.episode) == Episode.id)
            .where(col(Episode.run).in_(runs), col(Episode.outcome).in_(["infra_failure", "unknown"]))
        ).all()
    return sum(episode not in taken for episode in lost), sum(episode in taken for episode in lost)


def test_the_run_ends_complete_and_leaves_nothing(stack: Stack, account: Account) -> None:
    print(account)
    assert len(account.hits) >= LEAST_HITS
    for run in account.runs:
        assert_complete(stack, run, steps=STEPS)


@pytest.mark.parametrize("part", PROCESSES)
def test_the_run_survives_kill_9_of(stack: Stack, account: Account, part: str) -> None:
    if part == "docker" and stack.pid(part) is None:
        pytest.skip("the Docker daemon on this machine is not the stack's to kill")
    assert part in {kind for _, kind, _ in account.hits}
    assert sum(account.restarts[name] for name in parts_of(stack, part)) > 0


def test_the_weights_are_those_of_the_run_left_alone(stack: Stack, straight: str, account: Account) -> None:
    expected = weights(stack, straight)
    assert len(set(expected)) == STEPS + 1, "every step changes the weights"
    for run in account.runs:
        step, command = parted(stack, straight, run)
        assert not command or "|" in command or "&" in command, f"{command!r} gave another output"
        if command:
            print(f"\n{run} is compared up to step {step}: two processes of {command!r} wrote in another order")
        assert step > 1 and weights(stack, run)[:step] == expected[:step]


def parted(stack: Stack, one: str, other: str) -> tuple[int, str]:
    """The first step for which the same command of the same agent printed something else, and the command: what two
    processes of a pipeline write at once comes in either order, and nobody can say which. (STEPS + 1, "") for none."""
    seen = [observations(stack, run) for run in (one, other)]
    differing = sorted(
        (turn, action)
        for turn, (action, digest) in seen[0].items()
        if turn in seen[1] and seen[1][turn][0] == action and seen[1][turn][1] != digest
    )
    if not differing:
        return STEPS + 1, ""
    (number, *_), command = differing[0]
    with session(stack.database()) as opened:
        batches = opened.exec(
            select(Batch.step, BatchMember.group_id)
            .join(BatchMember, col(BatchMember.batch) == Batch.id)
            .where(col(Batch.run).in_((one, other)))
        ).all()
    return min((step for step, group_id in batches if int(group_id.rpartition("/g")[2]) >= number), default=1), command


def observations(stack: Stack, run: str) -> dict[tuple[int, int, int], tuple[str, str]]:
    """By group, sibling and turn: the command and the digest of its output, of attempts that counted."""
    with session(stack.database()) as opened:
        rows = opened.exec(
            select(Episode.episode_id, Turn)
            .join(Turn, col(Turn.episode) == Episode.id)
            .where(Episode.run == run, Episode.kind == "train", col(Episode.outcome).in_(VALID))
        ).all()
    found = {}
    for episode_id, turn in rows:
        _, group, sibling = episode_id.rsplit("/", 2)
        found[int(group[1:]), int(sibling[1:]), turn.turn] = (turn.action, turn.output_digest)
    return found


def test_no_failure_of_infrastructure_is_in_a_batch(stack: Stack, account: Account) -> None:
    with session(stack.database()) as opened:
        trained = opened.exec(
            select(Episode.outcome, Episode.reward)
            .join(BatchMember, col(BatchMember.episode) == Episode.id)
            .join(Batch, col(BatchMember.batch) == Batch.id)
            .where(col(Batch.run).in_(account.runs))
        ).all()
    assert trained and {outcome for outcome, _ in trained} <= {"model_success", "model_failure"}
    assert all(reward is not None for _, reward in trained)


def test_no_turn_is_lost_while_its_sandbox_lives(account: Account) -> None:
    assert account.turns_lost == 0


def test_most_of_the_time_goes_into_the_run(account: Account) -> None:
    assert account.ratio >= LEAST_RATIO
