"""The compose file's services that run without a registry, as containers: a run trains, and outlives each of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import col, select

from storage.database import open_database, session
from storage.tables import Batch, BatchMember, Episode, PolicyVersion, Run
from tests.deploy.containers import Services, ensure_image
from tests.stack import small_run, wait_for
from workers.stack.private_daemon import PrivateDaemon

STEPS = 3
KILLED = ("lineage-db", "s3", "temporal", "control", "rollout", "sandbox", "trainer", "engines")
AWAY_S = 3.0

pytestmark = [
    pytest.mark.machines,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("docker", "dockerd", "debootstrap"))),
        reason="needs root, Docker, debootstrap",
    ),
]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    # The machine's own may belong to a stack, and end with it.
    daemon = PrivateDaemon(in_network=True)
    daemon.start()
    folder = Path(tempfile.mkdtemp(prefix="ratchet-containers-"))
    folder.chmod(0o755)
    made = Services(folder, daemon.host)
    try:
        ensure_image(daemon.host)
        made.lineage_db()
        made.s3()
        made.temporal_server()
        made.prepare()
        for role in ("control", "rollout", "trainer"):
            made.worker(role)
        made.sandbox()
        made.engines()
        yield made
    finally:
        made.close()
        daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)


def temporal(services: Services, *arguments: str) -> dict[str, Any]:
    """What the `temporal` command says; empty while nobody answers."""
    command = [Path(sys.executable).with_name("temporal"), *arguments, "--address", services.temporal, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout or "{}") if done.returncode == 0 else {}


def status(services: Services, run: str) -> dict[str, Any]:
    answer = temporal(services, "workflow", "query", "-w", run, "--type", "status")
    return answer["queryResult"][0] if answer else {}


def ending(services: Services, run: str) -> str:
    described = temporal(services, "workflow", "describe", "-w", run)
    return str(described.get("workflowExecutionInfo", {}).get("status", "")).removeprefix("WORKFLOW_EXECUTION_STATUS_")


def test_a_run_of_three_steps_outlives_the_death_of_every_container(services: Services, tmp_path: Path) -> None:
    model = services.state("models") / "tiny"
    ratchet = str(Path(sys.executable).with_name("ratchet"))
    assert services.execute("control", ratchet, "bootstrap", "tiny", "--out", str(model)) == 0, services.last_words
    config = small_run(mode="async", evaluation={"tasks": 0}, training={"steps": STEPS}) | {"model": str(model)}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config))
    temporal(
        services,
        *("workflow", "start", "--task-queue", "control", "--type", "TrainingRun"),
        *("--workflow-id", "contained", "--input-file", str(file)),
    )
    wait_for(lambda: status(services, "contained").get("groups_in_flight", 0) > 0, 300, lambda: told(services))
    for number, service in enumerate(KILLED):
        step = number * STEPS // len(KILLED)
        wait_for(lambda step=step: status(services, "contained").get("step", -1) >= step, 300, lambda: told(services))  # type: ignore[misc]
        services.kill(service)
        assert services.running()[service] == "exited"
        time.sleep(AWAY_S)
        services.start_again(service)
    wait_for(lambda: ending(services, "contained") not in ("", "RUNNING"), 600, lambda: told(services))
    assert ending(services, "contained") == "COMPLETED", told(services)
    assert set(services.running().values()) == {"running"}
    database = open_database(services.database_url)
    with session(database) as opened:
        run = opened.get(Run, "contained")
        assert run is not None and (run.state, run.step) == ("finished", STEPS)
        batches = opened.exec(select(Batch).where(Batch.run == "contained").order_by(col(Batch.step))).all()
        assert [(batch.step, batch.state) for batch in batches if batch.state != "void"] == [
            (step, "published") for step in range(1, STEPS + 1)
        ]
        members = opened.exec(select(BatchMember, Episode).join(Episode, col(BatchMember.episode) == Episode.id)).all()
        assert len({member.episode for member, _ in members}) == len(members) > 0
        assert {episode.outcome for _, episode in members} <= {"model_success", "model_failure"}
        versions = opened.exec(select(PolicyVersion.version).where(PolicyVersion.run == "contained")).all()
        assert sorted(versions) == list(range(STEPS + 1))
    database.dispose()


def told(services: Services) -> str:
    """What one needs to know of a run that hangs."""
    return "\n".join(
        [str(status(services, "contained")), *(f"--- {name}\n{services.logs(name)}" for name in services.started)]
    )
