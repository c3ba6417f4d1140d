"""A docker-compose file: what it says of the agent's machine, and the services beside it.

Owns what of Compose is understood: build or image, command, variables, user, folder, limits, health check, order.
Whatever would make a container another than Ratchet starts (privileges, devices, mounts of the host, folders that
several share) is a reason not to use the task. Called by the readers of both public formats.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tasksets.base import Healthcheck, ImageSource, Service, ServiceImage
from tasksets.compose_graph import in_order, names_of, own_volumes, same_port, volume_of
from tasksets.reading import Unsupported, interpolate, read_text

FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_HARMLESS = {
    *("container_name", "hostname", "init", "tty", "stdin_open", "restart", "pull_policy", "platform", "ports"),
    *("expose", "labels", "stop_grace_period", "stop_signal", "logging", "read_only", "mem_swappiness", "scale"),
    *("shm_size", "ulimits", "networks", "profiles"),
}
"""Of no meaning where all share one address and nothing leads out, or given anyway."""
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
_WAIT = re.compile(r"(inf(inity)?|[\d.]+[smhd]?);?")
_TYPED = ("sh", "bash", "ash", "dash", "zsh", "cat")


@dataclass
class Composed:
    """What a compose file says of the machine; None and empty for what it leaves open."""

    image: ImageSource | None = None
    start: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    cpus: float | None = None
    memory_mb: int | None = None
    healthcheck: Healthcheck | None = None
    services: list[Service] = field(default_factory=list)
    """Beside the machine, each after those that it depends on."""


def compose_file(folder: Path) -> Path | None:
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read_compose(
    path: Path, name: str, variables: dict[str, str], reasons: list[str], *, required: bool = True
) -> Composed:
    """The machine, which is the service `name`, and all others; what can't be had goes to `reasons`. Not `required`:
    the file may leave the machine itself out. Raises Unsupported for a file that can't be read."""
    try:
        found = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unsupported([f"{path.name}: {_one_line(error)}"]) from error
    services = found.get("services") if isinstance(found, dict) else None
    if not isinstance(services, dict) or not all(isinstance(given, dict) for given in services.values()):
        raise Unsupported([f"{path.name}: there are no services"])
    if required and name not in services:
        raise Unsupported([f"{path.name}: there is no service {name!r}"])
    missing: list[str] = []
    services = {str(key): _interpolated(given, variables, missing) for key, given in services.items()}
    services.setdefault(name, {})
    reasons += [f"{path.name}: it needs the host's variable {absent}" for absent in sorted(set(missing))]
    try:
        return _read(path, name, services, reasons)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unsupported([*reasons, f"{path.name}: {_one_line(error)}"]) from error


def _read(path: Path, name: str, services: dict[str, dict[str, Any]], reasons: list[str]) -> Composed:
    own = own_volumes(services)
    composed = _Reader(path, path.name, services.pop(name), reasons, own).machine()
    reasons += [f"{path.name}: {why}" for why in same_port(services)]
    order, wrong = in_order(services)
    reasons += [f"{path.name}: {why}" for why in wrong]
    for other in order:
        reader = _Reader(path, f"{path.name}: service {other}", services[other], reasons, own)
        composed.services.append(reader.service(other))
    return composed


class _Reader:
    """One service. `where` begins its reasons; `own` are the named volumes that it shares with no other."""

    def __init__(self, path: Path, where: str, given: dict[str, Any], reasons: list[str], own: set[str]) -> None:
        self._path = path
        self._where = where
        self._given = given
        self._reasons = reasons
        self._own = own

    def machine(self) -> Composed:
        self._refuse()
        cpus, memory_mb = self._limits()
        return Composed(
            image=self._image(),
            start=self._start(),
            env=_pairs(self._given.get("environment"), self._refused),
            user=str(self._given.get("user", "")),
            workdir=str(self._given.get("working_dir", "")),
            cpus=cpus,
            memory_mb=memory_mb,
            healthcheck=_healthcheck(self._given.get("healthcheck")),
        )

    def service(self, name: str) -> Service:
        """One beside the machine. Raises ValueError."""
        self._refuse()
        cpus, memory_mb = self._limits()
        image = self._image()
        if image is None:
            self._refused("neither build nor image")
        given, words = (
            self._given,
            {key: _words(self._given[key]) for key in ("entrypoint", "command") if self._given.get(key)},
        )
        return Service(
            name=name,
            aliases=sorted(names_of(given) - {name}),
            healthcheck=_healthcheck(given.get("healthcheck")),
            env=_pairs(given.get("environment"), self._refused),
            memory_mb=memory_mb or 2048,
            cpus=cpus or 1.0,
            image=ServiceImage(
                source=image or ImageSource(),
                entrypoint=words.get("entrypoint"),
                command=words.get("command"),
                user=str(given.get("user", "")),
                workdir=str(given.get("working_dir", "")),
            ),
        )

    def _limits(self) -> tuple[float | None, int | None]:
        """CPUs and MB of memory."""
        limits = (self._given.get("deploy") or {}).get("resources", {}).get("limits", {})
        cpus, memory = limits.get("cpus", self._given.get("cpus")), limits.get("memory", self._given.get("mem_limit"))
        return float(cpus) if cpus else None, megabytes(memory) if memory else None

    def _refused(self, why: str) -> None:
        self._reasons.append(f"{self._where}: {why}")

    def _refuse(self) -> None:
        for key in sorted(self._given.keys() - _HARMLESS - _READ):
            self._refused(str(key) if self._given[key] is True else f"{key}: {self._given[key]}"[:80])
        for volume in self._given.get("volumes") or []:
            if not _is_log(volume) and volume_of(volume) not in self._own:
                self._refused(f"volume {volume}"[:120])
        if more := set(map(str, self._given.get("cap_add") or [])) - CAPABILITIES:
            self._refused(f"capabilities {', '.join(sorted(more))}")
        mode = str(self._given.get("network_mode") or "none")
        if mode not in ("none", "bridge", "default") and not mode.startswith("service:"):
            self._refused(f"network_mode {mode}")
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
    of_shell = len(command) == 3 and re.fullmatch("-[a-z]*c", command[1])
    words = shlex.split(command[2]) if of_shell else command
    if not words:
        return True
    program, rest = words[0].rpartition("/")[2], words[1:]
    if program == "sleep":
        return all(_WAIT.fullmatch(word) for word in rest)
    if program == "tail":
        return len(rest) == 2 and rest[0] in ("-f", "-F")
    # A shell that is given no script waits for somebody who types.
    return program in _TYPED and all(word.startswith("-") for word in rest)


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
        interval_s=seconds(given.get("interval") or 30),
        # Nothing and zero are Docker's own.
        timeout_s=seconds(given.get("timeout") or 30),
        start_s=seconds(given.get("start_period") or 0),
        retries=int(given.get("retries") or 3),
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
