"""A stand-in for the server of Weights & Biases: accepts runs and keeps their rows."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"
OWNER = {"id": "1", "name": "project", "entity": {"id": "1", "name": "entity"}}


class WandbServer:
    """Serves on a port of its own within a `with` block.

    files: the lines of each file of each run.
    received: number of rows, those that replaced another included.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, list[str]]] = {}
        self.received = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # `self` is the server
                content = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.path == "/graphql":
                    handler.reply(self.answer(json.loads(content)))
                elif handler.path.endswith("/file_stream"):
                    self.store(handler.path.split("/")[-2], json.loads(content))
                    handler.reply({})
                else:
                    handler.reply({})

            do_PUT = do_POST

            def reply(handler, value: Any) -> None:
                content = json.dumps(value).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(handler, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each run."""
        return {run: [json.loads(line) for line in files.get(HISTORY, [])] for run, files in self.files.items()}

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def store(self, run: str, message: dict[str, Any]) -> None:
        """Lines replace those from their offset on."""
        for name, part in (message.get("files") or {}).items():
            self.received += len(part["content"]) if name == HISTORY else 0
            self.files[run].setdefault(name, [])[part["offset"] :] = part["content"]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        variables = request.get("variables") or {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        assert operation is not None
        run = variables.get("name", "")
        match operation[1]:
            case "UpsertBucket":
                self.files.setdefault(run, {})
                bucket = {"id": run, "name": run, "displayName": run, "config": "{}", "project": OWNER}
                return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
            case "RunResumeStatus":
                return {"data": {"model": {**OWNER, "bucket": self._status(run)}}}
            case "Viewer":
                return {"data": {"viewer": {"id": "1", "entity": "entity", "flags": "{}", "teams": {"edges": []}}}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.address}/{name}"} for name in variables["files"]]
                return {"data": {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _status(self, run: str) -> dict[str, Any] | None:
        if run not in self.files:
            return None
        history, summary = (self.files[run].get(name, []) for name in (HISTORY, SUMMARY))
        return {
            "id": run,
            "name": run,
            "historyLineCount": len(history),
            "historyTail": json.dumps(history[-1:]),
            "summaryMetrics": (summary or ["{}"])[-1],
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            "tags": [],
        }
