from __future__ import annotations

import io

from rich.console import Console

from workers.watch import Look, View, follow, sparkline
from workflows.contracts import RunState, RunStatus


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


FINISHED = Look(
    status=status(2, state=RunState.FINISHED, evaluation_first=0.2, evaluation_last=0.95), ended="completed"
)


async def test_a_finished_run_ends_the_watch_well() -> None:
    code, text = await shown(Look(status=status(1)), FINISHED)
    assert code == 0
    assert (
        "step 1/2  reward 0.250  time to trainable batch 4.2 s  groups 2 in flight, 1 ready, dropped no_signal 1"
        in text
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


async def test_a_failed_run_ends_it_with_the_reason() -> None:
    code, text = await shown(Look(status=status(1)), Look(ended="failed", trouble="model: no such folder [x]"))
    assert code == 1
    assert "r failed: model: no such folder [x]" in text


async def test_a_cancelled_run_is_not_well() -> None:
    code, text = await shown(Look(ended="canceled", trouble="cancelled by request"))
    assert (code, "canceled" in text) == (1, True)


async def test_a_server_that_restarts_is_told_and_waited_for() -> None:
    gone = Look(trouble="no answer from the Temporal server or a worker (unavailable)")
    code, text = await shown(Look(status=status(1)), gone, gone, Look(status=status(2)), FINISHED)
    assert code == 0
    assert text.count("no answer from the Temporal server") == 1


async def test_a_terminal_gets_the_live_picture() -> None:
    code, text = await shown(Look(status=status(1)), Look(status=status(2)), FINISHED, terminal=True)
    assert code == 0
    for piece in ("step 2/2", "policy version 2", "episodes   model_failure 5, model_success 3", "collecting"):
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
