"""The parts of a stack: how each is started, how it is asked for its health, and in which order they come up.

Pure descriptions; the supervisor carries them out. Stages come up one after the other, the parts of a stage together,
and everything goes down in the reverse order.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from activities.generation.server import device, kernel_threads
from workers.settings import Settings, UpOptions
from workers.stack import health
from workers.stack.state import LOOPBACK, ROLES, Home, Stack

PROJECT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages; children import from it whatever their working directory."""

UP_VARIABLES = frozenset(f"RATCHET_{name.upper()}" for name in UpOptions.model_fields)

SEARCH_ATTRIBUTES = (
    "RatchetRun=Keyword",
    "TaskId=Keyword",
    "Outcome=Keyword",
    "StopReason=Keyword",
    "PolicyVersion=Int",
    "Reward=Double",
)
TEMPORAL_TUNING = (
    # The dev server's defaults throttle dispatch to about 20 a second and round every timer up to 1 s.
    "history.transferProcessorMaxPollRPS=2000",
    "history.timerProcessorMaxPollRPS=2000",
    'history.timerProcessorMaxTimeShift="20ms"',
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
    "matching.enableFairness=true",
)


@dataclass(frozen=True)
class Part:
    """One supervised process."""

    name: str
    argv: tuple[str, ...]
    check: health.Check
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment that all parts share."""
    address: str = ""
    start_s: float = 120.0
    """How long it may take to become healthy before it counts as hung."""
    hang_s: float = 60.0
    """How long a part that was healthy may fail its check before it is restarted."""
    stop_s: float = 15.0
    """How long it may take to end after SIGTERM."""
    once: bool = False
    """Runs to its end, and must end well before the next stage begins."""
    elsewhere: bool = False
    """May be somebody else's process: while one answers the check, none is started and nothing is stopped."""
    missing: str = ""
    """Why it can't be started here, and what to do; empty when it can."""
    heartbeat: Path | None = None
    """File of its heartbeat, removed before each start."""
    forked: bool = False
    """`argv` is a Python module that a fork server may make (workers/fork_server.py): it starts again in no time."""
    pid_file: Path | None = None
    """File in which it keeps a child's pid, removed before a start if that child is dead."""

    def fingerprint(self, base: Mapping[str, str]) -> str:
        """Digest of all that a restart would change: a process with another one is replaced, not adopted."""
        ours = {name: value for name, value in base.items() if name.startswith("RATCHET_")}
        text = json.dumps([self.argv, sorted({**ours, **self.env}.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def tool(name: str) -> str:
    """Path of a program of the project's environment, or else of PATH; the bare name if neither has it."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def environment(home: Home, stack: Stack, keys: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that all parts share; without the options of `ratchet up`, which a later `up` may not have."""
    shared = {name: value for name, value in inherited.items() if name not in UP_VARIABLES}
    shared |= {f"RATCHET_{name.upper()}": value for name, value in {**stack.settings, **keys}.items()}
    shared["RATCHET_HOME"] = str(home.path)
    shared["PYTHONPATH"] = import_path(inherited)
    shared["PYTHONUNBUFFERED"] = "1"
    shared["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)))
    return shared


def import_path(inherited: Mapping[str, str]) -> str:
    """PYTHONPATH with the project first, whatever folder a child runs in."""
    theirs = [item for item in inherited.get("PYTHONPATH", "").split(os.pathsep) if item and item != str(PROJECT)]
    return os.pathsep.join((str(PROJECT), *theirs))


def stages(home: Home, stack: Stack, keys: Mapping[str, str], settings: Settings) -> list[list[Part]]:
    """The stack's parts in their order of start, empty stages left out."""
    wanted = [
        [
            *([_temporal(home, stack)] if stack.has("temporal") else []),
            *([_s3(home, stack, keys)] if stack.has("s3") else []),
            *([_docker(settings.docker_host)] if stack.has("docker") else []),
        ],
        [_prepare(stack)] if stack.has("prepare") else [],
        [
            *(_engines(home, stack, settings) if stack.has("vllm") else []),
            *(_role(home, role, settings) for role in ROLES if stack.has(role) and _wanted(role, settings)),
        ],
    ]
    return [stage for stage in wanted if stage]


def _temporal(home: Home, stack: Stack) -> Part:
    ports = stack.ports
    argv = [tool("temporal"), "server", "start-dev", "--ip", LOOPBACK, "--ui-ip", LOOPBACK]
    argv += ["--port", str(ports.temporal), "--http-port", str(ports.temporal_http)]
    argv += ["--ui-port", str(ports.ui), "--metrics-port", str(ports.temporal_metrics)]
    argv += ["--db-filename", str(home.path / "temporal.db")]
    argv += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
    argv += ["--log-level", "warn", "--log-format", "json", "--ui-disable-news-fetch"]
    for value in TEMPORAL_TUNING:
        argv += ["--dynamic-config-value", value]
    for attribute in SEARCH_ATTRIBUTES:
        argv += ["--search-attribute", attribute]
    return Part(
        name="temporal",
        argv=tuple(argv),
        env={"GOGC": "400"},
        check=health.http(f"http://{LOOPBACK}:{ports.temporal_http}/api/v1/namespaces/default"),
        address=f"{LOOPBACK}:{ports.temporal}, UI http://{LOOPBACK}:{ports.ui}",
    )


def _s3(home: Home, stack: Stack, keys: Mapping[str, str]) -> Part:
    address = f"{LOOPBACK}:{stack.ports.s3}"
    return Part(
        name="s3",
        argv=(tool("rclone"), "serve", "s3", "--addr", address, str(home.s3)),
        # By environment and not by option, where every user's `ps` would show it. rclone reads the variable as a line
        # of CSV, hence the quotes around a pair that holds a comma.
        env={"RCLONE_AUTH_KEY": f'"{keys["s3_access_key"]},{keys["s3_secret_key"]}"', "RCLONE_CONFIG": ""},
        check=health.http(f"http://{address}/", accept=lambda status: status < 500),
        address=f"http://{address}",
    )


def _docker(docker_host: str) -> Part:
    address = docker_host or health.DOCKER_SOCKET
    dockerd = shutil.which("dockerd")
    if docker_host:
        missing = f"no daemon answers at {docker_host} (RATCHET_DOCKER_HOST); start it, or unset the variable"
    elif dockerd is None:
        missing = "no Docker daemon answers and dockerd is not installed; run scripts/install-docker.sh as root"
    elif os.geteuid() != 0:
        missing = "no Docker daemon answers and only root can start one; start it with `sudo systemctl start docker`"
    else:
        missing = ""
    return Part(
        name="docker",
        argv=(dockerd or "dockerd", "--live-restore"),
        check=health.docker(address),
        address=address,
        # dockerd takes a containerd that nobody has reaped for a living one, and waits 15 s for its answer.
        pid_file=Path("/var/run/docker/containerd/containerd.pid"),
        # Sandboxes outlive a daemon that ends (live-restore), so ending it costs no episode.
        stop_s=30.0,
        elsewhere=True,
        missing=missing,
    )


def _prepare(stack: Stack) -> Part:
    own_server = ("--retention",) if stack.has("temporal") else ()
    return Part(
        name="prepare",
        argv=(sys.executable, "-m", "workers.stack.prepare", *own_server),
        check=health.alive,
        once=True,
    )


def _engines(home: Home, stack: Stack, settings: Settings) -> list[Part]:
    parts = []
    for index, name in enumerate(stack.engine_names()):
        url = stack.engine_url(index, settings)
        parts.append(
            Part(
                name=name,
                argv=(sys.executable, "-m", "workers.engine", "--name", name, "--port", str(stack.engine_port(index))),
                check=health.engine(url, home.path / "engines" / f"{name}.json"),
                address=url,
                hang_s=120.0,
                # One thread can be forked; for more, vLLM has a new process preload libraries.
                forked=device() == "cpu" and kernel_threads(len(os.sched_getaffinity(0))) == 1,
            )
        )
    return parts


def _wanted(role: str, settings: Settings) -> bool:
    """The part `sandbox` is for the hosts that sandboxes live on."""
    return role != "sandbox" or settings.host in settings.sandbox_host_names


def _role(home: Home, role: str, settings: Settings) -> Part:
    file = home.health / role
    ranked = role == "trainer" and settings.trainer_processes > 1
    return Part(
        name=role,
        argv=(sys.executable, "-m", "workers.ranked") if ranked else (sys.executable, "-m", "workers.roles", role),
        env=_threads(role),
        check=health.heartbeat(file),
        # Importing torch on a busy machine takes its time.
        start_s=180.0,
        # Time to finish or hand back the activities in flight.
        stop_s=30.0,
        heartbeat=file,
        forked=not ranked,
    )


def _threads(role: str) -> dict[str, str]:
    """Thread limits of a worker on a box without a GPU, where every idle thread pool takes time from the engines."""
    if shutil.which("nvidia-smi"):
        return {}
    count = "1" if role != "trainer" else str(max(1, min(4, (os.cpu_count() or 1) // 2)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, count) | {"TOKENIZERS_PARALLELISM": "false"}
