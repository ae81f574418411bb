"""A Hub on this machine: as much of its protocol as pushing and loading speak, with faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

OWNER, TOKEN = "somebody", "hf_secretsecretsecret"


@dataclass
class Repo:
    """One repository: its files, and its commits as lists of the paths that they touched."""

    private: bool = False
    gated: str | bool = False
    card: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(self.commits).encode()).hexdigest()


@dataclass
class Fault:
    """What goes wrong with the next requests of a kind: a status, or `drop` or `slow`."""

    method: str
    path: str
    how: int | str
    times: int = 1


class Hub(ThreadingHTTPServer):
    """The server and all that it knows."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.uploaded: list[str] = []
        self.modes: dict[str, str] = {}
        self.role: dict[str, Any] = {"role": "write"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def did(self, method: str, path: str) -> int:
        """How often that was asked for."""
        return sum(seen == method and re.search(path, where) is not None for seen, where in self.seen)


@contextmanager
def running() -> Iterator[Hub]:
    """A server for as long as the block runs."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, path))
        for fault in self.server.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, path):
                fault.times -= 1
                if fault.how == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                if isinstance(fault.how, int):
                    return self._say({"error": "as the test wants it"}, status=fault.how)
                time.sleep(1.0)
        for pattern, method in ROUTES.items():
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match:
                return method(self, *match.groups(), body)  # type: ignore[arg-type]
        self._say({"error": f"no such thing: {self.command} {path}"}, status=404)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve

    def _say(self, what: Any, *, status: int = 200, **headers: Any) -> None:
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repo(self, name: str) -> Repo | None:
        repo = self.server.repos.get(name)
        hidden = repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}")
        if hidden:
            self._say({"error": "Repository not found"}, status=404, X_Error_Code="RepoNotFound")
        return None if hidden else repo

    def whoami(self, _: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say({"error": "Invalid credentials"}, status=401)
        self._say({"name": OWNER, "type": "user", "orgs": [], "auth": {"accessToken": self.server.role}})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if name in self.server.repos:
            return self._say(
                {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, status=409
            )
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.server.repos[name] = Repo(private=private, commits=[[".gitattributes"]])
        self._say({"url": f"{self.server.url}/{name}"})

    def validate(self, _: bytes) -> None:
        self._say({"errors": [], "warnings": []})

    def info(self, name: str, _: bytes) -> None:
        if repo := self._repo(name):
            siblings = [{"rfilename": path} for path in repo.files]
            facts = {"private": repo.private, "gated": repo.gated, "cardData": repo.card, "tags": []}
            self._say({"id": name, "modelId": name, "sha": repo.sha, "siblings": siblings, **facts})

    def tree(self, name: str, _: bytes) -> None:
        if repo := self._repo(name):
            listed = [
                {"type": "file", "path": path, "oid": "0", "size": len(data)} for path, data in repo.files.items()
            ]
            self._say(listed)

    def preupload(self, name: str, body: bytes) -> None:
        if self._repo(name):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
            self.server.modes |= modes
            self._say({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def batch(self, name: str, body: bytes) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.objects:
                href = f"{self.server.url}/objects/{asked['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(entry)
        self._say({"transfer": "basic", "objects": objects})

    def put(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self.server.uploaded.append(oid)
        self._say({})

    def verify(self, oid: str, _: bytes) -> None:
        self._say({}, status=200 if oid in self.server.objects else 404)

    def commit(self, name: str, body: bytes) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        parent = next(line["value"].get("parentCommit") for line in lines if line["key"] == "header")
        if parent and parent != repo.sha:
            return self._say({"error": "A commit has happened since. Please refresh and try again."}, status=412)
        touched = []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]]
            else:
                continue
            touched.append(value["path"])
        repo.commits.append(touched)
        self._say({"commitUrl": f"{self.server.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha})

    def resolve(self, name: str, path: str, _: bytes) -> None:
        if repo := self._repo(name):
            data = repo.files.get(path)
            if data is None:
                return self._say({"error": "Entry not found"}, status=404, X_Error_Code="EntryNotFound")
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._say(data, X_Repo_Commit=repo.sha, ETag=tag, X_Linked_ETag=tag, X_Linked_Size=len(data))


ROUTES = {
    r"GET /api/whoami-v2": _Handler.whoami,
    r"POST /api/repos/create": _Handler.create,
    r"POST /api/validate-yaml": _Handler.validate,
    r"GET /api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?": _Handler.info,
    r"GET /api/models/([^/]+/[^/]+)/tree/[^/]+": _Handler.tree,
    r"POST /api/models/([^/]+/[^/]+)/preupload/[^/]+": _Handler.preupload,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": _Handler.batch,
    r"PUT /objects/(\w+)": _Handler.put,
    r"POST /objects/(\w+)/verify": _Handler.verify,
    r"POST /api/models/([^/]+/[^/]+)/commit/[^/]+": _Handler.commit,
    r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/[^/]+/(.+)": _Handler.resolve,
}
