"""What must be true before a worker starts: the schema is current, the bucket exists, histories are kept for 30 days,
the janitor has its schedule.

Run by the supervisor as `python -m workers.stack.prepare [--retention]` with the stack's settings; safe to run again at
any time. Retention is set only on a Temporal server of our own. `--namespace` makes what a new server of somebody else
lacks: the namespace, with that retention, and the search attributes. On Temporal Cloud its own tools make both.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from workers.settings import Settings, inherited_environment
from workers.stack.parts import tool
from workers.temporal import connect

RETENTION_DAYS = 30
RETENTION = f"{24 * RETENTION_DAYS}h"
NAMESPACE_S = 30.0


def main() -> None:
    settings = Settings()
    _migrate(settings)
    _bucket(settings)
    if "--retention" in sys.argv[1:]:
        _retention(settings)
    if "--namespace" in sys.argv[1:]:
        asyncio.run(_namespace(settings))
    _schedule(settings)


def _migrate(settings: Settings) -> None:
    from storage.migrations import migrate

    migrate(settings.sql_url)


def _bucket(settings: Settings) -> None:
    from storage.objects import ObjectStore

    ObjectStore.connect(
        endpoint=settings.s3_endpoint,
        bucket=settings.s3_bucket,
        region=settings.s3_region,
        access_key=settings.s3_access_key.get_secret_value(),
        secret_key=settings.s3_secret_key.get_secret_value(),
    ).ensure_bucket()


def _retention(settings: Settings) -> None:
    """The dev server forgets a closed workflow after a day; a person looks at one for longer."""
    command = [tool("temporal"), "--address", settings.temporal_address, "operator", "namespace", "update"]
    command += ["--namespace", settings.temporal_namespace, "--retention", RETENTION]
    # What it says of other servers, such as a key or TLS, is not for this one.
    env = {name: value for name, value in inherited_environment().items() if not name.startswith("TEMPORAL_")}
    deadline = time.monotonic() + NAMESPACE_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NAMESPACE_S, check=False, env=env)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"could not set the retention of {settings.temporal_namespace}: {done.stderr.strip()}")
        time.sleep(0.5)


async def _namespace(settings: Settings) -> None:
    from workers.stack.namespace import ensure_namespace

    await ensure_namespace(await connect(settings, role="prepare"), retention_days=RETENTION_DAYS)


def _schedule(settings: Settings) -> None:
    from workers.stack.schedule import ensure_schedule

    async def ensure() -> None:
        await ensure_schedule(await connect(settings, role="prepare"))

    asyncio.run(ensure())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # The SDK's threads can abort the interpreter at its normal exit.
    os._exit(0)
