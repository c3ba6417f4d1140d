"""What the services of a compose file are to each other: their order, their names, their volumes and ports.

Pure. Called by `tasksets.compose`.
"""

from __future__ import annotations

import re
from typing import Any


def volume_of(volume: Any) -> str:
    """The name of a volume; empty for a folder of the host, and for one without a name."""
    source = volume.get("source", "") if isinstance(volume, dict) else str(volume).rpartition(":")[0].partition(":")[0]
    return str(source) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", str(source)) else ""


def own_volumes(services: dict[str, dict[str, Any]]) -> set[str]:
    """Named volumes of which there is one user: what lies there is the container's own."""
    used = [name for given in services.values() for name in {volume_of(item) for item in given.get("volumes") or []}]
    return {name for name in used if name and used.count(name) == 1}


def names_of(given: dict[str, Any]) -> set[str]:
    """Those under which Compose would let others find a service, beside its own."""
    networks = given.get("networks")
    options = networks.values() if isinstance(networks, dict) else []
    aliases = {str(name) for option in options for name in (option or {}).get("aliases", [])}
    found = {str(given.get("hostname") or ""), str(given.get("container_name") or ""), *aliases}
    return {name for name in found if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)}


def same_port(services: dict[str, dict[str, Any]]) -> list[str]:
    """Ports that several services say are theirs, in words: all have one address."""
    users: dict[str, list[str]] = {}
    for name, given in services.items():
        declared = [*(given.get("expose") or []), *(given.get("ports") or [])]
        for port in {_port(item) for item in declared}:
            users.setdefault(port, []).append(name)
    return [
        f"services {' and '.join(names)} both want port {port}: they share one address"
        for port, names in sorted(users.items())
        if len(names) > 1
    ]


def _port(item: Any) -> str:
    """That of the container. Example: _port("8080:80/tcp") == "80"."""
    target = item.get("target") if isinstance(item, dict) else str(item).rpartition(":")[2]
    return str(target).partition("/")[0]


def in_order(services: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Their names, each after those that it depends on; and what of that can't be had, in words."""
    needs = {name: _needs(given) & services.keys() for name, given in services.items()}
    wrong = [f"service {name} waits for another's end" for name, given in services.items() if _waits_for_an_end(given)]
    order: list[str] = []
    while len(order) < len(needs):
        ready = [name for name, wanted in needs.items() if name not in order and wanted <= set(order)]
        if not ready:
            circle = sorted(needs.keys() - set(order))
            return order, [*wrong, f"services that depend on each other: {', '.join(circle)}"]
        order.append(ready[0])
    return order, wrong


def _needs(given: dict[str, Any]) -> set[str]:
    return set(map(str, given.get("depends_on") or []))


def _waits_for_an_end(given: dict[str, Any]) -> bool:
    wanted = given.get("depends_on") or {}
    conditions = [(how or {}).get("condition") for how in wanted.values()] if isinstance(wanted, dict) else []
    return "service_completed_successfully" in conditions
