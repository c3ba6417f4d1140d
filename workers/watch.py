"""Follow a run in a terminal: `ratchet watch RUN`.

Asks the workflow itself (`status` query) about once a second and shows step, reward, time to a trainable batch,
outcomes and pool: live on a terminal, a line per change elsewhere. Ends with the run. A server or worker that restarts
meanwhile is waited for and said; it never ends the watch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from pydantic import BaseModel, ConfigDict
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from workers.settings import Settings
from workflows.contracts import RunState, RunStatus
from workflows.run_state import quarantined_words, wait_words

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
QUIET_S = 15.0
"""Without a terminal, a line is printed at least this often."""
ASK = timedelta(seconds=5)
ENDINGS = {"CANCELED": "cancelled"}
"""Words of Temporal that are spelled otherwise here."""


class UnknownRun(Exception):
    """There is no such workflow; the text says what there is."""


class Look(BaseModel):
    """One look at a run. `status` is None when nobody could answer; `trouble` then says why."""

    model_config = ConfigDict(frozen=True)

    status: RunStatus | None = None
    ended: str = ""
    """How the workflow ended: completed, failed, cancelled, terminated, timed_out. Empty while it runs."""
    trouble: str = ""

    @property
    def finished(self) -> bool:
        return self.ended == "completed" and self.status is not None and self.status.state is RunState.FINISHED


class Eyes(Protocol):
    """Where a look comes from: the server, or a list in a test."""

    async def look(self) -> Look: ...


class ServerEyes:
    """Looks at a run of a Temporal server. Raises UnknownRun."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = run
        # Without a run id the handle follows the run across continue-as-new.
        self._handle = client.get_workflow_handle(run, result_type=RunStatus)

    async def look(self) -> Look:
        try:
            description = await self._handle.describe(rpc_timeout=ASK)
            if description.status is not WorkflowExecutionStatus.RUNNING and description.status is not None:
                return await self._ending(ENDINGS.get(description.status.name, description.status.name.lower()))
            return Look(status=await self._query())
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise UnknownRun(await self._what_there_is()) from None
            return Look(trouble=f"no answer from the Temporal server or a worker ({error.status.name.lower()})")
        except (WorkflowQueryFailedError, WorkflowQueryRejectedError) as error:
            return Look(trouble=f"the run can't answer yet ({error})")

    async def _query(self) -> RunStatus:
        answer: RunStatus = await self._handle.query("status", result_type=RunStatus, rpc_timeout=ASK)
        return answer

    async def _ending(self, ended: str) -> Look:
        try:
            return Look(status=await self._handle.result(rpc_timeout=ASK), ended=ended)
        except WorkflowFailureError as error:
            return Look(ended=ended, trouble=_innermost(error.cause))

    async def _what_there_is(self) -> str:
        query = "WorkflowType = 'TrainingRun'"
        found = [item.id async for item in self._client.list_workflows(query, limit=20)]
        names = ", ".join(dict.fromkeys(found)) or "none; start one with `temporal workflow start`"
        return f"there is no run {self._run!r}; there is {names}"


class View:
    """What is remembered between two looks, and how a look reads."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._rewards: dict[int, float] = {}
        self._last: RunStatus | None = None

    def see(self, look: Look) -> None:
        if look.status is not None:
            self._last = look.status
            if look.status.reward is not None:
                self._rewards[look.status.step] = look.status.reward

    @property
    def milestone(self) -> tuple[object, ...]:
        """What makes a new line worth printing."""
        status = self._last
        if status is None:
            return ()
        evaluations = (status.evaluation_first, status.evaluation_last)
        return (status.state, status.reason, status.step, *evaluations, len(status.quarantined), status.warning)

    def line(self, look: Look) -> str:
        """One line for a log."""
        status = self._last
        facts = (_unusual, _step, _reward, _batch, _pool, _episodes, _quarantine, _warning)
        words = [] if status is None else [*(fact(status) for fact in facts), status.doing]
        return "  ".join(word for word in (*words, look.trouble) if word)

    def panel(self, look: Look) -> Group:
        """The live picture."""
        status = self._last
        if status is None:
            return Group(Text(f"{self._run}: {look.trouble or 'waiting for its first answer'}", style="dim"))
        lines = [
            Text(f"{self._run}  {status.state}" + (f": {status.reason}" if status.reason else ""), style="bold"),
            Text(f"{_step(status)}   policy version {status.policy_version}   {status.doing}"),
            Text(f"{_reward(status) or 'batch reward -'}   {sparkline(list(self._rewards.values())[-SPARK_WIDTH:])}"),
            Text(_batch(status) or "no batch yet"),
            *([Text(f"  on average {parts}", style="dim")] if (parts := wait_words(status.wait)) else []),
            Text(_episodes(status) or "episodes none yet"),
            Text(_pool(status)),
        ]
        lines += [Text(words) for words in (_quarantine(status), _evaluation(status)) if words]
        lines += [Text(words, style="yellow") for words in (_warning(status), look.trouble) if words]
        return Group(*lines)


async def follow(eyes: Eyes, run: str, console: Console, *, every_s: float = 1.0) -> int:
    """Show looks until the run has ended. 0 if it finished, 1 if not. Raises UnknownRun."""
    view = View(run)
    if not console.is_terminal:
        look = await _loop(eyes, view, every_s, _printer(view, console))
    else:
        with Live(console=console, auto_refresh=False) as live:
            look = await _loop(eyes, view, every_s, lambda seen: live.update(view.panel(seen), refresh=True))
    return _close(view, look, run, console)


def watch_run(settings: Settings, run: str, *, every_s: float = 1.0) -> int:
    """Follow `run` on the stack's server; the exit code of `ratchet watch`."""
    return asyncio.run(_watch_run(settings, run, every_s))


