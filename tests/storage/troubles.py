"""Trouble to plant into a made run, one kind per function. Each returns words by which a report must name it."""

from __future__ import annotations

from typing import Any

from sqlmodel import Session

from storage import evaluations, queries
from storage.tables import Batch, EngineLoad, Run, ServedEvaluation
from tests.storage import rows
from tests.storage.made_run import ENGINE_FACTS, START
from workflows.contracts import EpisodeRecord, Fact, Outcome, StopReason, TurnRecord

RUN = "shell-demo"


def slow_group(opened: Session) -> list[str]:
    """A group whose last attempt runs commands for a minute and a half."""
    batch = _batch(opened, 7)
    parts = {**batch.tail["parts"], "act": 92.0}
    batch.waited = batch.waited | {"to_trainable_batch": 104.0, "tail": 88.0}
    batch.tail = batch.tail | {"parts": parts}
    return ["slow steps 1", f"{RUN}/g", "/e3/a0 (shell/", "mostly act (92.0 s)"]


def stale_data(opened: Session) -> list[str]:
    """A batch whose tokens lag five versions, far from today's policy."""
    _measured(opened, 9, {"off_policy/steps_max": 5.0, "off_policy/divergence": 0.8})
    _measured(opened, 9, {"off_policy/effective_sample_size": 0.2})
    return ["oldest token 5, at most 1", "divergence, worst batch 0.8, at most 0.1", "step 9", "sample size"]


def dropped_as_stale(opened: Session) -> list[str]:
    for number in range(900, 960):
        late = {"eligible": False, "reason": "too_stale"}
        queries.put_group(opened, run=RUN, result=rows.group(number, run=RUN).model_copy(update=late))
    return ["groups dropped as stale", "60 too stale"]


def broken_numerics(opened: Session) -> list[str]:
    """An engine in another dtype."""
    _measured(opened, 5, {"mismatch_kl/mean": 0.006, "mismatch_abs/far_share": 0.3, "off_policy/truncated_share": 0.4})
    return ["mismatch_kl, worst batch 0.006, at most 0.001", "over 0.1 nats apart", "cut or masked", "step 5"]


def stopped_by_numerics(opened: Session) -> list[str]:
    """What the update itself refused."""
    run = opened.get(Run, RUN)
    assert run is not None
    run.state, run.reason = "failed", "step 3: engine and trainer disagree on the same weights: mismatch_kl 2.0e-02"
    return ["the run was stopped", "mismatch_kl 2.0e-02"]


def flaky_task(opened: Session) -> list[str]:
    """One task whose verifier scores the same answer differently."""
    for number, reward in ((900, 1.0), (901, 0.0)):
        put_attempt(opened, f"{RUN}/g{number}/e0/a0", reward=reward, turns=_counted())
    return ["tasks that flake 1", "shell/count-17", f"{RUN}/g900/e0/a0 scored 1", f"{RUN}/g901/e0/a0 did the same"]


def losing_task(opened: Session) -> list[str]:
    """One task whose verifier breaks on a known-good answer, now and then."""
    for number in range(900, 910):
        lost = {"stop_reason": StopReason.VERIFIER_LOST, "ended_at": START + 30 * (number - 900)}
        put_attempt(
            opened, f"{RUN}/g{number}/e0/a0", reward=None if number % 2 else 1.0, **(lost if number % 2 else {})
        )
    return ["lost at one task", "shell/count-17 (5 of 10)"]


def quarantined_task(opened: Session) -> list[str]:
    queries.put_quarantine(opened, run=RUN, task=rows.TASK, why="3 short groups in a row", since=START)
    return ["tasks in quarantine 1", "shell/count-17: 3 short groups in a row"]


def dead_host(opened: Session) -> list[str]:
    """A sandbox host that goes away with all that is on it, in mid-run: 16 of some thousand attempts."""
    for number in range(16):
        why = (
            "SandboxLost: the daemon of host box-b went away" if number % 2 else "SandboxLost: sandbox 7 lives on box-b"
        )
        task = rows.TASK.model_copy(update={"task_id": f"count-{number}"})
        attempt = f"{RUN}/g900/e{number}/a0"
        put_attempt(opened, attempt, reward=None, why=why, task=task, ended_at=START + 380.0, host="box-b")
    for host, ended_at in (("box-a", 390.0), ("box-b", 300.0)):
        put_attempt(opened, f"{RUN}/g901/{host}/a0", reward=1.0, host=host, ended_at=START + ended_at)
    named = (
        f"dead hosts 1, at most 0 (environment.dead_hosts): box-b lost its last 16 attempts, such as {RUN}/g900/e9/a0"
    )
    return ["worst outage", "16 attempts", "after the start", "sandbox at box-b (16)", named]


