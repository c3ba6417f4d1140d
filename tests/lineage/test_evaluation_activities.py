"""The opening and the end of an evaluation that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.lineage.activities import LineageActivities
from activities.lineage.evaluations import EvaluationActivities
from activities.publication.manifest import Manifest, weights_key, write_manifest
from storage import queries, series
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLease, Publication, Run, ServedEvaluation, Task
from tasksets import open_taskset, pick
from tests.workflows.known_tasks import write_tasks
from workflows.contracts import (
    CloseEvaluationInput,
    EngineInfo,
    EvaluationInput,
    EvaluationRecord,
    EvaluationResult,
    EvaluationState,
    LeaseEnginesInput,
    Measured,
    OpenEvaluationInput,
    Split,
)
from workflows.errors import InvalidConfig
from workflows.evaluation_request import parse_evaluation

ENGINE = EngineInfo(name="local-e0", host="local", url="http://127.0.0.1:1")
CONFIG = {
    "model": "tiny",
    "seed": 3,
    "max_concurrent_episodes": 9,
    "rollout": {"temperature": 0.8, "context_length": 384, "max_turns": 4},
    "evaluation": {"tasks": 16, "samples_per_task": 2},
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return folder.parent


@pytest.fixture
def past(database: Engine, object_store: ObjectStore) -> str:
    """A finished run with versions 0 and 5; the weights of version 5 alone are kept."""
    with session(database) as opened:
        opened.add(
            Run(id="past", state="finished", config=CONFIG, mode="async", seed=3, policy_version=5, started_at=1)
        )
        opened.flush()
        for version in (0, 5):
            key = weights_key("past", version)
            opened.add(
                Publication(run="past", version=version, manifest=key, digest="d", bytes=1, published_at=float(version))
            )
    manifest = Manifest(kind="weights", run="past", version=5, step=5, files=[], tensors=[])
    write_manifest(object_store, weights_key("past", 5), manifest)
    return "past"


@pytest.fixture
def evaluation(database: Engine, object_store: ObjectStore, models: Path, past: str) -> EvaluationActivities:
    return EvaluationActivities(
        database,
        object_store,
        engines=[ENGINE],
        models_dir=models,
        open_taskset=open_taskset,
        now=lambda: 50.0,
    )


def opening(request: dict[str, object], workflow_id: str = "nightly", execution: str = "x") -> OpenEvaluationInput:
    asked = parse_evaluation(request).model_dump(mode="json")
    return OpenEvaluationInput(workflow_id=workflow_id, execution=execution, request=asked)


async def opened_with(evaluation: EvaluationActivities, **request: object) -> EvaluationInput:
    return await evaluation.open_evaluation(opening(request))


async def test_what_a_request_leaves_open_is_as_in_the_run(
    evaluation: EvaluationActivities, database: Engine, models: Path
) -> None:
    plan = await opened_with(evaluation, run="past")
    assert (plan.run, plan.version, plan.manifest) == ("past", 5, weights_key("past", 5))
    assert (plan.seed, plan.samples_per_task, plan.concurrency, plan.dtype) == (3, 2, 9, "auto")
    assert plan.model == str(models / "tiny") and plan.engines == [ENGINE]
    assert (plan.limits.temperature, plan.limits.context_length, plan.limits.top_p) == (0.8, 384, 1.0)
    assert plan.evaluation_id == "past/nightly"
    # The tasks that the run's own evaluations have: results are paired by task.
    assert plan.tasks == pick(open_taskset("shell"), Split.HELD_OUT, 3, 0, 16)
    with session(database) as opened:
        row = opened.get_one(ServedEvaluation, "past/nightly")
        assert (row.state, row.workflow, row.tasks, row.started_at) == ("running", "nightly", 16, 50.0)
        assert row.request["run"] == "past" and not row.in_run
        assert opened.get(Task, f"shell/{plan.tasks[0].task_id}") is not None


async def test_a_request_may_name_weights_and_how_they_are_sampled_and_served(evaluation: EvaluationActivities) -> None:
    plan = await opened_with(
        evaluation,
        manifest=weights_key("past", 5),
        tasks=4,
        samples_per_task=1,
        seed=8,
        concurrency=2,
        sampling={"temperature": 0, "top_p": 0.9, "max_turns": 2},
        serving={"dtype": "bfloat16", "context_length": 256},
    )
    assert (plan.run, plan.version, len(plan.tasks), plan.seed, plan.concurrency) == ("past", 5, 4, 8, 2)
    assert (plan.limits.temperature, plan.limits.top_p, plan.limits.max_turns) == (0, 0.9, 2)
    assert (plan.dtype, plan.limits.context_length) == ("bfloat16", 256)


async def test_where_nobody_says_how_many_tasks_a_small_taskset_is_played_whole(
    evaluation: EvaluationActivities, database: Engine, tmp_path: Path
) -> None:
    """The command that a report gives for a run without evaluations says no number."""
    folder = tmp_path / "few"
    write_tasks(folder, "seen")
    write_tasks(folder / "held_out", "one", "two")
    config = CONFIG | {"taskset": str(folder), "evaluation": {"tasks": 0}}
    with session(database) as opened:
        opened.add(
            Run(id="small", state="finished", config=config, mode="async", seed=3, policy_version=0, started_at=2)
        )
        opened.flush()
        opened.add(
            Publication(run="small", version=0, manifest=weights_key("past", 5), digest="d", bytes=1, published_at=2.0)
        )
    plan = await opened_with(evaluation, run="small")
    assert sorted(task.task_id for task in plan.tasks) == ["one", "two"]
    with pytest.raises(InvalidConfig, match="tasks: 3, but the taskset has 2 held-out tasks"):
        await opened_with(evaluation, run="small", tasks=3)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"run": "other"}, "run: no run 'other'; the latest are: past"),
        ({"run": "past", "version": 3}, "version: run 'past' has published no version 3; it has 0, 5"),
        ({"run": "past", "version": 0}, "version: there is no runs/past/weights/v000000/manifest.json in the object"),
        ({"manifest": "runs/x/manifest.json"}, "manifest: there is no runs/x/manifest.json in the object store"),
        ({"run": "past", "taskset": "nothing"}, "taskset: no taskset 'nothing'"),
        ({"run": "past", "tasks": 1000}, "tasks: 1000, but the taskset has "),
        (
            {"run": "past", "tasks": 100, "samples_per_task": 64},
            "samples_per_task: 100 tasks x 64 are more than the 4096",
        ),
        ({"run": "past", "serving": {"context_length": 999}}, "serving.context_length: 999 is above the model's 512"),
        ({"run": "past", "sampling": {"max_tokens_per_turn": 400}}, "sampling.max_tokens_per_turn: must be below"),
    ],
)
async def test_a_mistake_that_only_the_world_knows_names_its_field(
    evaluation: EvaluationActivities, database: Engine, request_: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        await evaluation.open_evaluation(opening(request_))
    assert said in str(caught.value)
    with session(database) as opened:
        assert opened.get(ServedEvaluation, "past/nightly") is None


async def test_all_mistakes_come_at_once(evaluation: EvaluationActivities) -> None:
    with pytest.raises(InvalidConfig) as caught:
        await evaluation.open_evaluation(
            opening({"run": "past", "version": 3, "tasks": 1000, "samples_per_task": 1}, "a/b")
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["version", "tasks", "workflow id"]


async def test_a_retry_opens_the_same_and_a_second_workflow_of_that_id_is_refused(
    evaluation: EvaluationActivities,
) -> None:
    request: dict[str, object] = {"run": "past"}
    first = await evaluation.open_evaluation(opening(request))
    assert await evaluation.open_evaluation(opening(request)) == first
    with pytest.raises(InvalidConfig, match=r"evaluation 'nightly' exists \(running\); start under another"):
        await evaluation.open_evaluation(opening(request, execution="y"))


async def test_a_workflow_id_that_begins_with_the_runs_is_the_id_of_the_evaluation(
    evaluation: EvaluationActivities,
) -> None:
    plan = await evaluation.open_evaluation(opening({"run": "past"}, "past/greedy"))
    assert plan.evaluation_id == "past/greedy"


async def test_its_end_frees_the_engines(evaluation: EvaluationActivities, database: Engine) -> None:
    await opened_with(evaluation, run="past")
    with session(database) as opened:
        assert queries.lease_engines(opened, run="nightly") == ""
    end = CloseEvaluationInput(workflow_id="nightly", state=EvaluationState.FAILED, reason="no engine serves")
    for _ in range(2):
        await evaluation.close_evaluation(end)
    with session(database) as opened:
        assert opened.get(EngineLease, queries.ENGINES) is None
        row = opened.get_one(ServedEvaluation, "past/nightly")
        assert (row.state, row.reason) == ("failed", "no engine serves") and row.ended_at is not None


async def test_one_whose_workflow_is_gone_hands_the_engines_over(
    evaluation: EvaluationActivities, database: Engine, object_store: ObjectStore, models: Path
) -> None:
    async def lives(workflow: str) -> bool:
        return False

    lineage = LineageActivities(
        database, object_store, engines=[ENGINE], models_dir=models, open_taskset=open_taskset, lives=lives
    )
    await opened_with(evaluation, run="past")
    with session(database) as opened:
        queries.lease_engines(opened, run="nightly")
    assert (await lineage.lease_engines(LeaseEnginesInput(run="next"))).held_by == ""
    with session(database) as opened:
        row = opened.get_one(ServedEvaluation, "past/nightly")
        assert row.state == "failed" and "as a terminated one does" in row.reason


async def test_only_a_runs_own_result_is_a_point_of_its_curve(
    evaluation: EvaluationActivities, database: Engine, object_store: ObjectStore, models: Path
) -> None:
    lineage = LineageActivities(database, object_store, engines=[ENGINE], models_dir=models, open_taskset=open_taskset)
    plan = await opened_with(evaluation, run="past")
    for in_run, version in ((False, 5), (True, 0)):
        result = EvaluationResult(version=version, episodes=3, mean_reward=0.5)
        measured = Measured(
            evaluation_id=plan.evaluation_id if not in_run else "past/eval-v0",
            workflow_id="nightly" if not in_run else "past/eval-v0",
            in_run=in_run,
            state=EvaluationState.FINISHED,
            taskset="shell",
            tasks=3,
            samples_per_task=1,
            seed=3,
            fields={"dtype": "float32", "weights": "w"},
            started_at=51.0,
        )
        await lineage.record_evaluation(EvaluationRecord(run="past", result=result, measured=measured))
    older = EvaluationRecord(run="past", result=EvaluationResult(version=5, episodes=3, mean_reward=0.25))
    assert await lineage.record_evaluation(older) is None
    with session(database) as opened:
        assert [(row.version, row.mean_reward) for row in series.evaluations(opened, run="past")] == [
            (0, 0.5),
            (5, 0.25),
        ]
        assert opened.get_one(ServedEvaluation, "past/nightly").fingerprint
