from __future__ import annotations

import io

from rich.console import Console

from workers.watch import Look, View, follow, sparkline
from workflows.contracts import BatchWait, RunState, RunStatus


def status(step: int, *, state: RunState = RunState.RUNNING, **fields: object) -> RunStatus:
    values: dict[str, object] = {
        "run": "r",
        "state": state,
        "step": step,
        "steps": 2,
        "policy_version": step,
        "reward": 0.25 * step,
        "time_to_trainable_batch_s": 4.2,
        "outcomes": {"model_success": 3, "model_failure": 5},
        "groups_in_flight": 2,
        "groups_ready": 1,
        "groups_dropped": {"no_signal": 1},
        "doing": "collecting",
    }
    return RunStatus.model_validate(values | fields)


class Recorded:
    """Looks from a list, the last for ever."""

    def __init__(self, *looks: Look) -> None:
        self._looks = list(looks)

    async def look(self) -> Look:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


async def shown(*looks: Look, terminal: bool = False) -> tuple[int, str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, soft_wrap=True)
    code = await follow(Recorded(*looks), "r", console, every_s=0.0)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


async def test_what_a_batch_waited_for_and_for_whom_is_shown() -> None:
    wait = BatchWait(
        seconds=4.2,
        parts={"queue": 0.4, "generate": 2.5, "wait_for_siblings": 1.3, "boot": 0.0},
        tail_s=1.1,
        tail_group="r/g7",
        tail_attempt="r/g7/e3/a0",
    )
    look = Look(status=status(1, wait=wait), ended="failed")
    _, line = await shown(Look(status=status(1, wait=wait)), look)
    assert "time to trainable batch 4.2 s (last 5 %: 1.1 s, g7)" in line
    _, panel = await shown(look, terminal=True)
    assert "on average generate 2.5 s, wait for siblings 1.3 s, queue 0.4 s" in panel


FINISHED = Look(
    status=status(2, state=RunState.FINISHED, evaluation_first=0.2, evaluation_last=0.95), ended="completed"
)


async def test_a_finished_run_ends_the_watch_well() -> None:
    code, text = await shown(Look(status=status(1)), FINISHED)
    assert code == 0
    assert (
        "step 1/2  batch reward 0.250  time to trainable batch 4.2 s  groups 2 in flight, 1 ready, dropped no_signal 1"
        "  episodes model_failure 5, model_success 3  collecting" in text
    )
    assert "r finished: step 2/2, held-out reward 0.200 -> 0.950" in text


async def test_without_a_terminal_a_line_is_printed_per_change_only() -> None:
    same = Look(status=status(1))
    _, text = await shown(same, same, same, Look(status=status(2)), FINISHED)
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "step 1/2",
        "step 2/2",
        "r finished: step 2/2, held-out reward 0.200 -> 0.950",
    ]


async def test_a_state_other_than_running_leads_the_line_with_its_reason() -> None:
    paused = status(1, state=RunState.PAUSED)
    degraded = status(1, state=RunState.DEGRADED, reason="4 groups in a row lost their sandboxes")
    _, text = await shown(Look(status=paused), Look(status=degraded), FINISHED)
    lines = text.splitlines()
    assert lines[0].startswith("PAUSED  step 1/2")
    assert lines[1].startswith("DEGRADED: 4 groups in a row lost their sandboxes  step 1/2")


async def test_a_warning_and_the_lag_in_force_are_shown_on_a_line_and_in_the_picture() -> None:
    look = Look(status=status(1, warning="mismatch_kl 2e-03 is above", off_policy_steps=2))
    for live in (False, True):
        _, text = await shown(look, FINISHED, terminal=live)
        assert "WARNING: mismatch_kl 2e-03 is above" in text and "up to 2 versions behind" in text


async def test_a_failed_run_ends_it_with_the_reason() -> None:
    code, text = await shown(Look(status=status(1)), Look(ended="failed", trouble="model: no such folder [x]"))
    assert code == 1
    assert "r failed: model: no such folder [x]" in text


async def test_a_cancelled_run_is_not_well() -> None:
    code, text = await shown(Look(ended="cancelled", trouble="cancelled by request"))
    assert (code, "r cancelled: cancelled by request" in text) == (1, True)


async def test_a_server_that_restarts_is_told_and_waited_for() -> None:
    gone = Look(trouble="no answer from the Temporal server or a worker (unavailable)")
    code, text = await shown(Look(status=status(1)), gone, gone, Look(status=status(2)), FINISHED)
    assert code == 0
    assert text.count("no answer from the Temporal server") == 1


async def test_short_groups_and_tasks_in_quarantine_are_shown_on_a_line_and_in_the_picture() -> None:
    tasks = {f"t{number}": "why" for number in range(7)}
    look = Look(status=status(1, quarantined=tasks, short_groups=21))
    for live in (False, True):
        _, text = await shown(look, FINISHED, terminal=live)
        assert "dropped no_signal 1, 21 short" in text
        assert "in quarantine: t0 (why); t1 (why)" in text and "and 2 more" in text


async def test_a_terminal_gets_the_live_picture() -> None:
    code, text = await shown(Look(status=status(1)), Look(status=status(2)), FINISHED, terminal=True)
    assert code == 0
    for piece in ("step 2/2", "policy version 2", "episodes model_failure 5, model_success 3", "collecting"):
        assert piece in text


def test_the_sparkline_spans_zero_to_one() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([-1.0, 3.0]) == "▁█"


def test_a_view_remembers_rewards_by_step() -> None:
    view = View("r")
    for step in (1, 1, 2):
        view.see(Look(status=status(step)))
    assert view._rewards == {1: 0.25, 2: 0.5}
