"""Models go to a hub and come back: huggingface_hub itself against a stand-in of its HTTP interface."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mechinterp import from_pretrained, load, model_card
from mechinterp.checkpoints.io.files import CheckpointError
from tests.conftest import CHECKPOINTS, python, sampled
from tests.report.hub_stand_in import TOKEN, Hub, stand_in

NAME = "someone/two-heads"
ONLINE = f"""
address = push_to_hub(load("softmax-h2-s0"), "{NAME}", token="{TOKEN}")
said = {{"pushed": address, "revision": from_pretrained("{NAME}", revision=address[-40:]).step}}
calls = [
    lambda: from_pretrained("someone/nothing"),
    lambda: from_pretrained("{NAME}", revision="none"),
    lambda: from_pretrained("someone/else", local_files_only=True),
    lambda: push_to_hub(load("softmax-h1-s0"), "someone/one", token="hf_wrong"),
]
refused = []
for call in calls:
    try:
        call()
    except CheckpointError as error:
        refused.append(str(error))
said["refused"] = refused
"""
PULL = f"""
model = from_pretrained("{NAME}")
circuits = model.weights.QK.sum().item()
said["model"] = [model.name, model.step, len(model.snapshots), circuits]
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Session:
    """A hub that a process has pushed to and pulled from, and what that process and one after it, offline, said."""

    hub: Hub
    online: dict
    offline: dict
    requests: tuple[int, int]
    """That the hub had before the process that is offline, and after it."""


def said_with(hub: Hub, folder: Path, code: str, **environment: str) -> dict:
    """What Python says with the stand-in as its hub, which is settled when huggingface_hub is imported."""
    given = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    refusal = "from mechinterp.checkpoints.io.files import CheckpointError"
    imports = f"import json; from mechinterp import *; {refusal}\n"
    every = {**os.environ, **given, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    return python("-W", "ignore", "-c", imports + code, env=every).done().document


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("home")
    with stand_in() as hub:
        online = said_with(hub, folder, ONLINE + PULL)
        before = len(hub.asked)
        offline = said_with(hub, folder, f"said = {{}}{PULL}", HF_HUB_OFFLINE="1")
        yield Session(hub, online, offline, (before, len(hub.asked)))


@pytest.mark.slow
def test_a_push_uploads_folder_and_card(session: Session):
    sha, files = session.hub.commits[NAME][-1]
    assert session.online["pushed"] == f"{session.hub.address}/{NAME}/commit/{sha}"
    assert set(files) == {
        *("README.md", "config.json", "model.safetensors"),
        *("history.parquet", "snapshots.safetensors"),
    }
    assert f'from_pretrained("{NAME}")' in files["README.md"].decode()


@pytest.mark.slow
def test_a_pushed_model_comes_back_and_stays_in_the_cache(session: Session):
    own = load("softmax-h2-s0")
    circuits = own.weights.QK.sum().item()
    assert session.online["model"] == ["two-heads", own.step, len(own.snapshots), circuits]
    assert session.offline["model"] == session.online["model"]
    before, after = session.requests
    assert after == before > 0


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(session: Session):
    refused = session.online["refused"]
    names = ["nothing", "two-heads", "else", "one"]
    assert [text.partition(":")[0] for text in refused] == [f"someone/{name}" for name in names]
    assert not any("\n" in text for text in refused)


def test_folders_and_names_come_before_repositories(tmp_path: Path, monkeypatch):
    own = from_pretrained("softmax-h2-s0")
    assert torch.equal(own.weights.OV, load("checkpoints/softmax-h2-s0").weights.OV)
    own.save_pretrained(tmp_path / "someone" / "two")
    card = (tmp_path / "someone" / "two" / "README.md").read_text(encoding="utf-8")
    assert card == model_card(own, source="two")
    monkeypatch.chdir(tmp_path)
    assert from_pretrained("someone/two").step == own.step
    with pytest.raises(CheckpointError, match="revision needs a repository of the hub, got 'main'"):
        from_pretrained("someone/two", revision="main")


def test_a_name_is_no_markup_in_a_card(tmp_path: Path):
    name = 'a"b|`c` *d* <i>](e)\\ \n# f'
    odd = replace(load("softmax-h2-s0"), path=tmp_path / name)
    card = model_card(odd)
    (title,) = (line for line in card.splitlines() if line.startswith("# "))
    assert not re.search(r"(?<!\\)[|`*<>\[\]()]", title)
    (call,) = re.findall(r"from_pretrained\((.*)\)$", card, re.M)
    assert ast.literal_eval(call) == odd.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(["softmax-h2-s0", "two-tasks-h4-s0", "garg-gpt2"], keep="softmax-h2-s0".__eq__),
)
def test_cards_of_shipped_models_are_those_that_are_written_now(name: str):
    """`python -m analyses.lib.cards` writes them; measured numbers may differ in their last digits."""
    folder = CHECKPOINTS / name
    stored, again = (folder / "README.md").read_text("utf-8"), model_card(load(folder))
    counts = re.compile(r"\d+ of \d+ calibration models")
    assert counts.findall(stored) == counts.findall(again)
    without = [re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text) for text in (stored, again)]
    assert without[0] == without[1]
