"""Which build of the workflows a worker runs, where several run side by side; docs/decisions/0005 says where.

Without a deployment workers are unversioned: whatever workflow is open goes on on the build that runs now. With one,
groups, episodes and evaluations end on the build that they began on, and a run moves to the current build at its next
step. Called by the roles that host workflows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import WorkerDeploymentConfig

import workflows
from workers.settings import Settings


def deployment(settings: Settings, behavior: VersioningBehavior) -> WorkerDeploymentConfig | None:
    """The worker's version, and how its workflows behave when another becomes current; None without a deployment."""
    if not settings.deployment:
        return None
    version = WorkerDeploymentVersion(settings.deployment, build_id(settings))
    return WorkerDeploymentConfig(version, use_worker_versioning=True, default_versioning_behavior=behavior)


def build_id(settings: Settings) -> str:
    return settings.build_id or workflow_digest()


def workflow_digest() -> str:
    """Twelve hex digits that change with the code of the workflows and with nothing else."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(workflows.__path__[0])).rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
