"""Failures named by the boundary they crossed.

    RatchetError
    ├── EngineError      the inference engine
    ├── SandboxError     the container, its host, its daemon
    ├── VerifierError    the verifier broke on a known-good answer too
    ├── VerifierBrokenByAnswer   only this answer breaks the verifier
    ├── StorageError     the object store or the database
    ├── TrainerError     the DeepSpeed engine
    ├── Undetermined     whose doing it was can't be told; always final
    ├── FencedError      an older attempt tried to commit
    └── InvalidConfig    the user's input; always final

Each seam raises these and nothing else; the worker's interceptor turns them into `ApplicationError`s whose type is a
`FailureType`, retryable as the instance says. Anything that is not a RatchetError is our own bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from workflows.contracts import FailureType


class RatchetError(Exception):
    """A failure at a known boundary. `retryable`: whether the same call may succeed later; `evidence`: what was
    measured to name it, which the workflow keeps with the verdict."""

    failure: ClassVar[FailureType]
    default_retryable: ClassVar[bool] = True

    def __init__(
        self, message: str, *, retryable: bool | None = None, evidence: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = self.default_retryable if retryable is None else retryable
        self.evidence = dict(evidence or {})


class EngineError(RatchetError):
    failure = FailureType.ENGINE


class SandboxError(RatchetError):
    failure = FailureType.SANDBOX


class VerifierError(RatchetError):
    failure = FailureType.VERIFIER


class VerifierBrokenByAnswer(RatchetError):
    failure = FailureType.VERIFIER_BROKEN
    default_retryable = False


class StorageError(RatchetError):
    failure = FailureType.STORAGE


class TrainerError(RatchetError):
    failure = FailureType.TRAINER


class Undetermined(RatchetError):
    failure = FailureType.UNDETERMINED
    default_retryable = False


class FencedError(RatchetError):
    failure = FailureType.FENCED
    default_retryable = False


class InvalidConfig(RatchetError):
    failure = FailureType.INVALID_CONFIG
    default_retryable = False
