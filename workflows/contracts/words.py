"""The words of the house: queues, endings, states, identifiers. Every enum says in a sentence what its members mean."""

from __future__ import annotations

import hashlib
from enum import StrEnum


class Queue(StrEnum):
    """Task queues. One box and a cluster use the same names; a role's process polls one of them."""

    CONTROL = "control"
    """TrainingRun workflows and lineage writes."""
    EPISODES = "episodes"
    """Group, Episode and Evaluation workflows with their generate, act, verify and release activities."""
    TRAINING = "training"
    """The update and the publication: one slot per trainer."""
    SANDBOXES = "sandboxes"
    """Where sandboxes have hosts of their own: whichever has room takes the next acquire."""


def engine_queue(host: str) -> str:
    """The queue on which the engines of `host` are told to serve and to load weights."""
    return f"engine@{host}"


def sandbox_queue(host: str) -> str:
    """The queue of all that has to go to a sandbox which lives on `host`."""
    return f"sandbox@{host}"


SHELL_HARNESS = "shell"
TOOLS_HARNESS = "tools"
EXTERNAL_HARNESS = "external"
"""Names of `rollout.harness`; any other is `module:factory` of one's own (docs/harnesses.md)."""


class Outcome(StrEnum):
    """What an episode's ending means for training. Only the first two are valid."""

    MODEL_SUCCESS = "model_success"
    MODEL_FAILURE = "model_failure"
    INFRA_FAILURE = "infra_failure"
    UNKNOWN = "unknown"
    SURPLUS = "surplus"
    """We ended it because others were enough: nobody's failure, replaced by nothing, outside every share."""

    @property
    def valid(self) -> bool:
        """The one flag that rules baseline, spread, loss and every denominator."""
        return self in VALID


