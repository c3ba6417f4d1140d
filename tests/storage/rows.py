"""Records as the workflows report them, for tests of what the database makes of them."""

from __future__ import annotations

from sqlmodel import Session

from storage import queries
from storage.tables import Run
from workflows.contracts import (
    BatchWait,
    EpisodeKind,
    EpisodeRecord,
    GroupResult,
    Outcome,
    RunState,
    Split,
    StopReason,
    TaskRef,
    TurnRecord,
)

TASK = TaskRef(taskset="shell", split=Split.TRAIN, task_id="count-17")


def put_run(opened: Session, run: str = "r", *, state: RunState = RunState.RUNNING) -> None:
    opened.add(Run(id=run, state=state, config={"model": "tiny"}, mode="async", seed=0, started_at=1.0))
    opened.flush()


def record(attempt_id: str = "r/g0/e0/a0", *, reward: float | None = 1.0, turns: int = 2) -> EpisodeRecord:
    """The record of one attempt; no reward means that its sandbox was lost."""
    episode_id, _, attempt = attempt_id.rpartition("/a")
    group_id = episode_id.rpartition("/")[0]
    lost = reward is None
    return EpisodeRecord(
        attempt_id=attempt_id,
        episode_id=episode_id,
        group_id=group_id,
        run=group_id.rpartition("/")[0],
        kind=EpisodeKind.TRAIN,
        task=TASK,
        attempt=int(attempt),
        outcome=Outcome.INFRA_FAILURE if lost else Outcome.MODEL_SUCCESS if reward else Outcome.MODEL_FAILURE,
        stop_reason=StopReason.SANDBOX_LOST if lost else StopReason.FINISHED,
        reward=reward,
        min_version=0,
        max_version=1,
        queue_s=1.0,
        boot_s=2.0,
        generate_s=3.0,
        act_s=4.0,
        verify_s=5.0,
        turns=[TurnRecord(turn=turn, segment=f"s/{attempt_id}/{turn}", max_version=1) for turn in range(turns)],
    )


def group(number: int = 0, *, run: str = "r", rewards: tuple[float, ...] = (1.0, 0.0)) -> GroupResult:
    group_id = f"{run}/g{number}"
    return GroupResult(
        group_id=group_id,
        number=number,
        task_id=TASK.task_id,
        members=[f"{group_id}/e{index}/a0" for index in range(len(rewards))],
        rewards=list(rewards),
        eligible=True,
        outcomes={"model_success": 1, "model_failure": 1},
        started_at=2.0,
        closed_at=3.0,
    )


def put_group_with_episodes(
    opened: Session, number: int = 0, *, run: str = "r", rewards: tuple[float, ...] = (1.0, 0.0)
) -> GroupResult:
    made = group(number, run=run, rewards=rewards)
    for attempt_id, reward in zip(made.members, made.rewards, strict=True):
        queries.put_episode(opened, record=record(attempt_id, reward=reward))
    queries.put_group(opened, run=run, result=made)
    return made


def reserve(opened: Session, *groups: GroupResult, run: str = "r", step: int = 1, tries: int = 0) -> int:
    return queries.reserve_batch(
        opened,
        batch_id=f"{run}/b{step}" + (f".{tries}" if tries else ""),
        run=run,
        step=step,
        policy_version=step - 1,
        groups=groups,
        wait=BatchWait(seconds=12.0),
    )
