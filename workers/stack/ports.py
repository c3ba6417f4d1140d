"""Which ports a stack needs, and who else holds one: asked before anything starts, so that the message can help."""

from __future__ import annotations

import contextlib
import socket

import psutil
from pydantic import BaseModel, ConfigDict

from workers.stack.state import LOOPBACK, Stack


class Need(BaseModel):
    """One port, the part that listens on it, and how a user chooses another."""

    model_config = ConfigDict(frozen=True)

    part: str
    port: int
    option: str

    @property
    def variable(self) -> str:
        return "RATCHET_" + self.option.removeprefix("--").replace("-", "_").upper()


def needs(stack: Stack) -> list[Need]:
    """Every port on which a part of this stack listens."""
    ports = stack.ports
    wanted: list[Need] = []
    if stack.has("temporal"):
        wanted += [
            Need(part="temporal", port=ports.temporal, option="--temporal-port"),
            Need(part="temporal", port=ports.temporal_http, option="--temporal-http-port"),
            Need(part="temporal", port=ports.temporal_metrics, option="--temporal-metrics-port"),
            Need(part="temporal", port=ports.ui, option="--ui-port"),
        ]
    if stack.has("s3"):
        wanted.append(Need(part="s3", port=ports.s3, option="--s3-port"))
    if stack.has("vllm"):
        wanted += [
            Need(part=name, port=stack.engine_port(index), option="--engine-port")
            for index, name in enumerate(stack.engine_names())
        ]
    return wanted


def clashes(wanted: list[Need]) -> list[str]:
    """One sentence for every port that is wanted twice or held by somebody."""
    found: list[str] = []
    owners: dict[int, Need] = {}
    for need in wanted:
        change = f"choose another with {need.option} or {need.variable}"
        if (other := owners.setdefault(need.port, need)) is not need:
            found.append(f"port {need.port} is wanted by {other.part} and by {need.part}: {change}")
        elif not is_free(need.port):
            found.append(f"port {need.port} for {need.part} is taken{_holder(need.port)}: {change}")
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen there on the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds now; for tests and for a second stack on one machine."""
    with contextlib.ExitStack() as open_sockets:
        probes = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _holder(port: int) -> str:
    """` by NAME (pid N)` where this user may know it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            listening = connection.status == psutil.CONN_LISTEN
            if listening and connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
