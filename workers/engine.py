"""`python -m workers.engine --name NAME --port PORT`: becomes the vLLM server of one engine.

Waits for the specification that the `serve` activity writes, notes its pid, and replaces itself by vLLM, or goes on as
vLLM where a fork server has imported that: the pid stays, so the supervisor that started it sees every end of the
server, whatever its exit code. Started and restarted by the supervisor.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from activities.generation import server
from activities.generation.server import (
    EngineSpec,
    command,
    device,
    environment,
    pid_path,
    preloaded,
    read_spec,
    routes_experts,
)
from workers.settings import Settings, inherited_environment
from workers.stack.state import scratch_root

LOOK_EVERY_S = 0.2

log = logging.getLogger("ratchet.engine")


def wait_for_spec(home: Path, name: str) -> EngineSpec:
    """The engine's spec, as soon as there is one whose model folder exists."""
    said: EngineSpec | None = None
    while True:
        spec = read_spec(home, name)
        if spec is not None and Path(spec.model, "config.json").is_file():
            return spec
        if spec != said:
            log.error("%s: no config.json in %s; waiting for another model", name, spec.model if spec else "")
            said = spec
        time.sleep(LOOK_EVERY_S)


def scratch_folder(home: Path, name: str) -> Path:
    """Folder of the server's temporary files, short because its sockets lie there; what an earlier one left is gone.

    `ratchet down` removes it (workers/stack/control.py)."""
    folder = scratch_root(home) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Become the vLLM server of one engine.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args(arguments)


def engine_environment(settings: Settings, name: str, spec: EngineSpec | None = None) -> dict[str, str]:
    """Of the server of an engine; on a CPU it does not depend on what is served."""
    cores, mixture = len(os.sched_getaffinity(0)), spec is not None and routes_experts(spec.model)
    return environment(inherited_environment(), on=device(), cores=cores, mixture=mixture) | {
        "TMPDIR": str(scratch_folder(settings.home_path, name)),
        "TORCHINDUCTOR_CACHE_DIR": str(settings.home_path / "cache" / "inductor"),
    }


def preload(arguments: Sequence[str]) -> None:
    """For a fork server, on a CPU."""
    os.environ.update(engine_environment(Settings(), parsed(arguments).name))
    server.preload()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options, settings = parsed(), Settings()
    home = settings.home_path
    pid_file = pid_path(home, options.name)
    pid_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid_file.write_text(f"{os.getpid()}\n")
    log.info("%s: waiting for a model", options.name)
    spec = wait_for_spec(home, options.name)
    # Of an option that is given twice the last one counts.
    arguments = [sys.executable, *command(spec, options.port, on=device()), f"--host={settings.engine_host}"]
    env = engine_environment(settings, options.name, spec)
    log.info("%s: serving %s in %s, %d tokens of context", options.name, spec.model, spec.dtype, spec.context_length)
    if preloaded():
        os.environ.update(env)
        sys.argv = arguments[arguments.index("-m") + 1 :]
        server.main()
        return
    sys.stdout.flush()
    os.execve(sys.executable, arguments, env)


if __name__ == "__main__":
    main()
