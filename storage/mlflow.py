"""A run's metrics and configuration for an MLflow tracking server, over its REST API (2.0).

A run here is one run there, found again by its tags. What the server has stays: of each metric only the steps after its
last one are sent, of the parameters those that are missing. An export that was cut off is completed by the next one.
Called by `ratchet export`; `gather` reads the rows, `send` needs the network alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
from sqlmodel import Session

from storage import queries
from storage.printable import one_line
from storage.tensorboard import scalars
from workflows.contracts import RunState
from workflows.errors import InvalidConfig, StorageError

EXPERIMENT = "ratchet"
RUN_TAG = "ratchet.run"
STARTED_TAG = "ratchet.started"
"""Two databases may have a run of the same name: it says which one is meant."""
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
LONGEST_VALUE = 500
"""Of a parameter; older servers take no more."""
LONGEST_NAME = 250
TIMEOUT_S = 30.0
WHY_CHARS = 300
HIDDEN = "***"
STATES = {
    RunState.FINISHED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.CANCELLED: "KILLED",
}
"""Every other state is RUNNING there."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]", re.ASCII)
_SECRET = re.compile(
    r"(^|[._-])(token|secret|password|passwd|credentials?|(api|access|secret)[_-]?key)$"
    r"|^rollout\.agent\.(command$|env\.)",  # whatever an agent program is given
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^/\s@]+@")

Item = TypeVar("Item")


class Gathered(NamedTuple):
    """What there is to send. Metrics are in the order of their steps."""

    run: str
    started: str
    state: str
    started_ms: int
    ended_ms: int | None
    params: dict[str, str]
    metrics: list[dict[str, Any]]


class Sent(NamedTuple):
    run_id: str
    experiment_id: str
    metrics: int
    """Those that the server did not have yet."""


def gather(opened: Session, *, run: str) -> Gathered:
    """Everything of a run that a tracking server gets: the points that TensorBoard gets, and the configuration without
    its secrets. Raises NotFound."""
    row = queries.run_row(opened, run=run)
    points = sorted(scalars(opened, run=run), key=lambda point: point.step)
    metrics = [
        {"key": name_of(point.tag), "value": point.value, "timestamp": _ms(point.at), "step": point.step}
        for point in points
        if math.isfinite(point.value)
    ]
    return Gathered(
        run=row.id,
        started=row.execution or str(_ms(row.started_at)),
        state=row.state,
        started_ms=_ms(row.started_at),
        ended_ms=None if row.ended_at is None else _ms(row.ended_at),
        params=dict(flat({**row.config, "mode": row.mode, "seed": row.seed})),
        metrics=metrics,
    )


def send(gathered: Gathered, *, url: str, token: str = "") -> Sent:
    """Bring the server up to date. Raises InvalidConfig for what is no URL, StorageError (final) where the server can't
    be reached or refuses."""
    with _Server(url, token) as server:
        experiment = server.experiment(EXPERIMENT)
        run_id, has, reached = server.run(experiment, gathered)
        missing = [{"key": key, "value": value} for key, value in gathered.params.items() if key not in has]
        for params in _parts(missing, PARAMS_AT_ONCE):
            server.post("runs/log-batch", {"run_id": run_id, "params": params})
        new = [point for point in gathered.metrics if point["step"] > reached.get(point["key"], -1)]
        for metrics in _parts(new, METRICS_AT_ONCE):
            server.post("runs/log-batch", {"run_id": run_id, "metrics": metrics})
        end = {} if gathered.ended_ms is None else {"end_time": gathered.ended_ms}
        server.post("runs/update", {"run_id": run_id, "status": STATES.get(RunState(gathered.state), "RUNNING"), **end})
    return Sent(run_id, experiment, len(new))


