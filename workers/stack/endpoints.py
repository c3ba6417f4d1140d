"""Where the metrics of this host's workers are: `<home>/metrics/<role>.json`, as Prometheus' file_sd takes them.

Written by a worker when it serves them, gone when it ends well, and written anew by its next process. Read by
Prometheus as they are, and by `ratchet status`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from workers.settings import Settings
from workers.stack.process import write_atomically
from workers.stack.state import ROLES

FOLDER = "metrics"


def port_of(settings: Settings, role: str) -> int:
    """The port that the role should have, 0 for none: the roles have theirs one after the other."""
    return settings.metrics_port + ROLES.index(role) if settings.metrics_port else 0


def file_of(home: Path, role: str) -> Path:
    return home / FOLDER / f"{role}.json"


def show(settings: Settings, role: str, address: str) -> Path:
    """Write down that the role serves its metrics at `host:port`; the file."""
    file = file_of(settings.home_path, role)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, json.dumps(targets(settings, role, address)))
    return file


def targets(settings: Settings, role: str, address: str) -> list[dict[str, object]]:
    """What file_sd takes. The engines' worker names the engines of its host too, which serve metrics of their own."""
    found: list[dict[str, object]] = [{"targets": [address], "labels": {"role": role, "host": settings.host}}]
    if role == "engines":
        for engine in settings.engine_infos:
            if engine.host == settings.host:
                labels = {"role": "vllm", "host": engine.host, "engine": engine.name}
                found.append({"targets": [urlsplit(engine.url).netloc], "labels": labels})
    return found


def addresses(home: Path) -> dict[str, str]:
    """The URL of each role's metrics on this host."""
    found = {}
    for file in (home / FOLDER).glob("*.json"):
        # A file that somebody else put there is nobody's endpoint.
        with suppress(OSError, ValueError, LookupError, TypeError):
            found[file.stem] = f"http://{json.loads(file.read_text())[0]['targets'][0]}/metrics"
    return found
