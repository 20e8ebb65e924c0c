"""Models go to a hub and come back: huggingface_hub itself against a stand-in of its HTTP interface."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mechinterp import classify, from_pretrained, load, model_card
from mechinterp.checkpoints.io.errors import CheckpointError
from tests.conftest import CHECKPOINTS
from tests.report.hub_stand_in import TOKEN, Hub, stand_in

NAME = "someone/two-heads"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with stand_in() as hub:
        yield hub


def python(hub: Hub, folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess:
    """Python with the stand-in as its hub, which is settled when huggingface_hub is imported."""
    given = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    code = f"from mechinterp import *; from pathlib import Path\n{code}"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **given, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def pushed(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a commit that holds a pushed model."""
    code = f'print(push_to_hub(load("softmax-h2-s0"), "{NAME}", token="{TOKEN}"))'
    done = python(hub, tmp_path_factory.mktemp("home"), code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_push_uploads_folder_and_card(hub: Hub, pushed: str):
    sha, files = hub.commits[NAME][-1]
    assert pushed == f"{hub.address}/{NAME}/commit/{sha}"
    assert set(files) == {
        *("README.md", "config.json", "model.safetensors"),
        *("history.parquet", "snapshots.safetensors"),
    }
    assert f'from_pretrained("{NAME}")' in files["README.md"].decode()


@pytest.mark.slow
def test_a_pushed_model_comes_back_and_stays_in_the_cache(hub: Hub, pushed: str, tmp_path: Path):
    code = f"""
model = from_pretrained("{NAME}")
print(model.name, model.step, len(model.snapshots), model.weights.circuits.QK.sum().item())"""
    first = python(hub, tmp_path, code)
    assert first.returncode == 0, first.stderr
    own = load("softmax-h2-s0")
    name, step, snapshots, total = first.stdout.split()
    assert (name, int(step), int(snapshots)) == ("two-heads", own.step, len(own.snapshots))
    assert float(total) == own.weights.circuits.QK.sum().item()
    asked = len(hub.asked)
    offline = python(hub, tmp_path, code, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    assert len(hub.asked) == asked


@pytest.mark.slow
def test_a_revision_is_that_commit(hub: Hub, pushed: str, tmp_path: Path):
    sha = pushed.rpartition("/")[2]
    code = f'print(from_pretrained("{NAME}", revision="{sha}").step)'
    assert python(hub, tmp_path, code).stdout.split() == [str(load("softmax-h2-s0").step)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        'from_pretrained("someone/nothing")',
        f'from_pretrained("{NAME}", revision="none")',
        'from_pretrained("someone/else", local_files_only=True)',
        'push_to_hub(load("softmax-h1-s0"), "someone/one", token="hf_wrong")',
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, pushed: str, tmp_path: Path, call: str):
    done = python(hub, tmp_path, call)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mechinterp.checkpoints.io.errors.CheckpointError: someone/"), last


def test_folders_and_names_come_before_repositories(tmp_path: Path, monkeypatch):
    own = from_pretrained("softmax-h2-s0")
    assert torch.equal(
        own.weights.circuits.OV, load("checkpoints/softmax-h2-s0").weights.circuits.OV
    )
    own.save_pretrained(tmp_path / "someone" / "two")
    monkeypatch.chdir(tmp_path)
    assert from_pretrained("someone/two").step == own.step
    with pytest.raises(CheckpointError, match="a revision is of a repository, got 'main'"):
        from_pretrained("someone/two", revision="main")


def test_the_card_has_the_verdict_and_its_numbers():
    checkpoint = load("softmax-h2-s0")
    card, answer = model_card(checkpoint), classify(checkpoint)
    assert card.startswith("---\nlicense: mit\n")
    for text in (answer.pattern, str(answer.loss), answer.verdict.computes, "500,001 steps"):
        assert text in card


@pytest.mark.parametrize("folder", sorted(CHECKPOINTS.iterdir()), ids=lambda folder: folder.name)
def test_every_shipped_model_has_its_card(folder: Path):
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"# {folder.name}\n" in card
    assert f'from_pretrained("{folder.name}")' in card


@pytest.mark.parametrize("name", ["softmax-h2-s0", "two-tasks-h4-s0", "linear-separate-s0"])
def test_cards_of_shipped_models_are_today_s(name: str):
    card = (CHECKPOINTS / name / "README.md").read_text(encoding="utf-8")
    assert f"**{classify(load(name)).pattern}**" in card
