"""The one service of a docker-compose file, as far as it says something of a single machine.

Owns what of Compose is understood: build or image, command, variables, user, folder, limits, health check. Whatever
would make the machine another than Ratchet starts (more services, privileges, devices, mounts of the host) is a reason
not to use the task. Called by the readers of both public formats.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tasksets.base import Healthcheck, ImageSource
from tasksets.reading import Unsupported, interpolate, read_text

FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_HARMLESS = {
    *("container_name", "hostname", "init", "tty", "stdin_open", "restart", "pull_policy", "platform", "ports"),
    *("expose", "labels", "stop_grace_period", "stop_signal", "logging", "read_only", "mem_swappiness", "scale"),
    *("shm_size", "ulimits", "networks", "profiles"),
}
"""Of no meaning to a task without network, or given anyway."""
_READ = {
    *("build", "image", "command", "entrypoint", "environment", "working_dir", "user", "healthcheck", "deploy"),
    *("cpus", "mem_limit", "network_mode", "volumes", "cap_add", "depends_on"),
}
CAPABILITIES = {
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT"),
}
"""Those that a machine has."""
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([\d.]+)\s*([bkmgt]?)i?b?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass
class Service:
    """What a compose file says of the machine; None and empty for what it leaves open."""

    image: ImageSource | None = None
    start: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    cpus: float | None = None
    memory_mb: int | None = None
    healthcheck: Healthcheck | None = None


def compose_file(folder: Path) -> Path | None:
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read_service(path: Path, name: str, variables: dict[str, str], reasons: list[str]) -> Service:
    """The service `name`, which must be the only one; what can't be had goes to `reasons`. Raises Unsupported for a
    file that can't be read."""
    try:
        found = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise Unsupported([f"{path.name}: {_one_line(error)}"]) from error
    services = found.get("services") if isinstance(found, dict) else None
    if not isinstance(services, dict) or not isinstance(services.get(name), dict):
        raise Unsupported([f"{path.name}: there is no service {name!r}"])
    if len(services) > 1:
        reasons.append(f"{path.name}: several services: {', '.join(map(str, services))}")
    missing: list[str] = []
    given = _interpolated(services[name], variables, missing)
    reasons += [f"{path.name}: it needs the host's variable {absent}" for absent in sorted(set(missing))]
    try:
        return _Reader(path, given, reasons).service()
    except (TypeError, ValueError, AttributeError) as error:
        raise Unsupported([*reasons, f"{path.name}: {_one_line(error)}"]) from error


class _Reader:
    def __init__(self, path: Path, given: dict[str, Any], reasons: list[str]) -> None:
        self._path = path
        self._given = given
        self._reasons = reasons

    def service(self) -> Service:
        self._refuse()
        limits = (self._given.get("deploy") or {}).get("resources", {}).get("limits", {})
        cpus, memory = limits.get("cpus", self._given.get("cpus")), limits.get("memory", self._given.get("mem_limit"))
        return Service(
            image=self._image(),
            start=self._start(),
            env=_pairs(self._given.get("environment"), self._refused),
            user=str(self._given.get("user", "")),
            workdir=str(self._given.get("working_dir", "")),
            cpus=float(cpus) if cpus else None,
            memory_mb=megabytes(memory) if memory else None,
            healthcheck=_healthcheck(self._given.get("healthcheck")),
        )

    def _refused(self, why: str) -> None:
        self._reasons.append(f"{self._path.name}: {why}")

    def _refuse(self) -> None:
        for key in sorted(self._given.keys() - _HARMLESS - _READ):
            self._refused(str(key) if self._given[key] is True else f"{key}: {self._given[key]}"[:80])
        for volume in self._given.get("volumes") or []:
            if not _is_log(volume):
                self._refused(f"volume {volume}"[:120])
        if more := set(map(str, self._given.get("cap_add") or [])) - CAPABILITIES:
            self._refused(f"capabilities {', '.join(sorted(more))}")
        if self._given.get("network_mode") not in (None, "none", "bridge", "default"):
            self._refused(f"network_mode {self._given['network_mode']}")
        resources = (self._given.get("deploy") or {}).get("resources", {})
        if (resources.get("reservations") or {}).get("devices"):
            self._refused("it reserves devices, such as GPUs")

    def _image(self) -> ImageSource | None:
        build, reference = self._given.get("build"), str(self._given.get("image") or "")
        if build is None:
            return ImageSource(reference=reference) if reference else None
        build = {"context": build} if isinstance(build, str) else build
        for key in sorted(build.keys() - {"context", "dockerfile", "args", "platforms"}):
            self._refused(f"build.{key}")
        context = (self._path.parent / str(build.get("context", "."))).resolve()
        if not context.is_relative_to(self._path.parent.resolve()):
            self._refused(f"build.context {build['context']} is outside of the task")
        args, dockerfile = _pairs(build.get("args"), self._refused), str(build.get("dockerfile", "Dockerfile"))
        if not (context / dockerfile).resolve().is_relative_to(context):
            self._refused(f"build.dockerfile {dockerfile} is outside of its context")
        return ImageSource(context=str(context), dockerfile=dockerfile, args=args)

    def _start(self) -> list[str]:
        """The command where it does something: what only keeps a container alive is nothing to start."""
        entrypoint, command = _words(self._given.get("entrypoint")), _words(self._given.get("command"))
        if entrypoint:
            self._refused("entrypoint")
        return [] if keeps_alive(command) else command


