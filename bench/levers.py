"""What collection.py switches off, one at a time: a table of names with what they change in the run and in the worker.

A new lever is a new entry: fields of the run's configuration by their dotted names, settings of the rollout worker by
theirs. An entry whose fields this build does not have is passed over and said to be. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.settings import Settings
from workflows.config import RunConfig

ROUND_ROBIN = "<round robin>"
"""Stands for the address of bench/round_robin.py, which is known when it runs."""


@dataclass(frozen=True)
class Lever:
    """`config`: dotted fields of run.json; `settings`: fields of workers.settings.Settings. `by_number`: a batch is the
    groups that began first, and not those that were complete first."""

    name: str
    meaning: str
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    by_number: bool = False

    def missing(self) -> list[str]:
        """Names that this build does not know."""
        unknown = [name for name in self.config if not _known(name)]
        return unknown + [name for name in self.settings if name not in Settings.model_fields]

    def environment(self, round_robin: str) -> dict[str, str]:
        """The settings as a worker reads them."""
        return {
            f"RATCHET_{name.upper()}": round_robin if value == ROUND_ROBIN else value
            for name, value in self.settings.items()
        }

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of run.json with the lever's fields."""
        changed = copy.deepcopy(dict(config))
        for name, value in self.config.items():
            *sections, last = name.split(".")
            place = changed
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        return changed


OURS = Lever("ours", "everything on")
LEVERS = (
    Lever(
        "waves",
        "groups are admitted batch by batch, and all of them must end (mode sync)",
        config={"mode": "sync"},
        by_number=True,
    ),
    Lever(
        "start order",
        "continuous admission, but a batch is the groups that began first (pool_policy in_order)",
        config={"rollout.pool_policy": "in_order"},
        by_number=True,
    ),
    Lever(
        "round robin",
        "requests go to the engines in turn, through an external router that knows nothing",
        settings={"router_url": ROUND_ROBIN},
    ),
    Lever("cold sandboxes", "no sandbox is started before it is asked for", settings={"sandbox_pool": "0"}),
    Lever(
        "redundancy 2",
        "not off but on: two spare siblings per group, the first eight are the group",
        config={"rollout.group_redundancy": 2},
    ),
)


def chosen(names: str) -> Iterator[Lever]:
    """`all`, `none`, or names separated by commas. Raises ValueError for a name that is not in the table."""
    if names == "none":
        return
    table = {lever.name: lever for lever in LEVERS}
    for name in table if names == "all" else [item.strip() for item in names.split(",")]:
        if name not in table:
            raise ValueError(f"no lever {name!r}; there are {', '.join(table)}")
        yield table[name]


def _known(dotted: str) -> bool:
    model: Any = RunConfig
    for name in dotted.split("."):
        found = getattr(model, "model_fields", {}).get(name)
        if found is None:
            return False
        model = found.annotation
    return True
