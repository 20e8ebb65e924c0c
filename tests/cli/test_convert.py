"""`mechinterp convert`, and the other commands on files from outside."""

import json
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import TaskConfig
from tests.conftest import CHECKPOINTS, Run

CHECKPOINT = CHECKPOINTS / "softmax-h2-s0"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    torch.save(hooked_state(load(CHECKPOINT).weights, n_ctx=50), tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_convert_there_and_back(run: Run, tmp_path: Path):
    out, back = tmp_path / "exchange", tmp_path / "back"
    there = ("convert", CHECKPOINT, "--to", "transformer-lens", "--out", out, "--json")
    document = run(*there).done(silent=True).document
    assert list(document)[:4] == ["schema_version", "path", "format", "assumed"]
    said = [document[name] for name in ("format", "to", "n_ctx", "left_out")]
    assert said == ["native", "transformer-lens", 1024, ["history", "snapshots"]]
    assert sorted(map(Path, document["files"])) == sorted(out.iterdir())
    document = run("convert", out, "--to", "native", "--out", back, "--json").document
    said = [document[name] for name in ("format", "n_ctx", "left_out")]
    assert said == ["transformer-lens", None, []]
    file = "model.safetensors"
    assert (back / file).read_bytes() == (CHECKPOINT / file).read_bytes()


@pytest.mark.slow
def test_what_is_assumed_is_printed_and_stays_with_the_checkpoint(
    run: Run, state: Path, tmp_path: Path
):
    task, out = tmp_path / "task.json", tmp_path / "native"
    task.write_text(json.dumps({"noise_var": 0.2}))
    ran = run("convert", state, "--to", "native", "--out", out, "--task", task, "--json").done()
    assert ran.err.startswith(f"mechinterp: {state}: assumed task.context_length = 40, ")
    assert ran.err.count("\n") == 1
    assumed = ran.document["assumed"]
    assert assumed["task.context_length"] == 40
    assert "task.noise_var" not in assumed
    assert load(out).config.task == TaskConfig(noise_var=0.2)
    assert run("info", out, "--json").document["assumed"] == assumed


def test_an_unknown_format_is_refused_with_the_known_ones(run: Run, tmp_path: Path):
    ran = run("convert", CHECKPOINT, "--to", "onnx", "--out", tmp_path / "new")
    ran.assert_refused("native, transformer-lens", "'onnx'")
    assert not list(tmp_path.iterdir())
