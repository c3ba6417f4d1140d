"""Two Temporal namespaces of one real server that share one database, bucket and set of engines."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import Engine
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from activities.janitor.host import HostJanitorActivities
from activities.janitor.records import RecordJanitorActivities
from activities.lineage.activities import LineageActivities
from activities.lineage.runs import RunControlActivities
from activities.sandbox.owned import Owned
from storage import queries
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLease, Run
from tasksets import open_taskset
from tests.janitor.test_host import eventually
from tests.janitor.test_records import begin_upload
from tests.janitor.worlds import MadeRun, a_moment
from tests.workflows.conftest import unique
from workers.temporal import plugin
from workflows.attributes import RUN
from workflows.contracts import CloseRunInput, EngineInfo, JanitorInput, LeaseEnginesInput, OpenRunInput, RunState
from workflows.errors import InvalidConfig

AT_ONCE = JanitorInput(object_grace_s=0, sandbox_grace_s=0, unowned_grace_s=0)
ENGINE = EngineInfo(name="local-e0", host="local", url="http://127.0.0.1:1")


class Home:
    """What the workers of one namespace hold, over the database and the bucket of all."""

    def __init__(self, client: Client, database: Engine, store: ObjectStore, models: Path) -> None:
        self.client = client
        self.control = RunControlActivities(client)
        self.lineage = LineageActivities(
            database,
            store,
            engines=[ENGINE],
            models_dir=models,
            open_taskset=open_taskset,
            lives=self.control.lives,
            namespace=self.control.namespace,
        )
        self.janitor = RecordJanitorActivities(self.lineage, self.control, database, store)

    async def open(self, run: str) -> WorkflowHandle[object, object]:
        """A run whose workflow stays open, as no worker takes it, and that has the engines."""
        handle = await self.client.start_workflow("TrainingRun", id=run, task_queue="nobody")
        await self.lineage.open_run(opening(run, str(handle.first_execution_run_id)))
        assert (await self.lineage.lease_engines(LeaseEnginesInput(run=run))).held_by == ""
        return handle

    async def swept(self) -> dict[str, int]:
        """What one pass over rows and objects removes."""
        parts = [await self.janitor.close_gone_runs(AT_ONCE), await self.janitor.sweep_store(AT_ONCE)]
        return {name: count for part in parts for name, count in part.removed.items() if count}


def opening(run: str, execution: str) -> OpenRunInput:
    return OpenRunInput(run=run, config={"model": "tiny"}, execution=execution)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder.parent


@pytest.fixture
def here(temporal: Client, database: Engine, object_store: ObjectStore, models: Path) -> Home:
    return Home(temporal, database, object_store, models)


@pytest.fixture
async def there(temporal: Client, database: Engine, object_store: ObjectStore, models: Path) -> AsyncIterator[Home]:
    """The same in another namespace of the server."""
    name = unique("other")
    keep = RegisterNamespaceRequest(namespace=name, workflow_execution_retention_period=Duration(seconds=86_400))
    await temporal.workflow_service.register_namespace(keep)
    home = Home(await other_client(temporal, name), database, object_store, models)

    async def answers() -> bool:
        try:
            kinds = AddSearchAttributesRequest(namespace=name, search_attributes={RUN.name: RUN.indexed_value_type})
            await home.client.operator_service.add_search_attributes(kinds)
            return await home.control.is_over("nobody")
        except RPCError:
            return False

    await eventually(answers)
    yield home


async def other_client(temporal: Client, namespace: str) -> Client:
    return await Client.connect(temporal.service_client.config.target_host, namespace=namespace, plugins=[plugin()])


def row(database: Engine, run: str) -> Run:
    with session(database) as opened:
        found = opened.get(Run, run)
        assert found is not None
        return found


def holder(database: Engine) -> str:
    with session(database) as opened:
        lease = opened.get(EngineLease, queries.ENGINES)
        return lease.run if lease else ""


async def test_a_live_run_of_another_namespace_keeps_its_row_and_the_engines(
    here: Home, there: Home, database: Engine
) -> None:
    run = unique("run")
    handle = await here.open(run)
    assert row(database, run).temporal_namespace == await here.control.namespace() != await there.control.namespace()
    assert await there.swept() == {}
    assert (await there.lineage.lease_engines(LeaseEnginesInput(run="mine"))).held_by == run
    assert row(database, run).state == "starting" and holder(database) == run
    await handle.terminate()
    assert await there.swept() == {}, "its end is not known there either"
    assert (await here.swept())["runs_closed"] == 1
    assert row(database, run).state == "failed" and holder(database) == ""


async def test_a_run_that_is_refused_for_its_id_closes_nothing_of_the_one_that_has_it(
    here: Home, there: Home, database: Engine, object_store: ObjectStore
) -> None:
    run = unique("run")
    handle = await here.open(run)
    begin_upload(object_store, run)
    with pytest.raises(InvalidConfig, match="exists"):
        await there.lineage.open_run(opening(run, "another"))
    await there.lineage.close_run(CloseRunInput(run=run, state=RunState.FAILED, reason="refused"))
    assert row(database, run).state == "starting" and holder(database) == run
    assert len(object_store.uploads("runs/")) == 1
    await handle.terminate()


async def test_objects_and_uploads_of_another_namespaces_run_stay_and_those_of_nobodys_go(
    here: Home, there: Home, database: Engine, object_store: ObjectStore
) -> None:
    named, nameless = unique("named"), unique("nameless")
    made = MadeRun(named, object_store, database, namespace=await here.control.namespace())
    old = MadeRun(nameless, object_store, database)
    for run in (made, old):
        run.put("half an upload")
        begin_upload(object_store, run.run)
    a_moment()
    assert await there.swept() == {"uploads": 1, "objects": 1}
    assert "half an upload" in made.left and old.left == set()
    assert await here.swept() == {"uploads": 1, "objects": 1}
    assert made.left == set()


async def test_where_the_namespace_is_not_there_every_part_raises_and_removes_nothing(
    temporal: Client, database: Engine, object_store: ObjectStore, models: Path, tmp_path: Path
) -> None:
    """The server answers NOT_FOUND there, as it does for a workflow that it does not know."""
    nowhere = Home(await other_client(temporal, unique("nowhere")), database, object_store, models)
    MadeRun("live", object_store, database, RunState.RUNNING, None)
    over = MadeRun("over", object_store, database)
    over.put("half an upload")
    (tmp_path / "half.part").touch()
    os.utime(tmp_path / "half.part", (1, 1))
    a_moment()
    backend = Backend()
    host = HostJanitorActivities(
        backend,  # type: ignore[arg-type]
        nowhere.control.ending,
        tmp_path,
        namespace=nowhere.control.namespace,
    )
    for part in (nowhere.janitor.close_gone_runs, nowhere.janitor.sweep_store, host.sweep_host):
        with pytest.raises(RPCError, match="not found"):
            await part(AT_ONCE)
    for question in (nowhere.control.lives, nowhere.control.ending, nowhere.control.is_over):
        with pytest.raises(RPCError, match="not found"):
            await question("live")
    assert row(database, "live").state == "running" and "half an upload" in over.left
    assert (tmp_path / "half.part").exists() and backend.closed == []


async def test_a_sandbox_of_another_namespace_stays_and_one_that_names_none_goes(here: Home, tmp_path: Path) -> None:
    """The server knows none of their attempts."""
    backend = Backend("", "default/elsewhere", await here.control.namespace())
    host = HostJanitorActivities(
        backend,  # type: ignore[arg-type]
        here.control.ending,
        tmp_path,
        namespace=here.control.namespace,
    )
    assert (await host.sweep_host(AT_ONCE)).removed == {"containers/unknown": 2}
    assert "default/elsewhere" not in backend.closed and len(backend.closed) == 2


class Backend:
    """Lists a container for each namespace, under its name."""

    def __init__(self, *namespaces: str) -> None:
        self._namespaces = namespaces
        self.closed: list[str] = []

    async def owned(self) -> list[Owned]:
        labels = {"ratchet.kind": "agent", "ratchet.attempt": f"r/g0/e0/a{time.time_ns()}"}
        return [Owned(name, True, labels | {"ratchet.namespace": name}, 999.0) for name in self._namespaces]

    async def close(self, sandbox_id: str) -> None:
        self.closed.append(sandbox_id)