VALID = (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """The agent said that it is done."""
    MAX_TURNS = "max_turns"
    """The turn budget is spent."""
    MAX_TOKENS = "max_tokens"
    """The token budget is spent, of one turn or of the episode."""
    CONTEXT_FULL = "context_full"
    """The next prompt does not fit the context."""
    TIME_BUDGET = "time_budget"
    """The agent's own commands used up their time."""
    SANDBOX_KILLED_BY_AGENT = "sandbox_killed_by_agent"
    """The agent broke its own sandbox: killed its shell, filled its disk, ran out of memory."""
    MALFORMED_ACTION = "malformed_action"
    """No action could be read, after the allowed reminders."""
    VERIFIER_BROKEN_BY_ANSWER = "verifier_broken_by_answer"
    """The answer makes the verifier crash or hang, and a known-good answer does not."""
    TAMPERED = "tampered"
    """Tests or verifier were touched, or an expected test is missing from the result."""
    ENGINE_LOST = "engine_lost"
    """The inference engine could not be reached or lost its weights."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox, its host or its daemon went away without the agent's doing."""
    STORAGE_LOST = "storage_lost"
    """The object store or the database could not be reached."""
    VERIFIER_LOST = "verifier_lost"
    """The verifier breaks on a known-good answer too."""
    UNDETERMINED = "undetermined"
    """Evidence is missing or contradictory."""
    SURPLUS = "surplus"
    """Its siblings, or the other groups of its batch, were enough before it had ended."""


class FailureType(StrEnum):
    """`ApplicationError.type` of every failure that an activity names. Raised at the boundary that was crossed."""

    ENGINE = "EngineLost"
    SANDBOX = "SandboxLost"
    STORAGE = "StorageLost"
    VERIFIER = "VerifierLost"
    VERIFIER_BROKEN = "VerifierBrokenByAnswer"
    TRAINER = "TrainerFailed"
    INVALID_CONFIG = "InvalidRunConfig"
    PAYLOAD = "PayloadTooLarge"
    UNDETERMINED = "Undetermined"
    """The evidence on whose doing it was is missing or contradicts itself."""
    WORKER = "WorkerLost"
    """The worker's process ended under it: what a heartbeat time-out says, said by the process that came after."""
    FENCED = "Fenced"
    """An older attempt tried to commit after a newer one had begun."""
    NO_TASKS = "NoTasksLeft"
    """All train tasks are in quarantine."""
    EVALUATION = "EvaluationRefused"
    """An evaluation would have mixed what is not one."""


class RunState(StrEnum):
    """Where a TrainingRun stands."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DEGRADED = "degraded"
    """Admission is held because groups keep closing without a valid sibling."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PoolPolicy(StrEnum):
    """Which complete groups a batch takes."""

    OLDEST_FIRST = "oldest_first"
    """As soon as enough groups are complete, those of them that were admitted first."""
    READY_FIRST = "ready_first"
    """As soon as enough groups are complete, those that were complete first: the least waiting in the pool, the most
    bias towards what is short."""
    IN_ORDER = "in_order"
    """The next groups by number, whatever waits for them: no bias, and the slowest group holds the batch."""


class Loss(StrEnum):
    """The objective of an update; activities/training/loss.py has the formulas."""

    GRPO = "grpo"
    """Mean over the sampled tokens of an optimizer step."""
    DR_GRPO = "dr_grpo"
    """Sum over the tokens, divided by a constant: no length weighs more than another."""
    GSPO = "gspo"
    """Ratios and means of whole sequences."""


class Baseline(StrEnum):
    """What a sibling's reward is compared with."""

    MEAN = "mean"
    """The mean of its group."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the others."""


class Correction(StrEnum):
    """How tokens of other weights are weighed; activities/training/correction.py has the formulas."""

    TOKEN = "token"
    """By the token's own ratio, capped."""
    SEQUENCE = "sequence"
    """By the product of its sequence's ratios, capped."""
    GEOMETRIC = "geometric"
    """By their geometric mean, capped."""
    MASKED = "masked"
    """By the token's own ratio, and not at all where that is outside of a band."""
    NONE = "none"
    """As if today's weights had made them."""


class OnStale(StrEnum):
    """What becomes of a group beyond `max_divergence`."""

    DROP = "drop"
    """It trains nothing, and another takes its place."""
    DOWNWEIGHT = "downweight"
    """It counts max_divergence / divergence."""


class WeightChannel(StrEnum):
    """How new weights come from the trainer to the engines."""

    S3 = "s3"
    """Through the object store, from which engines load files."""
    DIRECT = "direct"
    """From the trainer's machine over a connection, into the engine's memory."""
    COLOCATED = "colocated"
    """Trainer and engines share one machine, and take turns with it: the engine maps what the trainer wrote."""


class InFlight(StrEnum):
    """What becomes of the requests that an engine works on when new weights come."""

    FINISH = "finish"
    """They end under the old weights; the load waits for them, and nothing new begins on the engine."""
    ABORT_CONTINUE = "abort_continue"
    """They are cut: their tokens are kept, and the rest is made under new weights from a fresh cache."""
    KEEP = "keep"
    """They are frozen and go on; what is in the cache of them is up to KvPlan."""


class KvPlan(StrEnum):
    """What becomes of an engine's cache when new weights come."""

    DROP = "drop"
    """It is emptied; frozen requests are put in again under the new weights."""
    KEEP = "keep"
    """It stays and is used on, though other weights filled it: cheapest, and no token is quite the new policy's."""
    SALT = "salt"
    """It stays for the frozen requests; new ones never find what other weights filled."""


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class ActionKind(StrEnum):
    COMMAND = "command"
    FINAL = "final"
    MALFORMED = "malformed"


class FinishReason(StrEnum):
    """The engine's own word on why a generation ended; nothing else decides it."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    """The prompt left no room: nothing was generated."""


class EpisodeKind(StrEnum):
    TRAIN = "train"
    EVALUATION = "evaluation"


class ShortGroup(StrEnum):
    """What becomes of a group that closes with fewer valid siblings than `group_size`."""

    DROP = "drop"
    TRAIN = "train"
    """It trains if at least two are valid and they have different rewards."""


CLOSING = "~"
UNPROVEN = "?"


def policy_label(run: str, version: int, *, proven: bool = True, closing: bool = False) -> str:
    """The weight version string an engine carries: `<run>:<version>`, with `?` until the load is proven, with `~` while
    it ends what it has begun before the next load."""
    return f"{run}:{version}" + ("" if proven else UNPROVEN) + (CLOSING if proven and closing else "")


def parse_policy_label(label: str) -> tuple[str, int, bool] | None:
    """(run, version, proven) of an engine's weight version string, None for one that is not ours."""
    run, _, version = label.removesuffix(CLOSING).rpartition(":")
    digits = version.removesuffix(UNPROVEN)
    return (run, int(digits), not version.endswith(UNPROVEN)) if run and digits.isdecimal() else None


def derive_seed(seed: int, *parts: str | int) -> int:
    """A 31-bit seed that depends on the run's seed and the identifiers alone."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
