"""Tasks that an operator adds to a running run, or retires from it. Part of TrainingRun, on its state.

The request is checked where the taskset can be read, and its rows are the record; the state holds how many there were
and the latest, for those who ask. From the first one on a run's next tasks follow from rows, whatever `sampling.by` is.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from temporalio.exceptions import ActivityError, ApplicationError

from workflows import policies
from workflows.contracts import ChangeTasksInput, ChangeTasksOutput, FailureType, TaskChange, TaskRequest
from workflows.failures import failure_type, sentence

LATEST = 20
"""Changes that a run's state names."""


class TaskChanges(BaseModel):
    requests: int = 0
    """Made, refused ones too: the number of the next."""
    added: int = 0
    retired: int = 0
    latest: list[str] = []
    """As `added fix-pip`, the newest last."""

    @property
    def any(self) -> bool:
        return bool(self.added or self.retired)

    def note(self, change: TaskChange, tasks: list[str]) -> None:
        """Take a request in that was granted."""
        self.added += len(tasks) if change is TaskChange.ADDED else 0
        self.retired += len(tasks) if change is TaskChange.RETIRED else 0
        self.latest = [*self.latest, *(f"{change} {task_id}" for task_id in tasks)][-LATEST:]


def parse_request(raw: Any) -> TaskRequest:
    """The request that an operator gave. Raises ApplicationError that names what is wrong with it."""
    if not isinstance(raw, dict):
        raise _refused(f'give one JSON object as {{"tasks": ["<task id>"]}}, not {type(raw).__name__}')
    try:
        request = TaskRequest.model_validate(raw)
    except ValidationError as error:
        raise _refused("\n".join(_describe(item) for item in error.errors())) from None
    twice = sorted({task_id for task_id in request.tasks if request.tasks.count(task_id) > 1})
    if twice:
        raise _refused(f"tasks: named twice: {', '.join(twice)}")
    return request


def _describe(item: Any) -> str:
    field = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return f"{field}: unknown field; allowed here: {', '.join(sorted(TaskRequest.model_fields))}"
    return f"{field}: {item['msg']}"


def _refused(why: str) -> ApplicationError:
    return ApplicationError(why, type=FailureType.INVALID_CONFIG, non_retryable=True)


async def change_tasks(message: ChangeTasksInput) -> ChangeTasksOutput:
    """Have a request checked and written. Raises ApplicationError with every reason for which it was refused."""
    request = message.request
    first = ", ".join(request.tasks[:3]) + (f" and {len(request.tasks) - 3} more" if len(request.tasks) > 3 else "")
    try:
        return await policies.call(
            "change_tasks",
            message,
            ChangeTasksOutput,
            policies.CHECK,
            summary=f"{message.change}: {first}" + (f" ({request.why})" if request.why else ""),
        )
    except ActivityError as error:
        raise ApplicationError(sentence(error), type=failure_type(error), non_retryable=True) from error


def run_is_over() -> ApplicationError:
    return _refused("the run is over, or about to be: its tasks are what they were")
