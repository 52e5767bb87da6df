"""A Hub in one thread: as much of its HTTP interface as pushing a model takes, on 127.0.0.1, keeping what arrives.

Not a fake of `huggingface_hub`: the real client talks to it over a socket, with HF_ENDPOINT set before it is imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubServer:
    """Serves while the `with` block lasts.

    Every commit to a repository whose name begins with "broken" is answered with status 500. `GET /stop` closes the socket,
    so that later requests are refused.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        """Repository -> path -> content, as of its last commit."""
        self.commits: list[tuple[str, str]] = []
        """Repository and message of each commit that was asked for, in order."""
        self.unknown: list[str] = []
        """Requests that this server does not know."""
        self.large: dict[str, bytes] = {}
        """Contents that came by the LFS protocol, by their sha256."""
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Closes the listening socket."""
        self.http.shutdown()
        self.http.server_close()

    # ---- What the Hub does

    def create(self, payload: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{payload.get('organization') or 'tester'}/{payload['name']}"
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, {})
        return status, {"url": f"{self.url}/{repo}", "name": repo}

    def validate(self, payload: dict[str, Any]) -> tuple[int, Any]:
        """The Hub's own checks of a model card, as far as they concern this project."""
        found = re.match(r"---\n(.*?)\n---\n", payload["content"], re.DOTALL)
        data = yaml.safe_load(found[1]) if found else {}
        errors = [
            f'"{key}" with value "{value}" is not valid'
            for key in ("base_model", "datasets")
            for value in ([data[key]] if isinstance(data.get(key), str) else data.get(key) or [])
            if not REPO_ID.fullmatch(str(value))
        ]
        if not data:
            errors.append("empty or missing yaml metadata in repo card")
        return (400 if errors else 200), {"errors": [{"message": message} for message in errors], "warnings": []}

    def preupload(self, payload: dict[str, Any]) -> tuple[int, Any]:
        def mode(path: str) -> str:
            return "lfs" if path.endswith((".safetensors", ".bin", ".pt", ".pth")) else "regular"

        files = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in payload["files"]]
        return 200, {"files": files}

    def lfs_batch(self, payload: dict[str, Any]) -> tuple[int, Any]:
        objects = [
            {
                **item,
                "actions": {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}, "verify": {"href": f"{self.url}/verify"}},
            }
            for item in payload["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def verify(self, payload: dict[str, Any]) -> tuple[int, Any]:
        return (200 if payload["oid"] in self.large else 404), {}

    def commit(self, repo: str, body: bytes) -> tuple[int, Any]:
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        self.commits.append((repo, header["summary"]))
        if repo.split("/")[-1].startswith("broken"):
            return 500, {"error": "the disk is full"}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.large[value["oid"]]
        return 200, {
            "commitUrl": f"{self.url}/{repo}/commit/{len(self.commits):040d}",
            "commitOid": f"{len(self.commits):040d}",
        }


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body, path = self._body(), self.path.split("?")[0]
        if path == "/api/repos/create":
            self._answer(*self.hub.create(json.loads(body)))
        elif path == "/api/validate-yaml":
            self._answer(*self.hub.validate(json.loads(body)))
        elif re.fullmatch(r"/api/models/.+/preupload/main", path):
            self._answer(*self.hub.preupload(json.loads(body)))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer(*self.hub.lfs_batch(json.loads(body)))
        elif path == "/verify":
            self._answer(*self.hub.verify(json.loads(body)))
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._answer(*self.hub.commit(found[1], body))
        else:
            self._unknown()

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": f"{len(body)} bytes are not those of {oid}"})
            return
        self.hub.large[oid] = body
        self._answer(200, {})

    def do_GET(self) -> None:
        if self.path == "/stop":
            self._answer(200, {})
            threading.Thread(target=self.hub.stop).start()
        elif self.path == "/api/whoami-v2":
            self._answer(200, {"type": "user", "name": "tester", "orgs": []})
        elif self.path == "/api/agent-harnesses":  # names in the client's user agent
            self._answer(200, {"standardEnvVars": [], "harnesses": {}})
        else:
            self._unknown()

    def do_HEAD(self) -> None:
        self._unknown()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _unknown(self) -> None:
        self.hub.unknown.append(f"{self.command} {self.path}")
        self._answer(404, {"error": "not found"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, payload: Any) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # a kept connection would outlive `stop`
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