async def _watch_run(settings: Settings, run: str, every_s: float) -> int:
    from workers.temporal import connect

    console = Console(soft_wrap=True)
    try:
        client = await connect(settings)
        return await follow(ServerEyes(client, run), run, console, every_s=every_s)
    except RuntimeError as error:
        console.print(f"no Temporal server answers at {settings.temporal_address}: {error}", markup=False)
    except UnknownRun as error:
        console.print(str(error), markup=False)
    return 1


async def _loop(eyes: Eyes, view: View, every_s: float, show: Callable[[Look], None]) -> Look:
    while True:
        look = await eyes.look()
        view.see(look)
        show(look)
        if look.ended:
            return look
        await asyncio.sleep(every_s)


def _printer(view: View, console: Console) -> Callable[[Look], None]:
    printed: tuple[object, ...] = ("nothing",)
    at = time.monotonic()

    def show(look: Look) -> None:
        nonlocal printed, at
        mark = (view.milestone, look.trouble)
        if not look.ended and (mark != printed or time.monotonic() - at > QUIET_S):
            printed, at = mark, time.monotonic()
            console.print(view.line(look), markup=False, highlight=False)

    return show


def _close(view: View, look: Look, run: str, console: Console) -> int:
    status = look.status
    if look.finished and status is not None:
        evaluation = _evaluation(status)
        console.print(f"{run} finished: {_step(status)}" + (f", {evaluation}" if evaluation else ""), markup=False)
        return 0
    why = look.trouble or (status.reason if status else "")
    console.print(f"{run} {look.ended}" + (f": {why}" if why else ""), markup=False, style="bold red")
    return 1


def sparkline(values: list[float]) -> str:
    """One block per value, between 0 and 1 or the values' own bounds where they lie outside."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def _unusual(status: RunStatus) -> str:
    """The state, where it is not the one that a run is in for most of its time."""
    if status.state is RunState.RUNNING:
        return ""
    return f"{status.state.value.upper()}: {status.reason}" if status.reason else status.state.value.upper()


def _step(status: RunStatus) -> str:
    return f"step {status.step}/{status.steps}"


def _reward(status: RunStatus) -> str:
    return "" if status.reward is None else f"batch reward {status.reward:.3f}"


def _batch(status: RunStatus) -> str:
    seconds, wait = status.time_to_trainable_batch_s, status.wait
    if seconds is None:
        return ""
    tail = f" (last 5 %: {wait.tail_s:.1f} s, {wait.tail_group.rpartition('/')[2]})" if wait and wait.tail_group else ""
    return f"time to trainable batch {seconds:.1f} s{tail}"


def _episodes(status: RunStatus) -> str:
    return f"episodes {counts}" if (counts := _counts(status.outcomes)) else ""


def _pool(status: RunStatus) -> str:
    dropped = f", dropped {_counts(status.groups_dropped)}" if status.groups_dropped else ""
    short = f", {status.short_groups} short" if status.short_groups else ""
    lag = "" if status.off_policy_steps is None else f", up to {status.off_policy_steps} versions behind"
    return f"groups {status.groups_in_flight} in flight, {status.groups_ready} ready{dropped}{short}{lag}"


def _quarantine(status: RunStatus) -> str:
    return f"in quarantine: {quarantined_words(status.quarantined)}" if status.quarantined else ""


def _warning(status: RunStatus) -> str:
    return f"WARNING: {status.warning}" if status.warning else ""


def _evaluation(status: RunStatus) -> str:
    if status.evaluation_first is None:
        return ""
    last = "" if status.evaluation_last is None else f" -> {status.evaluation_last:.3f}"
    return f"held-out reward {status.evaluation_first:.3f}{last}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count)


def _innermost(error: BaseException | None) -> str:
    """The message at the root of a failure's chain of causes."""
    while isinstance(error, FailureError) and isinstance(error.cause, FailureError):
        error = error.cause
    return str(error) if error is not None else ""
