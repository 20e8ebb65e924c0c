"""A stand-in for the hub: the part of its HTTP interface that huggingface_hub uses to upload and download a model."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

TOKEN = "hf_of_the_stand_in"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: commits of each, newest last, as files by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files_at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a revision, "main" or a commit."""
        commits = self.commits.get(repository, [])
        if revision == "main" and commits:
            return commits[-1]
        return next((commit for commit in commits if commit[0] == revision), None)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        self.server.asked.append(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "log in first"}, 401)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if "organization" in asked
                else asked["name"]
            )
            self.server.commits.setdefault(name, [("0" * 40, {})])
            return self.answer({"url": f"{self.server.address}/{name}"})
        repository, action, _ = self.parts(path)
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(
                {
                    "files": [
                        {"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names
                    ]
                }
            )
        assert action == "commit"
        files = dict(self.server.commits[repository][-1][1])
        for row in map(json.loads, body.splitlines()):
            if row["key"] == "file":
                files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        sha = hashlib.sha1(body).hexdigest()
        self.server.commits[repository].append((sha, files))
        url = f"{self.server.address}/{repository}/commit/{sha}"
        return self.answer({"commitUrl": url, "commitOid": sha, "success": True})

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(path)
        repository, action, rest = self.parts(path)
        revision, _, name = rest.partition("/")
        commit = self.server.files_at(repository, revision)
        if commit is None:
            code = "RevisionNotFound" if repository in self.server.commits else "RepoNotFound"
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": code})
        sha, files = commit
        if action == "resolve":
            if name not in files:
                return self.answer({"error": "no file"}, 404, {"X-Error-Code": "EntryNotFound"})
            etag = hashlib.sha1(files[name]).hexdigest()
            return self.answer(files[name], 200, {"ETag": f'"{etag}"', "X-Repo-Commit": sha})
        if action == "tree":
            rows = [
                {"type": "file", "path": n, "size": len(f), "oid": hashlib.sha1(f).hexdigest()}
                for n, f in files.items()
            ]
            return self.answer(rows)
        siblings = [{"rfilename": name} for name in files]
        return self.answer({"id": repository, "sha": sha, "siblings": siblings})

    do_HEAD = do_GET  # noqa: N815

    @staticmethod
    def parts(path: str) -> tuple[str, str, str]:
        """Repository, action and the rest of a path of the interface or of a file."""
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)/([a-z]+)/(.*)", path)
        assert found, path
        return found[1], found[2], found[3]

    def answer(
        self, body: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
