"""What the plugin gives every worker and replayer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import asyncio, pathlib, sys
from transformers import PreTrainedTokenizerFast
from temporalio import activity
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, Worker
from tests.workflows.conftest import local_server
from workers.temporal import plugin
from workflows.janitor import Janitor

@activity.defn
async def nothing() -> None: ...

async def main():
    async with local_server() as client:
        before = len(sys.modules)
        Worker(client, task_queue="q", activities=[nothing])
        history = WorkflowHistory.from_json("janitor", pathlib.Path(sys.argv[1]).read_text())
        await Replayer(workflows=[Janitor], plugins=[plugin()]).replay_workflow(history)
        print("torch" in sys.modules, len(sys.modules) - before < 50)

asyncio.run(main())
"""


def test_making_a_worker_or_replaying_a_history_loads_no_module_that_waits_to_be_used() -> None:
    """The SDK's own build id would: it looks into every module that is loaded."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, str(ROOT / "tests/replay/histories/current/janitor.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split()[-2:] == ["False", "True"], done.stderr
