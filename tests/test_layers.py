"""Dependencies point one way."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ["torch", "vllm", "deepspeed", "docker", "aiodocker", "boto3", "sqlmodel", "sqlalchemy", "transformers", "numpy"]


def test_the_workflows_import_nothing_heavy() -> None:
    """F35: a heavy import in a workflow module stalls Temporal's sandbox or is refused by it."""
    code = (
        "import sys, workflows.training_run, workflows.group, workflows.episode, workflows.evaluation\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
