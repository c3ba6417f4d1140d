"""The dashboard and the alerts ask real workers for nothing that they do not tell.

Its name puts it before the tests that kill workers, who forget with their death what they had counted.
"""

from __future__ import annotations

import json

import httpx
import pytest

from tests.deploy.queries import names_in, names_on, queries
from tests.stack import Stack
from workers.stack.endpoints import addresses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_every_query_finds_its_metrics_at_the_workers_of_a_real_run(stack: Stack, straight: str) -> None:
    parts = json.loads(stack.ratchet("status", "--json").stdout)["parts"]
    shown = {part["name"]: part["address"].removeprefix("metrics ") for part in parts}
    found = addresses(stack.home)
    assert found.keys() == {"control", "rollout", "trainer", "engines"}
    assert all(shown[role] == url for role, url in found.items())
    (_, engine) = json.loads((stack.home / "metrics/engines.json").read_text())
    pages = [httpx.get(url, timeout=30).text for url in (*found.values(), f"http://{engine['targets'][0]}/metrics")]
    names = set().union(*map(names_on, pages))
    missing = {where: names_in(query) - names for where, query in queries().items() if names_in(query) - names}
    assert not missing, missing
    assert any(f'run="{straight}"' in page for page in pages)