def name_of(tag: str) -> str:
    """A name that every server takes: other characters than letters, digits, `_`, `-`, `.`, space and `/` are `_`."""
    parts = (part if part.strip(". ") else "_" for part in _NOT_IN_NAMES.sub("_", tag).split("/"))
    return "/".join(parts)[:LONGEST_NAME]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a configuration, `training.steps` and its value as text; lists are JSON. What is called a secret,
    and who logs in to a URL, is hidden."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
        return
    text = value if isinstance(value, str) else json.dumps(value)
    shown = HIDDEN if _SECRET.search(name) else _USER.sub(f"{HIDDEN}@", text)
    yield name_of(name), shown if len(shown) <= LONGEST_VALUE else f"{shown[: LONGEST_VALUE - 1]}…"


def _parts(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class _Server:
    """The calls that an export makes. Each raises StorageError with what the server said."""

    def __init__(self, url: str, token: str) -> None:
        address = _address(url)
        self._shown = str(address.copy_with(userinfo=b""))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=address.join("api/2.0/mlflow/"), headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def experiment(self, name: str) -> str:
        """Its id; it is made where there is none."""
        found = self._call("GET", "experiments/get-by-name", params={"experiment_name": name}, missing=True)
        if found is None:
            return str(self.post("experiments/create", {"name": name})["experiment_id"])
        experiment = found["experiment"]
        if experiment.get("lifecycle_stage") == "deleted":
            raise StorageError(f"MLflow at {self._shown}: its experiment {name!r} was deleted", retryable=False)
        return str(experiment["experiment_id"])

    def run(self, experiment: str, gathered: Gathered) -> tuple[str, set[str], dict[str, int]]:
        """The run's id there, the parameters that it has, and the last step of each metric. It is made where there is
        none."""
        tags = {RUN_TAG: gathered.run, STARTED_TAG: gathered.started}
        where = " AND ".join(f"tags.`{key}` = {_quoted(value)}" for key, value in tags.items())
        asked = {"experiment_ids": [experiment], "filter": where, "max_results": 1}
        if found := self.post("runs/search", asked).get("runs"):
            data = found[0].get("data", {})
            reached = {item["key"]: int(item.get("step", 0)) for item in data.get("metrics", [])}
            return str(found[0]["info"]["run_id"]), {item["key"] for item in data.get("params", [])}, reached
        new = {"experiment_id": experiment, "run_name": gathered.run, "start_time": gathered.started_ms}
        made = self.post("runs/create", new | {"tags": [{"key": key, "value": value} for key, value in tags.items()]})
        return str(made["run"]["info"]["run_id"]), set(), {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json=body) or {}

    def _call(self, method: str, path: str, *, missing: bool = False, **sent: Any) -> dict[str, Any] | None:
        """The answer; None for what is not there, where that is `missing`'s to say."""
        try:
            response = self._client.request(method, path, **sent)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise StorageError(f"MLflow at {self._shown} can't be reached: {why}", retryable=False) from error
        answer = _document(response)
        if missing and answer.get("error_code") == "RESOURCE_DOES_NOT_EXIST":
            return None
        if not response.is_success or "error_code" in answer:
            raise StorageError(f"MLflow at {self._shown} refused {path}: {_why(response, answer)}", retryable=False)
        return answer


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidConfig(f"that is no URL of an MLflow server: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise InvalidConfig("an MLflow server has a URL such as http://127.0.0.1:5000")
    return address.copy_with(path=address.path.rstrip("/") + "/", query=None, fragment=None)


def _quoted(value: str) -> str:
    """In a filter, whose strings know no escape."""
    for mark in ("'", '"'):
        if mark not in value:
            return f"{mark}{value}{mark}"
    raise InvalidConfig(f"MLflow can't search for a run whose id has both kinds of quotes: {value}")


def _document(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {} if not response.is_success else {"error_code": "NO_JSON", "message": "its answer is no JSON"}
    return answer if isinstance(answer, dict) else {}


def _why(response: httpx.Response, answer: dict[str, Any]) -> str:
    """Example: `401, is MLFLOW_TRACKING_TOKEN right?`"""
    said = one_line(str(answer.get("message") or response.reason_phrase))[:WHY_CHARS]
    code = f"{response.status_code} {answer.get('error_code', '')}".strip()
    hint = "; is MLFLOW_TRACKING_TOKEN right?" if response.status_code in (401, 403) else ""
    return f"{code}: {said}{hint}"
