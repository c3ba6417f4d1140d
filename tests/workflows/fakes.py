"""Scripted stand-ins for every activity, at the seam that Temporal gives: names and messages.

`World` holds the script and what was called. Unit tests of the workflows only; nothing that leaves the box runs here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from temporalio import activity
from temporalio.exceptions import ApplicationError

from tests.workflows.episode_fakes import ANSWER, COMMAND, MALFORMED, EpisodeWorld
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    ChangeTasksInput,
    ChangeTasksOutput,
    ClosedGroupsInput,
    ClosedGroupsOutput,
    CloseEvaluationInput,
    CloseRunInput,
    Draw,
    DrawTasksInput,
    DrawTasksOutput,
    EngineInfo,
    EvaluationInput,
    EvaluationRecord,
    FailureType,
    FingerprintInput,
    FingerprintOutput,
    GroupResult,
    JanitorInput,
    LeaseEnginesInput,
    LeaseEnginesOutput,
    OpenEvaluationInput,
    OpenRunInput,
    OpenRunOutput,
    PickTasksInput,
    PickTasksOutput,
    PublishInput,
    PublishOutput,
    QuarantineInput,
    RecordedEvaluation,
    RecordedGroup,
    ReserveBatchInput,
    ReserveBatchOutput,
    RestInput,
    RolloutLimits,
    RunProgress,
    ScoreInput,
    ScoreOutput,
    ServeInput,
    ServeOutput,
    Split,
    SweepInput,
    SweepOutput,
    Swept,
    TaskRef,
    Timing,
    TrainerInput,
    TrainerOutput,
    UpdateInput,
    UpdateOutput,
)

__all__ = ["ANSWER", "COMMAND", "MALFORMED", "World", "final"]


def final(failure: FailureType, message: str = "scripted") -> ApplicationError:
    return ApplicationError(message, type=failure, non_retryable=True)


class World(EpisodeWorld):
    def __init__(self) -> None:
        super().__init__()
        self.is_closed: Callable[[str], bool] = lambda group_id: True
        self.divergence: Callable[[int], float] = lambda number: 0.0
        """Of a group from today's policy, by its number."""
        self.archived: Callable[[GroupResult], str] | None = None
        """The archived success that joins a group; None: as an activity did that answered nothing."""
        self.engines = ["h-e0"]
        self.sandbox_hosts: list[str] = []
        self.barred: Callable[[ReserveBatchInput], str] = lambda m: ""
        """Why a reservation leaves nothing to train; empty: it leaves something."""
        self.applying: Callable[[ApplyInput], Awaitable[None]] | None = None
        """Awaited by each load before it answers."""
        self.publishing: Callable[[PublishInput], Awaitable[None]] | None = None
        """The same of each publication."""
        self.train_tasks: int | None = None
        """Tasks after which the order begins again; None: it never does."""
        self.serving: Callable[[FingerprintInput], FingerprintOutput] = lambda m: FingerprintOutput(
            fields={"dtype": "float32", "weights": f"w{m.version}"},
            engines={engine.name: f"p{m.version}" for engine in m.engines},
        )
        """What the engines say that they serve."""
        self.held_by = ""
        """Who has the engines."""
        self.answer: Callable[[UpdateInput], UpdateOutput] = lambda m: UpdateOutput(
            step=m.step, checkpoint=f"c{m.step}", metrics={"loss": 0.1}
        )

    @activity.defn
    async def open_run(self, message: OpenRunInput) -> OpenRunOutput:
        self._note("open_run", message)
        engines = [EngineInfo(name=name, host="h", url="http://x") for name in self.engines]
        return OpenRunOutput(
            model="/m",
            train_tasks=self.train_tasks or 9,
            held_out_tasks=9,
            engines=engines,
            sandbox_hosts=self.sandbox_hosts,
        )

    @activity.defn
    async def lease_engines(self, message: LeaseEnginesInput) -> LeaseEnginesOutput:
        self._note("lease_engines", message)
        return LeaseEnginesOutput(held_by=self.held_by)

    @activity.defn
    async def start_trainer(self, message: TrainerInput) -> TrainerOutput:
        self._note("start_trainer", message)
        return TrainerOutput(checkpoint="c0", parameters=1, world_size=1)

    @activity.defn
    async def serve(self, message: ServeInput) -> ServeOutput:
        self._note("serve", message)
        return ServeOutput(engine=message.engine.name, restarted=False, seconds=0)

    @activity.defn
    async def publish(self, message: PublishInput) -> PublishOutput:
        self._note("publish", message)
        if self.publishing is not None:
            await self.publishing(message)
        return PublishOutput(version=message.version, manifest=f"m{message.version}", digest="d", bytes=1)

    @activity.defn
    async def apply(self, message: ApplyInput) -> ApplyOutput:
        self._note("apply", message)
        if self.applying is not None:
            await self.applying(message)
        self.version = message.version
        return ApplyOutput(engine=message.engine.name, version=message.version, proven=True, pause_s=0.1)

    @activity.defn
    async def rest(self, message: RestInput) -> Timing:
        self._note("rest", message)
        return Timing()

    @activity.defn
    async def pick_tasks(self, message: PickTasksInput) -> PickTasksOutput:
        self._note("pick_tasks", message)
        positions = range(message.cursor, message.cursor + message.count)
        numbers = [number % self.train_tasks if self.train_tasks else number for number in positions]
        return PickTasksOutput(
            tasks=[TaskRef(taskset="shell", split=message.split, task_id=f"count-{number:04d}") for number in numbers]
        )

    @activity.defn
    async def draw_tasks(self, message: DrawTasksInput) -> DrawTasksOutput:
        self._note("draw_tasks", message)
        numbers = range(message.cursor, message.cursor + message.count)
        draws = [Draw(number, f"count-{number:04d}", "", "unseen", False) for number in numbers]
        return DrawTasksOutput(draws=draws, taskset="shell", tasks={"unseen": len(draws)})

    @activity.defn
    async def change_tasks(self, message: ChangeTasksInput) -> ChangeTasksOutput:
        self._note("change_tasks", message)
        return ChangeTasksOutput(changed=message.request.tasks, tasks=9)

    @activity.defn
    async def reserve_batch(self, message: ReserveBatchInput) -> ReserveBatchOutput:
        self._note("reserve_batch", message)
        if why := self.barred(message):
            dropped = {"quarantined": len(message.groups)}
            return ReserveBatchOutput(batch_id=message.batch_id, episodes=0, dropped=dropped, void=why)
        numbers = {group.number for group in message.groups}
        closed = [result for result in self.calls["record_group"] if result.number in numbers]
        rewards = [
            reward for result in closed if result.group_id.startswith(f"{message.run}/") for reward in result.rewards
        ]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        return ReserveBatchOutput(batch_id=message.batch_id, episodes=len(rewards), reward=mean)

    @activity.defn
    async def score(self, message: ScoreInput) -> ScoreOutput:
        self._note("score", message)
        return ScoreOutput(divergences=[self.divergence(number) for number in message.groups])

    @activity.defn
    async def update(self, message: UpdateInput) -> UpdateOutput:
        self._note("update", message)
        return self.answer(message)

    @activity.defn
    async def record_progress(self, message: RunProgress) -> None:
        self._note("record_progress", message)

    @activity.defn
    async def record_group(self, message: GroupResult) -> RecordedGroup | None:
        self._note("record_group", message)
        return RecordedGroup(replay=self.archived(message)) if self.archived is not None else None

    @activity.defn
    async def record_quarantine(self, message: QuarantineInput) -> None:
        self._note("record_quarantine", message)

    @activity.defn
    async def record_evaluation(self, message: EvaluationRecord) -> RecordedEvaluation | None:
        self._note("record_evaluation", message)
        return RecordedEvaluation(mean_reward=0.5, low=0.2, high=0.8) if message.measured else None

    @activity.defn
    async def open_evaluation(self, message: OpenEvaluationInput) -> EvaluationInput:
        self._note("open_evaluation", message)
        limits = RolloutLimits(
            temperature=1.0,
            max_turns=2,
            max_tokens_per_turn=8,
            max_tokens=32,
            context_length=64,
            step_timeout_s=5,
            time_budget_s=9,
            max_output_chars=200,
            malformed_reminders=0,
        )
        return EvaluationInput(
            run="past",
            version=7,
            model="/m",
            tasks=[TaskRef(taskset="shell", split=Split.HELD_OUT, task_id=f"count-{n}") for n in range(2)],
            samples_per_task=2,
            concurrency=4,
            limits=limits,
            seed=0,
            name=message.workflow_id,
            engines=[EngineInfo(name=name, host="h", url="http://x") for name in self.engines],
            manifest="m7",
            dtype="bfloat16",
        )

    @activity.defn
    async def close_evaluation(self, message: CloseEvaluationInput) -> None:
        self._note("close_evaluation", message)

    @activity.defn
    async def fingerprint(self, message: FingerprintInput) -> FingerprintOutput:
        self._note("fingerprint", message)
        return self.serving(message)

    @activity.defn
    async def closed_groups(self, message: ClosedGroupsInput) -> ClosedGroupsOutput:
        self._note("closed_groups", message)
        return ClosedGroupsOutput(closed=[item for item in message.group_ids if self.is_closed(item)])

    @activity.defn
    async def close_run(self, message: CloseRunInput) -> None:
        self._note("close_run", message)

    @activity.defn
    async def sweep(self, message: SweepInput) -> SweepOutput:
        self._note("sweep", message)
        return SweepOutput()

    @activity.defn
    async def close_gone_runs(self, message: JanitorInput) -> Swept:
        self._note("close_gone_runs", message)
        return Swept(removed={"runs_closed": 1})

    @activity.defn
    async def sweep_store(self, message: JanitorInput) -> Swept:
        self._note("sweep_store", message)
        return Swept(removed={"objects": 3, "uploads": 1}, bytes=5_000_000)

    @activity.defn
    async def sweep_host(self, message: JanitorInput) -> Swept:
        self._note("sweep_host", message)
        return Swept(removed={"containers/terminated": 2})
