"""Agent programs of other people, trained on real parts: one beside the sandbox, one in it.

All that the engine is asked and answers goes through a relay, where an external router would stand, so that what is
trained can be held against what the engine saw and made, token by token.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlmodel import col, select

from activities.generation.engine import GENERATE_PATH, GENERATE_S
from storage.database import session
from storage.tables import Batch, BatchMember, Episode, Turn
from tests.account import assert_complete
from tests.stack import Stack, small_run
from workflows.contracts import Segment

pytestmark = [pytest.mark.drills, pytest.mark.timeout(1200)]

STEPS = 2
BESIDE = Path(__file__).with_name("openai_agent.py")
INSIDE = Path(__file__).with_name("shell_agent.sh")


@dataclass(frozen=True)
class Exchange:
    """One answer of the engine, in its own words."""

    asked: list[int]
    choice: dict[str, Any]

    @property
    def made(self) -> list[int]:
        ids: list[int] = self.choice["token_ids"]
        return ids

    @property
    def labels(self) -> list[str]:
        """Of the weights that made each token."""
        return [span["version"] for span in self.choice["weight_versions"] for _ in range(span["start"], span["end"])]


class Relay(ThreadingHTTPServer):
    """Passes everything on to the engine and keeps what was said."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.engine = httpx.Client(base_url=engine, timeout=GENERATE_S, trust_env=False)
        self.seen: dict[str, list[Exchange]] = defaultdict(list)
        """By the session that the request named."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            answer = self.server.engine.post(self.path, content=body, headers={"Content-Type": "application/json"})
        except httpx.RequestError as error:
            answer = httpx.Response(503, json={"error": {"message": str(error)}})
        if self.path == GENERATE_PATH and answer.is_success:
            exchange = Exchange(json.loads(body)["token_ids"], answer.json()["choices"][0])
            self.server.seen[self.headers["X-Session-ID"]].append(exchange)
        with suppress(ConnectionError):  # It asks no more: its attempt is over.
            self.send_response(answer.status_code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def relay(stack: Stack) -> Iterator[Relay]:
    with Relay(f"http://127.0.0.1:{stack.ports['engine']}") as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        with stack.restarted(RATCHET_ROUTER_URL=made.url):
            yield made
        made.shutdown()


def agent_run(**program: Any) -> dict[str, Any]:
    rollout = {"harness": "external", "agent": program}
    return small_run(mode="sync", evaluation={"tasks": 0}, training={"steps": STEPS}, rollout=rollout)


def assert_the_engines_own(stack: Stack, run: str, relay: Relay) -> None:
    """Every id that trained, with its probability and its weights, is what the engine saw and made at that turn; and an
    attempt is one conversation, all of whose calls bear its name."""
    with session(stack.database()) as opened:
        turns = opened.exec(
            select(Turn.episode, Turn.segment)
            .join(BatchMember, col(BatchMember.episode) == col(Turn.episode))
            .join(Batch, col(Batch.id) == col(BatchMember.batch))
            .where(Batch.run == run)
            .order_by(col(Turn.episode), col(Turn.turn))
        ).all()
    store, ids = stack.store(), defaultdict[str, list[int]](list)
    for attempt, key in turns:
        segment = Segment.model_validate_json(store.get(str(key)))
        assert segment.branch == 0, f"{attempt} is not one conversation"
        ids[attempt] += segment.token_ids
        told = next((one for one in relay.seen[attempt] if one.asked + one.made == ids[attempt]), None)
        assert told is not None, f"{attempt}, turn {segment.turn}: the engine saw and made other ids"
        count = len(told.made)
        assert segment.loss_mask == [0] * (len(segment.token_ids) - count) + [1] * count
        assert segment.logprobs[-count:] == [item["logprob"] for item in told.choice["logprobs"]["content"]]
        assert [f"{run}:{version}" for version in segment.versions[-count:]] == told.labels
    print(f"{run}: {len(turns)} turns of {len(ids)} attempts are the engine's, {sum(map(len, ids.values()))} ids")


def episodes(stack: Stack, run: str) -> list[Episode]:
    with session(stack.database()) as opened:
        found = list(opened.exec(select(Episode).where(Episode.run == run)))
        opened.expunge_all()
    return found


def programs() -> list[psutil.Process]:
    """Those beside sandboxes that run now."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(BESIDE) in (process.info["cmdline"] or ())]


def kill_one_that_acts(seconds: float) -> None:
    """One that waits for a command in its sandbox, for which it had an answer of the policy."""
    deadline = time.monotonic() + seconds
    while not (acting := [process for process in programs() if process.children()]):
        assert time.monotonic() < deadline, f"no program acts within {seconds:g} s"
        time.sleep(0.05)
    acting[0].kill()


def test_a_program_on_openais_client_is_trained_and_one_that_dies_is_no_wrong_answer(
    stack: Stack, relay: Relay
) -> None:
    run = "agent-beside"
    stack.start(run, agent_run(command=shlex.join([sys.executable, str(BESIDE)])))
    kill_one_that_acts(300)
    stack.finish(run, 800)
    assert_complete(stack, run, steps=STEPS)
    assert_the_engines_own(stack, run, relay)
    played = episodes(stack, run)
    (died,) = [one for one in played if one.stop_reason == "undetermined"]
    assert (died.outcome, died.reward) == ("unknown", None)
    assert "somebody killed the agent program" in died.why
    (again,) = [one for one in played if one.episode_id == died.episode_id and one.attempt == died.attempt + 1]
    assert {one.outcome for one in played if one is not died} == {"model_success", "model_failure"}
    with session(stack.database()) as opened:
        assert opened.get(BatchMember, died.id) is None
        turns = opened.exec(select(Turn).where(Turn.episode == again.id)).all()
        commands = opened.exec(select(Turn).where(col(Turn.episode).startswith(f"{run}/"), Turn.exit_code == 0)).all()
    assert turns and commands, "nothing ran in a sandbox"
    assert not programs() and not list((stack.home / "spool" / "agents").iterdir())
    print(f"{died.id}: {died.why}")


def test_a_program_in_the_sandbox_is_trained(stack: Stack, relay: Relay) -> None:
    run = "agent-inside"
    stack.start(run, agent_run(command=INSIDE.read_text(), inside=True))
    stack.finish(run, 800)
    assert_complete(stack, run, steps=STEPS)
    assert_the_engines_own(stack, run, relay)
    assert {one.outcome for one in episodes(stack, run)} == {"model_success", "model_failure"}
