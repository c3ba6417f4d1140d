"""The dashboard and the alerts ask for what there is; tests/e2e/test_live_metrics.py finds it at real workers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from storage.waiting import PARTS
from tests.deploy.queries import DASHBOARD, DEPLOY, RULES, names_in, queries

DOCS = DEPLOY.parent / "docs/deployment.md"


def test_the_names_of_a_query_are_its_metrics_and_nothing_else() -> None:
    query = 'histogram_quantile(0.95, sum by (le, x) (rate(a_bucket{le!="c"}[5m]))) > 2'
    query += " and on (run) vllm:b offset 1h >= 1e3"
    assert names_in(query) == {"a_bucket", "vllm:b"}
    assert names_in("sum(rate(a_total[5m])) / sum(rate(b_total[5m])) * on (x) group_left(y) up") == {
        "a_total",
        "b_total",
    }


def test_every_panel_asks_something_and_says_in_which_unit() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["targets"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    for question in ("batches ready", "fresh", "agree", "ours", "publishing", "Engines", "Temporal"):
        assert any(question in panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"), question


def test_every_query_reads_a_metric_of_ours_of_the_sdk_or_of_vllm() -> None:
    for where, query in queries().items():
        names = names_in(query)
        assert names or "up{" in query, where
        assert all(re.match(r"(ratchet|temporal)_|vllm:", name) for name in names), (where, names)


def test_every_alert_says_what_is_wrong_how_bad_and_what_it_means() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"], rule["alert"]
        assert f"`{rule['alert']}`" in DOCS.read_text(), f"docs/deployment.md does not name {rule['alert']}"


def test_the_parts_of_the_lead_metric_are_named_in_the_docs() -> None:
    text = DOCS.read_text()
    assert all(f"`{part}`" in text for part in PARTS)


@pytest.mark.parametrize("file", ["prometheus.yaml", "box.yaml"])
def test_prometheus_takes_its_configuration(file: str) -> None:
    """With its own check where it is installed."""
    path = DEPLOY / "prometheus" / file
    content = yaml.safe_load(path.read_text())
    assert content["rule_files"] == [RULES.name] and content["scrape_configs"]
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
