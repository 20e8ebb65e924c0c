"""Commands leave files of the user as they are, whatever lies in the folder that is written."""

from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.progress import show_progress
from mechinterp.report.page import PAGE, write_report
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import Run

SMALL = ("--set", "train.steps=20", "--set", "train.n_eval_prompts=16", "--device", "cpu", "-q")
CHECKPOINT = Path("checkpoints/softmax-h1-s0").absolute()


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*")
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    model = ModelConfig(n_layers=2, n_heads=2, context_only=True, d_model=6, d_head=3)
    config = ExperimentConfig(task=TaskConfig(d_x=3, context_length=5), model=model)
    save(tmp_path / "deep", config, initial_deep_weights(config), step=5)
    return tmp_path / "deep"


@pytest.mark.parametrize("name", ["model.safetensors", "history.parquet", "notes.txt"])
def test_prune_and_save_refuse_a_folder_with_a_file(
    run: Run, deep: Path, tmp_path: Path, name: str
):
    out = tmp_path / "u"
    out.mkdir()
    (out / name).write_text("mine")
    before = contents(out)
    words = f"{out}: already holds {name}; it is not overwritten"
    run("prune", deep, "--n-prompts", 80, "--out", out).assert_refused(words)
    with pytest.raises(ValueError, match=name):
        load(CHECKPOINT).save_pretrained(out)
    assert contents(out) == before


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


def test_training_leaves_temporary_files_of_others(run: Run, tmp_path: Path):
    names = [".notes.1.tmp", "other/.config.json.7.tmp", "other/snapshots/.1.safetensors.7.tmp"]
    (tmp_path / "runs" / "other" / "snapshots").mkdir(parents=True)
    for name in names:
        (tmp_path / "runs" / name).write_text("mine")
    sweep = tmp_path / "sweep.json"
    sweep.write_text('{"preset": "softmax-h1", "set": {"train.steps": 20}, "name": "h1"}')
    run("sweep", sweep, "--out", tmp_path / "runs", "--device", "cpu", "-q").done()
    assert {(tmp_path / "runs" / name).read_text() for name in names} == {"mine"}


@pytest.mark.slow
def test_a_report_replaces_a_report_only(run: Run, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / PAGE).write_text("<title>mine</title>")
    command = (
        "report",
        CHECKPOINT,
        "--out",
        out,
        "--n-prompts",
        64,
        "--analysis",
        "circuits",
        "-q",
    )
    before = contents(out)
    run(*command).assert_refused(out, "already exists")
    run(*command, "--overwrite").assert_refused(f"{out}: already holds {PAGE}", "no report of this")
    assert contents(out) == before
    (out / PAGE).unlink()
    run(*command).done()
    (out / "notes.txt").write_text("mine")
    run(*command, "--overwrite").done()
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_report_refuses_a_folder_that_was_filled_meanwhile(tmp_path: Path):
    def meanwhile(steps, what):
        (tmp_path / PAGE).write_text("mine")
        return steps

    words = f"already holds {PAGE}; it is not overwritten"
    with pytest.raises(ValueError, match=words), show_progress(meanwhile):
        write_report(load(CHECKPOINT), tmp_path, n_prompts=64, analyses=["fit"])
    assert [path.name for path in tmp_path.iterdir()] == [PAGE]
    assert (tmp_path / PAGE).read_text() == "mine"


def test_a_link_as_a_table_is_refused(run: Run, tmp_path: Path):
    for name in ("there.csv", "nowhere.csv"):
        link = tmp_path / f"link-to-{name}"
        link.symlink_to(tmp_path / name)
        (tmp_path / "there.csv").write_text("mine")
        ran = run("classify", CHECKPOINT, "--out", link, "-q")
        ran.assert_refused(link, "already exists; it is not overwritten")
        assert link.is_symlink()
        assert not (tmp_path / "nowhere.csv").exists()
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_nothing_of_a_conversion_is_left_when_it_fails(run: Run, tmp_path: Path):
    torch.save({"W": torch.ones(1)}, tmp_path / "bad.pt")
    ran = run("convert", tmp_path / "bad.pt", "--to", "native", "--out", tmp_path / "out")
    assert ran.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]
