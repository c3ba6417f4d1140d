"""Rewards that look wrong: what the rows of a run give reason to look into. No model judges anything here.

Each finding is one kind of suspicion about one task, with the attempts behind it and the figures. A finding is a reason
to look, not a proof; attempts that are in quarantine already are passed over. Reads only, over one open session; the
thresholds are `[audit]` of storage/report/limits.toml. Called by `ratchet audit` and the report.

- `no_command`: a success in which no command ran, where the task's oracle runs one or is not known.
- `verifier_time`: a success whose verifier ran far shorter or longer than those of the task's successes do: beyond
  `verify_deviations` times 1.4826 MAD (the robust standard deviation), `verify_ratio` times the median or its part, and
  `verify_s` seconds, all three.
- `few_commands`: a success with far fewer commands than the oracle runs; where that is not known, than the task's other
  successes do in the median.
- `tampered`: tests or verifier were touched, or an expected test was not reported.
- `flaky_verifier`: the same commands, outputs and answer, and different rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from statistics import median
from typing import NamedTuple, Protocol

import sqlalchemy
from sqlalchemy import case, func, not_
from sqlmodel import Session, col, select

from storage.health import doings
from storage.quarantine import in_quarantine
from storage.tables import Episode, Task, Turn
from workflows.contracts import VALID, Outcome, StopReason

NORMAL = 1.4826
"""Median absolute deviations of a normal distribution in one standard deviation."""


class Suspicion(StrEnum):
    NO_COMMAND = "no_command"
    VERIFIER_TIME = "verifier_time"
    FEW_COMMANDS = "few_commands"
    TAMPERED = "tampered"
    FLAKY_VERIFIER = "flaky_verifier"


class Thresholds(Protocol):
    """`[audit]` of limits.toml, which says what each means."""

    @property
    def samples(self) -> int: ...
    @property
    def verify_deviations(self) -> float: ...
    @property
    def verify_ratio(self) -> float: ...
    @property
    def verify_s(self) -> float: ...
    @property
    def few_commands_ratio(self) -> float: ...
    @property
    def few_commands(self) -> int: ...


class Finding(NamedTuple):
    """`episodes`: attempt ids. `of`: the attempts at the task among which they were found. `words`: one sentence.
    Example: no_command of shell/count-17, 2 attempts of 40, `2 of 40 successes ran no command`."""

    suspicion: Suspicion
    task: str
    episodes: list[str]
    of: int
    figures: dict[str, float]
    words: str
    detail: str = ""
    """What was said of one of them; not our own words."""


class Attempt(NamedTuple):
    """A valid attempt, as far as an audit looks at it."""

    id: str
    task: str
    passed: bool
    tampered: bool
    verify_s: float
    commands: int
    why: str


def audit(opened: Session, *, run: str, thresholds: Thresholds) -> list[Finding]:
    """The findings, by suspicion and then by task."""
    tasks: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in _attempts(opened, run):
        tasks[attempt.task].append(attempt)
    oracles = _oracles(opened, run)
    found: list[Finding] = []
    for task in sorted(tasks):
        passed = [attempt for attempt in tasks[task] if attempt.passed]
        found += _no_command(task, passed, oracles.get(task))
        found += _verifier_time(task, passed, thresholds)
        found += _few_commands(task, passed, oracles.get(task), thresholds)
        found += _tampered(task, tasks[task])
    found += _flaky(opened, run)
    order = list(Suspicion)
    return sorted(found, key=lambda item: (order.index(item.suspicion), item.task))


def _attempts(opened: Session, run: str) -> list[Attempt]:
    """The valid attempts that are not in quarantine, of training and evaluation, in the order of their ids."""
    ran = col(Turn.exit_code).is_not(None) | col(Turn.timed_out).is_(True) | (col(Turn.output_digest) != "")
    commands = (
        sqlalchemy.select(col(Turn.episode).label("episode"), func.sum(case((ran, 1), else_=0)).label("commands"))
        .join(Episode, col(Turn.episode) == col(Episode.id))
        .where(col(Episode.run) == run)
        .group_by(col(Turn.episode))
        .subquery()
    )
    # SQLAlchemy's own select: SQLModel types at most four columns.
    statement = (
        sqlalchemy.select(
            col(Episode.id),
            col(Episode.task),
            col(Episode.outcome) == Outcome.MODEL_SUCCESS,
            col(Episode.tampered) | (col(Episode.stop_reason) == StopReason.TAMPERED),
            col(Episode.verify_s),
            func.coalesce(commands.c.commands, 0),
            col(Episode.why),
        )
        .select_from(Episode)
        .join(commands, commands.c.episode == col(Episode.id), isouter=True)
        .where(col(Episode.run) == run, col(Episode.outcome).in_(VALID), not_(in_quarantine()))
        .order_by(col(Episode.id))
    )
    rows = opened.connection().execute(statement).all()
    return [
        Attempt(row[0], row[1], bool(row[2]), bool(row[3]), float(row[4]), int(row[5]), str(row[6])) for row in rows
    ]


def _oracles(opened: Session, run: str) -> dict[str, int]:
    """Commands of the oracle, of the run's tasks of which that is known."""
    tried = select(Episode.task).where(Episode.run == run).distinct()
    statement = select(Task.id, Task.oracle_commands).where(col(Task.id).in_(tried))
    return {key: count for key, count in opened.exec(statement).all() if count is not None}


