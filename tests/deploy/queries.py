"""The queries of the dashboard and of the alert rules, the names in them, and the names on a page of metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/ratchet.json"
RULES = DEPLOY / "prometheus/rules.yaml"

PROMETHEUS_OWN = frozenset({"up"})
"""Of each scrape, made by Prometheus itself."""
WORDS = frozenset(
    ("and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool")
)
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")


def queries() -> dict[str, str]:
    """By where each is from. `$run` stands for any run."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$run", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }
    rules = yaml.safe_load(RULES.read_text())
    return found | {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def names_in(query: str) -> set[str]:
    """The metrics that a query reads."""
    bare = re.sub(r'"(?:\\.|[^"\\])*"', "", query)
    bare = GROUPING.sub(" ", re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", " ", bare))
    words = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    return set(words) - WORDS - PROMETHEUS_OWN


def names_on(page: str) -> set[str]:
    """The names of the samples on a page of metrics."""
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in page.splitlines() if line and not line.startswith("#")}