def keeps_alive(command: list[str]) -> bool:
    """Whether a command only waits. Example: keeps_alive(["sh", "-c", "sleep infinity"])."""
    words = shlex.split(command[2]) if len(command) == 3 and command[1] == "-c" else command
    return not words or words[0] in ("sleep", "bash", "sh", "/bin/bash", "/bin/sh") or words[:2] == ["tail", "-f"]


def megabytes(size: object) -> int:
    """Example: megabytes("2g") == 2048. Raises ValueError."""
    match = _SIZE.fullmatch(str(size).strip().lower())
    if match is None:
        raise ValueError(f"{size!r} is no size")
    return int(float(match[1]) * _UNITS[match[2]]) >> 20


def seconds(duration: object) -> float:
    """Example: seconds("1m30s") == 90. Raises ValueError."""
    if isinstance(duration, int | float):
        return float(duration)
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", str(duration))
    if not parts or "".join(a + b for a, b in parts) != str(duration):
        raise ValueError(f"{duration!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _healthcheck(given: Any) -> Healthcheck | None:
    if not given or given.get("disable"):
        return None
    test = given["test"]
    words = [str(word) for word in test] if isinstance(test, list) else ["CMD-SHELL", str(test)]
    command = words[-1] if words[0] == "CMD-SHELL" else shlex.join(words[1:])
    return Healthcheck(
        command=command,
        interval_s=seconds(given.get("interval", 30)),
        timeout_s=seconds(given.get("timeout", 30)),
        start_s=seconds(given.get("start_period", 0)),
        retries=int(given.get("retries", 3)),
    )


def _pairs(given: Any, refused: Any) -> dict[str, str]:
    """Variables as Compose writes them, a mapping or a list."""
    if isinstance(given, list):
        given = {
            name: value if is_set else None for name, is_set, value in (str(item).partition("=") for item in given)
        }
    found: dict[str, str] = {}
    for name, value in (given or {}).items():
        if value is None:
            refused(f"it needs the host's variable {name}")
        else:
            found[str(name)] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _words(given: Any) -> list[str]:
    return [str(word) for word in given] if isinstance(given, list) else shlex.split(str(given or ""))


def _is_log(volume: Any) -> bool:
    """Whether a mount is one of those through which the formats' own programs collect logs."""
    target = volume.get("target", "") if isinstance(volume, dict) else str(volume).split(":")[-1]
    source = volume.get("source", "") if isinstance(volume, dict) else str(volume).split(":")[0]
    return not source and str(target).startswith(("/logs", "/agent-logs"))


def _interpolated(value: Any, variables: dict[str, str], missing: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(item, variables, missing) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, variables, missing) for item in value]
    return interpolate(value, variables, missing) if isinstance(value, str) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