def dead_engine(opened: Session) -> list[str]:
    """An engine that answers nobody any more."""
    for number in range(16):
        lost = {
            "stop_reason": StopReason.ENGINE_LOST,
            "why": "EngineLost: local-e1 /inference/v1/generate: ConnectError",
            "task": rows.TASK.model_copy(update={"task_id": f"count-{number}"}),
            "ended_at": START + 380.0,
        }
        put_attempt(opened, f"{RUN}/g900/e{number}/a0", reward=None, **lost)
    return ["worst outage", "engine at local-e1 (16)"]


def unproven_engine(opened: Session) -> list[str]:
    load = opened.get(EngineLoad, (RUN, 12, "local-e1"))
    assert load is not None
    load.proven, load.why = False, "checksum of lm_head.weight differs"
    return ["unproven loads 1", "local-e1 at version 12: checksum of lm_head.weight differs"]


def engine_behind(opened: Session) -> list[str]:
    """An engine that has loaded nothing since version 11."""
    for version in range(12, 16):
        opened.delete(opened.get_one(EngineLoad, (RUN, version, "local-e0")))
    return ["versions that the last engine is behind 4", "local-e0 has proven version 11"]


def old_cache(opened: Session) -> list[str]:
    opened.get_one(EngineLoad, (RUN, 4, "local-e0")).cached_tokens_after = 16
    return ["tokens from an old cache after a load 16"]


def changed_fingerprint(opened: Session) -> list[str]:
    """The engines were started anew, with another vLLM and in another dtype."""
    for engine in ("local-e0", "local-e1"):
        _serves(opened, engine, dtype="bfloat16", kv_cache_dtype="bfloat16", engine_version="0.33.0")
    changed = ["dtype float32 -> bfloat16", "engine_version 0.32.0 -> 0.33.0"]
    return ["the result of version 15 is stale", *changed, f"--workflow-id {RUN}/eval-1 --input"]


def engines_apart(opened: Session) -> list[str]:
    _serves(opened, "local-e1", quantization="fp8")
    return ["serves it otherwise than", "quantization", "fp8"]


def refused_evaluation(opened: Session) -> list[str]:
    """The last evaluation that was asked for found its weights changed."""
    why = "weights change under it: 4 attempts are of versions 16 to 16, not 15"
    opened.add(
        ServedEvaluation(
            id=f"{RUN}/nightly",
            run=RUN,
            version=15,
            workflow="nightly",
            in_run=False,
            state="refused",
            reason=why,
            started_at=START + 5000,
            ended_at=START + 5010,
        )
    )
    return [f"{RUN}/nightly was refused", why, "--type Evaluation"]


TROUBLES = {
    "batch readiness": [slow_group],
    "policy freshness": [stale_data, dropped_as_stale],
    "numeric alignment": [broken_numerics, stopped_by_numerics],
    "environment reliability": [flaky_task, losing_task, quarantined_task, dead_host, dead_engine],
    "weight publication": [unproven_engine, engine_behind, old_cache],
    "evaluation": [changed_fingerprint, engines_apart, refused_evaluation],
}
"""By the question under which each is named."""


def put_attempt(opened: Session, attempt: str, *, reward: float | None, **changes: Any) -> None:
    record = rows.record(attempt, reward=reward).model_dump()
    ended = {"outcome": Outcome.INFRA_FAILURE} if reward is None else {}
    default = {"started_at": START + 100, "ended_at": START + 112, "image_id": "sha256:1"}
    queries.put_episode(opened, record=EpisodeRecord.model_validate(record | ended | default | changes))


def _counted() -> list[TurnRecord]:
    """A command and an answer."""
    command = TurnRecord(turn=0, segment="s0", action="wc -l < notes.txt", exit_code=0, output_digest="d" * 64)
    return [command, TurnRecord(turn=1, segment="s1", action="Answer: 12")]


def _serves(opened: Session, engine: str, **changes: Fact) -> None:
    """What an engine is seen to serve of version 15, long after its evaluation."""
    facts = ENGINE_FACTS | changes
    evaluations.put_serving(opened, run=RUN, version=15, engine=engine, facts=facts, seen_at=START + 9000)


def _batch(opened: Session, step: int) -> Batch:
    batch = opened.get_one(Batch, f"{RUN}/b{step}")
    opened.add(batch)
    return batch


def _measured(opened: Session, step: int, metrics: dict[str, float]) -> None:
    batch = _batch(opened, step)
    batch.metrics = batch.metrics | metrics
