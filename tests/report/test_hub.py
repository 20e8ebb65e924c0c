"""Models go to a hub and come back: huggingface_hub itself against a stand-in of its HTTP interface."""

import ast
import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
import torch

from mechinterp import load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.report.hub import card_with_verdict
from tests.conftest import CHECKPOINTS, python

TOKEN = "hf_of_the_stand_in"
NAME = "someone/two-heads"
CODE = f"""
import json
import huggingface_hub
from mechinterp import load, push_to_hub
from mechinterp.checkpoints.io.files import CheckpointError

def pulled():
    model = load("{NAME}")
    return [model.name, model.step, len(model.snapshots), model.weights.QK.sum().item()]

address = push_to_hub(load("softmax-h2-s0"), "{NAME}", token="{TOKEN}")
said = {{"pushed": address, "revision": load("{NAME}", revision=address[-40:]).step}}
said |= {{"online": pulled(), "refused": []}}
for call in (
    lambda: load("someone/nothing"),
    lambda: load("{NAME}", revision="none"),
    lambda: load("someone/else"),
    lambda: push_to_hub(load("softmax-h2-s0"), "someone/one", token="hf_wrong"),
):
    try:
        call()
    except CheckpointError as error:
        said["refused"].append(str(error))
huggingface_hub.constants.HF_HUB_OFFLINE = True  # from now on a request is an error
said["offline"] = pulled()
print(json.dumps(said))
"""


class Hub(ThreadingHTTPServer):
    """Repositories in memory: commits of each, newest last, as files by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}

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
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "log in first"}, 401)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.commits.setdefault(name, [("0" * 40, {})])
            return self.answer({"url": f"{self.server.address}/{name}"})
        repository, action, _ = self.parts(path)
        if action == "preupload":
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [file | kind for file in json.loads(body)["files"]]})
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


@pytest.mark.slow
def test_a_pushed_model_comes_back_and_stays_in_the_cache(tmp_path: Path):
    with stand_in() as hub:
        # The address of the hub is settled when huggingface_hub is imported.
        given = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **given, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        said = python("-W", "ignore", "-c", CODE, env=environment).done().document
    sha, files = hub.commits[NAME][-1]
    assert said["pushed"] == f"{hub.address}/{NAME}/commit/{sha}"
    assert set(files) == {
        *("README.md", "config.json", "model.safetensors"),
        *("history.parquet", "snapshots.safetensors"),
    }
    assert f'load("{NAME}")' in files["README.md"].decode()
    own = load("softmax-h2-s0")
    circuits = own.weights.QK.sum().item()
    assert said["online"] == ["two-heads", own.step, len(own.snapshots), circuits]
    assert (said["offline"], said["revision"]) == (said["online"], own.step)
    names = ["nothing", "two-heads", "else", "one"]
    refused = said["refused"]
    assert [text.partition(":")[0] for text in refused] == [f"someone/{name}" for name in names]
    assert not any("\n" in text for text in refused)


def test_folders_and_names_come_before_repositories(tmp_path: Path, monkeypatch):
    own = load("softmax-h2-s0")
    assert torch.equal(own.weights.OV, load("checkpoints/softmax-h2-s0").weights.OV)
    own.save_pretrained(tmp_path / "someone" / "two")
    card = (tmp_path / "someone" / "two" / "README.md").read_text(encoding="utf-8")
    assert card == own.card(source="two")
    assert own.step == 500_001
    assert "| trained | 500,001 steps of 256 prompts" in card
    assert "debiased_gd" not in card
    monkeypatch.chdir(tmp_path)
    assert load("someone/two").step == own.step
    with pytest.raises(CheckpointError, match="revision needs a repository of the hub, got 'main'"):
        load("someone/two", revision="main")


def test_a_name_is_no_markup_in_a_card(tmp_path: Path):
    name = 'a"b|`c` *d* <i>](e)\\ \n# f'
    odd = replace(load("softmax-h2-s0"), path=tmp_path / name)
    card = card_with_verdict(odd)
    (title,) = (line for line in card.splitlines() if line.startswith("# "))
    assert not re.search(r"(?<!\\)[|`*<>\[\]()]", title)
    (call,) = re.findall(r"load\((.*)\)$", card, re.M)
    assert ast.literal_eval(call) == odd.name


@pytest.mark.slow
def test_the_card_of_a_shipped_model_is_that_which_is_written_now():
    """`python -m analyses.lib.cards` writes them; measured numbers may differ in their last digits."""
    folder = CHECKPOINTS / "softmax-h2-s0"
    stored, again = (folder / "README.md").read_text("utf-8"), card_with_verdict(load(folder))
    counts = re.compile(r"\d+ of \d+ calibration models")
    assert counts.findall(stored) == counts.findall(again)
    without = [re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text) for text in (stored, again)]
    assert without[0] == without[1]
