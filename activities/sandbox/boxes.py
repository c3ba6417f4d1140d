"""The folders on this host that belong to sandboxes: `<state>/sandboxes/<id>/{labels.json,box/}`.

Owns whose a folder is. `box` is mounted into the container and holds sbxd's socket and journal; `labels.json` stays on
the host's side. The parent is closed to other users, `box` itself is open so that a remapped root can write there.
Called by `DockerBackend`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path


class Boxes:
    def __init__(self, root: Path) -> None:
        self._root = root

    def box(self, sandbox_id: str) -> Path:
        return self._root / sandbox_id / "box"

    def make(self, sandbox_id: str, labels: dict[str, str]) -> Path:
        """A fresh, empty box."""
        self.remove(sandbox_id)
        self._root.mkdir(parents=True, exist_ok=True)
        self._root.chmod(0o700)
        box = self.box(sandbox_id)
        box.mkdir(parents=True)
        box.chmod(0o777)
        (box.parent / "labels.json").write_text(json.dumps(labels))
        return box

    def labels(self, sandbox_id: str) -> dict[str, str]:
        path = self._root / sandbox_id / "labels.json"
        loaded: dict[str, str] = json.loads(path.read_text() or "{}") if path.is_file() else {}
        return loaded

    def remove(self, sandbox_id: str) -> bool:
        """Idempotent; whether there was one."""
        folder = self._root / sandbox_id
        there = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        return there

    def having(self, name: str, value: str) -> list[str]:
        """Sandbox ids whose folder carries this label."""
        if not self._root.is_dir():
            return []
        return [item.name for item in self._root.iterdir() if self.labels(item.name).get(name) == value]