def _no_command(task: str, passed: list[Attempt], oracle: int | None) -> Iterator[Finding]:
    if oracle == 0:
        return
    if idle := [attempt for attempt in passed if not attempt.commands]:
        figures = {"successes": float(len(passed))} | ({} if oracle is None else {"oracle_commands": float(oracle)})
        words = f"{len(idle)} of {len(passed)} successes ran no command"
        yield _finding(Suspicion.NO_COMMAND, task, idle, len(passed), figures, words)


def _verifier_time(task: str, passed: list[Attempt], bounds: Thresholds) -> Iterator[Finding]:
    graded = [attempt for attempt in passed if attempt.verify_s > 0]
    if len(graded) < bounds.samples:
        return
    usual = median(attempt.verify_s for attempt in graded)
    spread = NORMAL * median(abs(attempt.verify_s - usual) for attempt in graded)

    def far(attempt: Attempt) -> bool:
        low, high = sorted((attempt.verify_s, usual))
        apart = high - low
        return (
            apart > bounds.verify_deviations * spread and apart >= bounds.verify_s and high >= bounds.verify_ratio * low
        )

    if odd := [attempt for attempt in graded if far(attempt)]:
        worst = max(odd, key=lambda attempt: abs(attempt.verify_s - usual))
        figures = {"median_s": usual, "deviation_s": spread, "farthest_s": worst.verify_s}
        words = (
            f"the verifier of {len(odd)} of {len(graded)} successes ran far from the usual {usual:.1f} s"
            f" (robust deviation {spread:.2f} s), one for {worst.verify_s:.1f} s"
        )
        yield _finding(Suspicion.VERIFIER_TIME, task, odd, len(graded), figures, words)


def _few_commands(task: str, passed: list[Attempt], oracle: int | None, bounds: Thresholds) -> Iterator[Finding]:
    if not passed or (oracle is None and len(passed) < bounds.samples):
        return
    usual = float(oracle if oracle is not None else median(attempt.commands for attempt in passed))

    def few(commands: int) -> bool:
        # What ran none is told by another finding.
        return (
            commands > 0 and commands * bounds.few_commands_ratio <= usual and usual - commands >= bounds.few_commands
        )

    if quick := [attempt for attempt in passed if few(attempt.commands)]:
        fewest = min(attempt.commands for attempt in quick)
        whose = "the oracle runs" if oracle is not None else "successes run in the median"
        words = (
            f"{len(quick)} of {len(passed)} successes took far fewer commands than the {usual:g} that {whose},"
            f" one took {fewest}"
        )
        figures = {"fewest_commands": float(fewest), "expected_commands": usual}
        yield _finding(Suspicion.FEW_COMMANDS, task, quick, len(passed), figures, words)


def _tampered(task: str, attempts: list[Attempt]) -> Iterator[Finding]:
    if caught := [attempt for attempt in attempts if attempt.tampered]:
        words = f"{len(caught)} of {len(attempts)} attempts touched the tests or the verifier"
        found = _finding(Suspicion.TAMPERED, task, caught, len(attempts), {}, words)
        yield found._replace(detail=caught[-1].why)


def _flaky(opened: Session, run: str) -> Iterator[Finding]:
    alike: dict[tuple[str, bytes], list[tuple[str, float]]] = defaultdict(list)
    for attempt, task, reward, digest in doings(opened, run=run, which=not_(in_quarantine())):
        alike[task, digest].append((attempt, reward))
    torn: dict[str, list[list[tuple[str, float]]]] = defaultdict(list)
    for (task, _), scored in alike.items():
        if max(reward for _, reward in scored) - min(reward for _, reward in scored) > 1e-9:
            torn[task].append(scored)
    for task, sets in torn.items():
        every = [item for scored in sets for item in scored]
        low, high = (pick(reward for _, reward in every) for pick in (min, max))
        words = (
            f"{len(every)} attempts ran the same commands, saw the same and gave the same answer as another that was"
            f" scored differently, from {low:g} to {high:g}"
        )
        figures = {"lowest_reward": low, "highest_reward": high}
        yield Finding(Suspicion.FLAKY_VERIFIER, task, [attempt for attempt, _ in every], len(every), figures, words)


def _finding(
    suspicion: Suspicion, task: str, attempts: list[Attempt], of: int, figures: dict[str, float], words: str
) -> Finding:
    return Finding(suspicion, task, [attempt.id for attempt in attempts], of, figures, words)
