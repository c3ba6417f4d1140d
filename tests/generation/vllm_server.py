"""A real vLLM server on a tiny random policy, started by the launcher as the supervisor does it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from activities.generation.engine import EngineClient
from activities.generation.server import EngineSpec
from activities.generation.serving import serve
from tests.generation.policies import save_policy
from workers.stack.state import scratch_root
from workflows.contracts import EngineInfo


@dataclass
class Server:
    home: Path
    model: Path
    client: EngineClient
    process: subprocess.Popen[bytes]
    restarted: bool
    first_label: str
    """The weight label that it began with."""


@asynccontextmanager
async def started(
    home: Path,
    model: Path,
    *,
    context_length: int,
    save: Callable[..., object] = save_policy,
    dtype: str = "auto",
    name: str = "local-e0",
) -> AsyncIterator[Server]:
    """`home` is an empty state folder, `model` where `save` makes the policy."""
    save(model, seed=0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "logs").mkdir()
    environment = os.environ | {"RATCHET_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with (home / "logs" / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.engine", "--name", name, "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = EngineClient(EngineInfo(name=name, host="local", url=f"http://127.0.0.1:{port}"))
    try:
        spec = EngineSpec.of(str(model), context_length=context_length, dtype=dtype)
        restarted = await serve(client, spec, home, wait_s=240)
        yield Server(home, model, client, process, restarted, await client.label())
    finally:
        await client.close()
        if process.poll() is None:
            process.kill()
            process.wait(10)
        shutil.rmtree(scratch_root(home), ignore_errors=True)
