"""Workflows for replays: Episode as it can be replayed, and all as a careless change would leave them, with one
activity more than their histories hold.
"""

from __future__ import annotations

from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.contracts import (
        EpisodeInput,
        EpisodeSummary,
        EvaluationResult,
        GroupInput,
        GroupResult,
        HostInput,
        HostStatus,
        JanitorInput,
        RunStatus,
        SweepInput,
        SweepOutput,
        Swept,
    )
    from workflows.episode import Episode
    from workflows.evaluation import Evaluation
    from workflows.group import Group
    from workflows.janitor import Janitor
    from workflows.run_state import Carry
    from workflows.sandbox_host import SandboxHost
    from workflows.training_run import TrainingRun


async def one_activity_more() -> None:
    await policies.call("sweep", SweepInput(run="r"), SweepOutput, policies.CLEAN_UP, summary="one activity more")


@workflow.defn(name="Episode")
class ReplayedEpisode(Episode):
    """The same, but that a nondeterminism is told and not made the workflow's failure, at which a replayer hangs."""

    @workflow.run
    async def run(self, input: EpisodeInput) -> EpisodeSummary:
        return await super().run(input)


@workflow.defn(name="Episode")
class ChangedEpisode(Episode):
    @workflow.run
    async def run(self, input: EpisodeInput) -> EpisodeSummary:
        await one_activity_more()
        return await super().run(input)


@workflow.defn(name="Group")
class ChangedGroup(Group):
    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        await one_activity_more()
        return await super().run(input)


@workflow.defn(name="Evaluation")
class ChangedEvaluation(Evaluation):
    @workflow.run
    async def run(self, input: Any = None) -> EvaluationResult:
        await one_activity_more()
        return await super().run(input)


@workflow.defn(name="Janitor")
class ChangedJanitor(Janitor):
    @workflow.run
    async def run(self, limits: JanitorInput | None = None) -> Swept:
        await one_activity_more()
        return await super().run(limits)


@workflow.defn(name="SandboxHost")
class ChangedSandboxHost(SandboxHost):
    @workflow.run
    async def run(self, input: HostInput) -> HostStatus:
        await one_activity_more()
        return await super().run(input)


@workflow.defn(name="TrainingRun")
class ChangedTrainingRun(TrainingRun):
    @workflow.run
    async def run(self, config: Any = None, carry: Carry | None = None) -> RunStatus:
        await one_activity_more()
        return await super().run(config, carry)


ALL: list[type[Any]] = [
    ChangedTrainingRun,
    ChangedGroup,
    ChangedEpisode,
    ChangedEvaluation,
    ChangedJanitor,
    ChangedSandboxHost,
]
