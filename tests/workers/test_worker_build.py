"""What the plugin gives every worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import asyncio, sys
from transformers import PreTrainedTokenizerFast
from temporalio import activity
from temporalio.worker import Worker
from tests.workflows.conftest import local_server

@activity.defn
async def nothing() -> None: ...

async def main():
    async with local_server() as client:
        before = len(sys.modules)
        Worker(client, task_queue="q", activities=[nothing])
        print("torch" in sys.modules, len(sys.modules) - before < 50)

asyncio.run(main())
"""


def test_making_a_worker_loads_no_module_that_waits_to_be_used() -> None:
    """The SDK's own build id would: it looks into every module that is loaded."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split()[-2:] == ["False", "True"], done.stderr
