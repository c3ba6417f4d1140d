"""Messages of Evaluation: what it is asked for, what engines say they serve, and what is recorded with the result."""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum

from pydantic import Field

from workflows.contracts.base import Message, TaskRef
from workflows.contracts.episodes import EvaluationResult, RolloutLimits
from workflows.contracts.training import EngineInfo

Fact = str | int | float | bool
"""A value of one field of a fingerprint."""
WEIGHTS = "weights"
"""The field that says which weights were measured: the manifest's digest. All others say how they are served."""


def fingerprint_digest(fields: dict[str, Fact]) -> str:
    """Twelve hex digits of the fields' canonical JSON: sorted keys, no spaces."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def settings_of(fields: dict[str, Fact]) -> dict[str, Fact]:
    """A fingerprint without the weights: two versions of a run that are served alike have it in common."""
    return {name: value for name, value in fields.items() if name != WEIGHTS}


class EvaluationState(StrEnum):
    """Where an evaluation stands."""

    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"
    """It would have mixed what is not one: engines that serve differently, or weights that changed under it."""
    FAILED = "failed"
    CANCELLED = "cancelled"


class OpenEvaluationInput(Message):
    """Check what the workflow can't see of a request that somebody started, and write its row."""

    workflow_id: str
    execution: str
    """The workflow's first execution: tells a retry from a second evaluation under the same id."""
    request: dict[str, object]


class CloseEvaluationInput(Message):
    """Write the end of an evaluation that a request started, and free the engines."""

    workflow_id: str
    state: EvaluationState
    reason: str = ""


class FingerprintInput(Message):
    """What serves `run`'s `version`? Asked of the engines themselves."""

    run: str
    version: int
    manifest: str
    model: str
    """Folder of the run's model: its tokenizer and chat template."""
    tasks: list[TaskRef]
    limits: RolloutLimits
    engines: list[EngineInfo]


class FingerprintOutput(Message):
    fields: dict[str, Fact] = {}
    """What all engines below have in common, all told; empty where `refused`."""
    engines: dict[str, str] = {}
    """Engines that carry the version, each with the digest of the parameters that it holds."""
    left_out: dict[str, str] = {}
    """Engines that do not carry it, and what they do instead."""
    refused: str = ""
    """Why no evaluation can be made on these engines."""


class QuantizedInput(Message):
    """Have an engine serve a published version quantized, and prove it."""

    run: str
    engine: EngineInfo
    version: int
    manifest: str
    model: str
    """Folder of the run's model."""
    context_length: int
    dtype: str = "auto"
    """Of what is not quantized."""
    method: str
    """`int8`."""


class Measured(Message):
    """With what and when a result was made; the scores are read from the episodes' rows."""

    evaluation_id: str
    workflow_id: str
    in_run: bool
    """Made by the run itself, not by a request."""
    state: EvaluationState
    reason: str = ""
    model: str = ""
    taskset: str
    tasks: int
    samples_per_task: int
    seed: int
    manifest: str = ""
    fields: dict[str, Fact] = {}
    """The fingerprint."""
    engines: dict[str, str] = {}
    left_out: dict[str, str] = {}
    redone: int = Field(0, ge=0)
    """Attempts that did not count, because their tokens are of other weights."""
    started_at: float


class EvaluationRecord(Message):
    run: str
    result: EvaluationResult
    measured: Measured | None = None
    """None in records that are older than fingerprints."""


class RecordedEvaluation(Message):
    """What the rows of the episodes add up to; storage/intervals.py says how."""

    mean_reward: float | None = None
    low: float | None = None
    high: float | None = None
    method: str = ""
