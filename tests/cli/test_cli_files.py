"""Commands leave files of the user as they are, whatever lies in the folder that is written."""

from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.progress import show_progress
from mechinterp.report.page import PAGE_FILE, write_report
from tests.conftest import Run

SMALL = ("--set", "train.steps=20", "--set", "train.n_eval_prompts=16", "--device", "cpu", "-q")
CHECKPOINT = Path("checkpoints/softmax-h1-s0").absolute()


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*")
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize(
    "name", [".lock", "model.safetensors", "history.parquet", "snapshots/10.safetensors"]
)
def test_train_refuses_a_folder_with_a_file(run: Run, tmp_path: Path, name: str, resume: list[str]):
    out = tmp_path / "h2"
    file = out / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = contents(out)
    run("train", "softmax-h2", *SMALL, "--out", out, *resume).assert_refused(out)
    assert contents(out) == before


@pytest.mark.slow
def test_a_report_replaces_a_report_only(run: Run, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / PAGE_FILE).write_text("<title>mine</title>")
    few = ("--n-prompts", 64, "--analysis", "circuits", "-q")
    command = ("report", CHECKPOINT, "--out", out, *few)
    before = contents(out)
    run(*command).assert_refused(out, "already exists")
    run(*command, "--overwrite").assert_refused(
        f"{out}: already holds {PAGE_FILE}", "no report of this"
    )
    assert contents(out) == before
    (out / PAGE_FILE).unlink()
    run(*command).done()
    (out / "notes.txt").write_text("mine")
    run(*command, "--overwrite").done()
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_report_refuses_a_folder_that_was_filled_meanwhile(tmp_path: Path):
    def meanwhile(steps, what):
        (tmp_path / PAGE_FILE).write_text("mine")
        return steps

    words = f"already holds {PAGE_FILE}; it is not overwritten"
    with pytest.raises(ValueError, match=words), show_progress(meanwhile):
        write_report(load(CHECKPOINT), tmp_path, n_prompts=64, analyses=["compare-learners"])
    assert [path.name for path in tmp_path.iterdir()] == [PAGE_FILE]
    assert (tmp_path / PAGE_FILE).read_text() == "mine"


def test_nothing_of_a_conversion_is_left_when_it_fails(run: Run, tmp_path: Path):
    torch.save({"W": torch.ones(1)}, tmp_path / "bad.pt")
    ran = run("convert", tmp_path / "bad.pt", "--to", "native", "--out", tmp_path / "out")
    assert ran.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]
