"""A tracking server in this process that speaks the part of MLflow's REST API (2.0) that an export uses, strictly.

It refuses fields that the API does not document, wrong types, names and batches that MLflow refuses, and changed
parameters.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = "/api/2.0/mlflow/"
FIELDS: dict[str, dict[str, type]] = {
    "experiments/create": {"name": str},
    "runs/create": {"experiment_id": str, "run_name": str, "start_time": int, "tags": list},
    "runs/search": {"experiment_ids": list, "filter": str, "max_results": int},
    "runs/log-batch": {"run_id": str, "metrics": list, "params": list},
    "runs/update": {"run_id": str, "status": str, "end_time": int},
}
METRIC: dict[str, type] = {"key": str, "value": float, "timestamp": int, "step": int}
PAIR: dict[str, type] = {"key": str, "value": str}
STATUSES = {"RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"}
NAME = re.compile(r"[\w\-. /]{1,250}", re.ASCII)


class Refused(Exception):
    def __init__(self, code: int, error_code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.answer = code, {"error_code": error_code, "message": message}


class Tracking:
    """What the server holds. `token`: what it asks for, also as the password of `me`. `cut_after`: metrics that it
    takes before it fails."""

    def __init__(self, token: str = "", cut_after: int | None = None) -> None:
        self.token, self.cut_after = token, cut_after
        self.url = ""
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()

    def call(self, path: str, query: dict[str, list[str]], body: dict[str, Any], bearer: str) -> dict[str, Any]:
        self.calls[path] += 1
        basic = base64.b64encode(f"me:{self.token}".encode()).decode()
        if self.token and bearer not in (f"Bearer {self.token}", f"Basic {basic}"):
            raise Refused(401, "UNAUTHENTICATED", "who are you?")
        if path == "experiments/get-by-name":
            return self._experiment(query["experiment_name"][0])
        if path not in FIELDS:
            raise Refused(404, "ENDPOINT_NOT_FOUND", path)
        _check(body, FIELDS[path], path)
        made: dict[str, Any] = getattr(self, "_" + path.replace("/", "_").replace("-", "_"))(body)
        return made

    def _experiment(self, name: str) -> dict[str, Any]:
        if name not in self.experiments:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"no experiment {name}")
        return {"experiment": {"experiment_id": self.experiments[name], "name": name, "lifecycle_stage": "active"}}

    def _experiments_create(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["name"] in self.experiments:
            raise Refused(400, "RESOURCE_ALREADY_EXISTS", body["name"])
        self.experiments[body["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[body["name"]]}

    def _runs_create(self, body: dict[str, Any]) -> dict[str, Any]:
        for tag in body["tags"]:
            _check(tag, PAIR, "tags")
        run_id = f"{len(self.runs):032x}"
        tags = {tag["key"]: tag["value"] for tag in body["tags"]}
        self.runs[run_id] = {**body, "tags": tags, "status": "RUNNING", "params": {}, "metrics": []}
        return {"run": self._shown(run_id)}

    def _runs_search(self, body: dict[str, Any]) -> dict[str, Any]:
        wanted = dict(re.findall(r"tags\.`([^`]+)` = '([^']*)'", body["filter"]))
        if " AND ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items()) != body["filter"]:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"filter {body['filter']}")
        found = [
            run_id
            for run_id, run in self.runs.items()
            if run["experiment_id"] in body["experiment_ids"] and wanted.items() <= run["tags"].items()
        ]
        return {"runs": [self._shown(run_id) for run_id in found[: body["max_results"]]]} if found else {}

    def _runs_log_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        run, metrics, params = self.runs[body["run_id"]], body.get("metrics", []), body.get("params", [])
        if len(metrics) > 1000 or len(params) > 100 or len(metrics) + len(params) > 1000:
            raise Refused(400, "INVALID_PARAMETER_VALUE", "A batch logging request can contain at most 1000 metrics")
        for items, fields in ((metrics, METRIC), (params, PAIR)):
            for item in items:
                _check(item, fields, item.get("key", ""))
                if not NAME.fullmatch(item["key"]) or any(part in ("", ".", "..") for part in item["key"].split("/")):
                    raise Refused(400, "INVALID_PARAMETER_VALUE", f"Invalid name: {item['key']}")
        for item in params:
            if len(item["value"]) > 500 or run["params"].setdefault(item["key"], item["value"]) != item["value"]:
                raise Refused(400, "INVALID_PARAMETER_VALUE", f"param {item['key']}")
        for item in metrics:
            if self.cut_after is not None and len(run["metrics"]) >= self.cut_after:
                raise Refused(500, "INTERNAL_ERROR", "the disk is full")
            run["metrics"].append(item)
        return {}

    def _runs_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["status"] not in STATUSES:
            raise Refused(400, "INVALID_PARAMETER_VALUE", body["status"])
        self.runs[body["run_id"]].update(body)
        return {"run_info": self._shown(body["run_id"])["info"]}

    def _shown(self, run_id: str) -> dict[str, Any]:
        """Of each metric the value of its last step; an empty list is left out, as MLflow does."""
        run = self.runs[run_id]
        last: dict[str, dict[str, Any]] = {}
        for item in run["metrics"]:
            if item["key"] not in last or item["step"] >= last[item["key"]]["step"]:
                last[item["key"]] = item
        pairs = {name: [{"key": k, "value": v} for k, v in run[name].items()] for name in ("params", "tags")}
        data = {name: items for name, items in (pairs | {"metrics": list(last.values())}).items() if items}
        return {"info": {"run_id": run_id, "status": run["status"], "lifecycle_stage": "active"}, "data": data}


def _check(item: dict[str, Any], fields: dict[str, type], what: str) -> None:
    for name, value in item.items():
        kinds = (int, float) if fields.get(name) is float else fields.get(name, type(None))
        if name not in fields or not isinstance(value, kinds) or isinstance(value, bool):
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"{what}: {name} is {value!r}")


@contextmanager
def tracking_server(held: Tracking) -> Iterator[Tracking]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if len(body) > 1_000_000 or self.headers["Content-Type"] != "application/json":
                self._write(400, {"error_code": "BAD_REQUEST", "message": "no JSON of at most 1 MB"})
                return
            self._answer(json.loads(body, parse_constant=lambda _: "no JSON"))

        def _answer(self, body: dict[str, Any]) -> None:
            parts = urlsplit(self.path)
            try:
                path, bearer = parts.path.removeprefix(ROOT), self.headers.get("Authorization", "")
                self._write(200, held.call(path, parse_qs(parts.query), body, bearer))
            except Refused as refused:
                self._write(refused.code, refused.answer)

        def _write(self, code: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    held.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield held
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
