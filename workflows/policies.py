"""The named time-out and retry policies, and the one way in which workflows call activities.

A deadline nests in the next: a command's own inside the activity, the activity's start-to-close above it. Heartbeats
are beaten by the worker's interceptor for every activity that has a heartbeat time-out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar, cast

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType, ActivityHandle

from workflows.contracts import Message

Result = TypeVar("Result")


@dataclass(frozen=True)
class Policy:
    start_to_close: timedelta
    heartbeat: timedelta
    retry: RetryPolicy
    schedule_to_close: timedelta | None = None
    schedule_to_start: timedelta | None = None
    cancellation: ActivityCancellationType = ActivityCancellationType.TRY_CANCEL

    def lasting(self, seconds: float) -> Policy:
        """The same with room for `seconds` of the agent's own command."""
        return replace(self, start_to_close=self.start_to_close + timedelta(seconds=seconds))

    def pinned(self) -> Policy:
        """The same on a queue that one host alone polls: where nobody takes it up, the host is gone."""
        return replace(self, schedule_to_start=HOST_SILENT)


def _retry(first_s: float, longest_s: float, attempts: int) -> RetryPolicy:
    return RetryPolicy(
        initial_interval=timedelta(seconds=first_s),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=longest_s),
        maximum_attempts=attempts,
    )


HOST_SILENT = timedelta(seconds=30)
"""For how long a sandbox host may take up nothing before all that lives on it is given up. Longer than its worker
needs to be started again, within which its sandboxes live on."""
GENERATE = Policy(timedelta(hours=1), timedelta(seconds=10), _retry(0.5, 10, 12))
"""One answer of the engine; outlasts an engine's restart. Most of the time-out is for waiting in the worker until an
engine has room, which is nobody's failure: the request has a shorter one (`rollout.generate_timeout_s`), and heartbeats
tell of a dead worker."""
SANDBOX = Policy(
    timedelta(seconds=90),
    timedelta(seconds=10),
    _retry(0.5, 10, 10),
    cancellation=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
)
"""One call on a sandbox, exactly once by its key; outlasts a restart of the daemon."""
ACQUIRE = replace(SANDBOX, start_to_close=timedelta(hours=6))
"""Most of it is for waiting until the host has room for one more, which is nobody's failure; heartbeats tell of a dead
worker."""
PLACE = replace(ACQUIRE, retry=_retry(0.5, 10, 20))
"""The same where any of several hosts may take it: one that drains, or that fails, hands it back."""
AGENT = replace(SANDBOX, start_to_close=timedelta(hours=3, minutes=45))
"""A whole agent program; its own budgets end it long before. Tried again only until it has started: what it did can't
be done again."""
VERIFY = replace(SANDBOX, start_to_close=timedelta(minutes=6))
"""Two checks, and the proof on the oracle in a fresh sandbox where both broke."""
CLEAN_UP = Policy(timedelta(minutes=2), timedelta(seconds=15), _retry(0.5, 10, 20))
LINEAGE = Policy(timedelta(minutes=1), timedelta(seconds=15), _retry(0.2, 10, 0), timedelta(hours=2))
"""A short idempotent database write."""
JANITOR = Policy(timedelta(minutes=5), timedelta(seconds=30), _retry(1, 30, 3), timedelta(minutes=8))
"""One part of a pass; gives up where no worker takes it, and the next pass tries again."""
HOST = Policy(timedelta(seconds=10), timedelta(seconds=5), _retry(0.5, 2, 2), timedelta(seconds=15))
"""A word to a host, for somebody who waits."""
CHECK = Policy(timedelta(minutes=2), timedelta(seconds=30), _retry(0.5, 10, 20))
UPDATE = Policy(timedelta(hours=6), timedelta(seconds=20), _retry(1, 30, 20))
PUBLISH = Policy(timedelta(minutes=30), timedelta(seconds=20), _retry(1, 30, 20))
SERVE = Policy(timedelta(minutes=30), timedelta(seconds=20), _retry(1, 30, 5))
TASK_TIMEOUT = timedelta(seconds=5)
"""What a started workflow task may take, some milliseconds as a rule: a worker that dies with one in hand holds the
workflow up for so long. The server's own default is twice that."""
REST = Policy(timedelta(seconds=30), timedelta(seconds=15), _retry(0.5, 5, 3), timedelta(minutes=1))
"""An engine that does not answer is no reason to wait: it uses nothing."""
APPLY = Policy(timedelta(minutes=10), timedelta(seconds=15), _retry(1, 10, 10))


def start(
    name: str,
    message: Message,
    result: type[Result],
    policy: Policy,
    *,
    summary: str,
    queue: str | None = None,
) -> ActivityHandle[Result]:
    """Schedule the activity `name`. `queue` None is the workflow's own, which the server executes eagerly."""
    return workflow.start_activity(
        name,
        message,
        task_queue=queue,
        result_type=result,
        start_to_close_timeout=policy.start_to_close,
        schedule_to_close_timeout=policy.schedule_to_close,
        schedule_to_start_timeout=policy.schedule_to_start,
        heartbeat_timeout=policy.heartbeat,
        retry_policy=policy.retry,
        cancellation_type=policy.cancellation,
        summary=summary[:200],
    )


async def call(
    name: str,
    message: Message,
    result: type[Result],
    policy: Policy,
    *,
    summary: str,
    queue: str | None = None,
) -> Result:
    """`start`, and wait. Raises temporalio.exceptions.ActivityError."""
    return await start(name, message, result, policy, summary=summary, queue=queue)


async def call_optional(
    name: str, message: Message, result: type[Result], policy: Policy, *, summary: str
) -> Result | None:
    """`call` of an activity that may answer nothing, as one did in histories that are older than its answer."""
    optional = cast("type[Result | None]", result | None)
    return await start(name, message, optional, policy, summary=summary)
