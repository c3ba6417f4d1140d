"""What a host holds for the sandboxes of its stack, as the janitor sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from activities.sandbox.boxes import CONTAINER, Folder

SERVICE = "service"
ATTEMPTS = ("agent", "verifier", "grader", SERVICE)
"""Kinds that live as long as an attempt at most."""


@dataclass(frozen=True)
class Owned:
    """A container, or the folder of one that is not there. The folder's labels count where there is one."""

    id: str
    container: bool
    labels: Mapping[str, str]
    age_s: float

    @property
    def namespace(self) -> str:
        """`<name>/<id>` of the Temporal namespace that it was made for; empty where it names none."""
        return self.labels.get("ratchet.namespace", "")

    @property
    def kind(self) -> str:
        return self.labels.get("ratchet.kind", "")

    @property
    def attempt(self) -> str:
        """Whose it is, and the id of the Episode workflow to ask after; empty for a sandbox that is no attempt's."""
        return self.labels.get("ratchet.attempt", "") if self.kind in ATTEMPTS else ""


def matched(folders: Mapping[str, Folder], containers: Mapping[str, Mapping[str, Any]], now: float) -> list[Owned]:
    """Each container with its sandbox's folder, and what is there alone. `folders` by sandbox id, `containers` by name,
    as the daemon lists them."""
    ids = {folder.labels.get(CONTAINER, name): name for name, folder in folders.items()}
    found = []
    for name, listed in containers.items():
        sandbox_id = ids.get(name, name)
        folder = folders.get(sandbox_id)
        taken = folder is not None and CONTAINER in folder.labels
        # One that was started before anyone asked is as old as its attempt's claim.
        age_s = folder.age_s if taken and folder else now - listed["Created"]
        found.append(Owned(sandbox_id, True, folder.labels if taken and folder else listed["Labels"], age_s))
    alone = [name for name, folder in folders.items() if folder.labels.get(CONTAINER, name) not in containers]
    return found + [Owned(name, False, folders[name].labels, folders[name].age_s) for name in sorted(alone)]
