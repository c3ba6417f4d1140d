"""What a stack is and remembers: the layout of its state folder, its ports, its engines, its parts and its keys.

`stack.json` is written by `ratchet up` alone and read by everybody; after a reboot it is all that `up` needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workers.settings import SECRETS_FILE, STACK_FILE, Settings
from workers.stack.process import write_atomically

LOOPBACK = "127.0.0.1"
INFRASTRUCTURE = ("temporal", "s3", "docker")
ROLES = ("control", "rollout", "trainer", "engines", "sandbox")
PARTS = (*INFRASTRUCTURE, "prepare", "vllm", *ROLES)
"""Names that `--parts` takes; `vllm` stands for every engine of this host."""


class Ports(BaseModel):
    """The ports of a stack, all on the loopback address."""

    model_config = ConfigDict(frozen=True)

    temporal: int = 7233
    temporal_http: int = 7243
    temporal_metrics: int = 9233
    ui: int = 8233
    s3: int = 9711
    engine: int = 9721
    """Port of the first engine; engine i listens on `engine + i`."""
    metrics: int = 9831
    """Port of control's metrics; the other roles have the next ones. 0: none."""


class Stack(BaseModel):
    """One host's stack, as stack.json keeps it."""

    model_config = ConfigDict(frozen=True)

    host: str = "local"
    engines: int = 1
    ports: Ports = Ports()
    parts: tuple[str, ...] = PARTS
    settings: dict[str, str] = {}
    """What every command and worker of this stack has as its settings unless its environment says otherwise."""

    def has(self, part: str) -> bool:
        return part in self.parts

    def engine_names(self) -> list[str]:
        return [f"{self.host}-e{index}" for index in range(self.engines)]

    def engine_port(self, index: int) -> int:
        return self.ports.engine + index

    def engine_url(self, index: int, settings: Settings) -> str:
        """Where engine `index` of this host is reached, by everybody alike."""
        return f"http://{settings.engine_host}:{self.engine_port(index)}"

    def with_settings(self, ambient: Settings) -> Stack:
        """This stack with its `settings`: addresses of its own parts, and the ambient ones of parts run elsewhere."""
        engines = ",".join(
            f"{name}={self.engine_url(index, ambient)}" for index, name in enumerate(self.engine_names())
        )
        values = {
            "host": self.host,
            "temporal_address": f"{LOOPBACK}:{self.ports.temporal}"
            if self.has("temporal")
            else ambient.temporal_address,
            **({} if self.has("temporal") else {"temporal_namespace": ambient.temporal_namespace}),
            "temporal_ui_port": str(self.ports.ui if self.has("temporal") else ambient.temporal_ui_port),
            "s3_endpoint": f"http://{LOOPBACK}:{self.ports.s3}" if self.has("s3") else ambient.s3_endpoint,
            "engines": engines if self.has("vllm") else ambient.engines,
            "engine_host": ambient.engine_host,
            "metrics_port": str(self.ports.metrics),
            "sandbox_hosts": ambient.sandbox_hosts,
        }
        return self.model_copy(update={"settings": values})


def scratch_root(home: Path) -> Path:
    """Folder of the engines' temporary files: outside the state folder, whose path may be too long for a socket."""
    return Path(tempfile.gettempdir()) / f"ratchet-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]}"


class Home:
    """The state folder: where everything of a stack lies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the folder and its rooms, readable by their owner only."""
        for folder in (self.path, self.logs, self.pids, self.health, self.s3, self.runs, self.models):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def pids(self) -> Path:
        return self.path / "pids"

    @property
    def health(self) -> Path:
        return self.path / "health"

    @property
    def s3(self) -> Path:
        return self.path / "s3"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def lock(self) -> Path:
        return self.path / "supervisor.lock"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def pid_file(self, part: str) -> Path:
        return self.pids / f"{part}.json"

    def load_stack(self) -> Stack | None:
        """What the last `ratchet up` remembered; None in a new folder."""
        path = self.path / STACK_FILE
        return Stack.model_validate_json(path.read_text()) if path.is_file() else None

    def save_stack(self, stack: Stack) -> None:
        write_atomically(self.path / STACK_FILE, stack.model_dump_json(indent=2) + "\n")

    def load_keys(self) -> dict[str, str]:
        """The keys of the object store, made on first use; the file is never readable by others, not even briefly."""
        path = self.path / SECRETS_FILE
        if not path.is_file():
            partial = path.with_name(f"{SECRETS_FILE}.{os.getpid()}.part")
            keys = {"s3_access_key": secrets.token_hex(10), "s3_secret_key": secrets.token_hex(20)}
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(keys, file)
            partial.replace(path)
        loaded: dict[str, str] = json.loads(path.read_text())
        return loaded
