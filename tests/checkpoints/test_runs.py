"""Runs of somebody else's: files whose names hold a step, read in one way, with their losses."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.over_steps import over_steps
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.paths import runs_among, steps_of
from mechinterp.checkpoints.runs import EVAL_PROMPTS
from mechinterp.models.heads import head_outputs, predict
from mechinterp.models.run.evaluation import evaluation_prompts
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import LAYOUTS
from tests.conftest import CHECKPOINTS

pytestmark = pytest.mark.usefixtures("small_null")
STEPS = (0, 2000, 10_000)
HINTS = {"n_heads": 2, "score": "softmax", "attend_to_self": False}
OPTIONS = ("--n-heads", "2", "--score", "softmax", "--no-attend-to-self")


def true_run() -> Checkpoint:
    return load(CHECKPOINTS / "softmax-h2-s0")


def write_run(folder: Path, name: str = "step_{}.pt") -> Path:
    """A file for each of some steps of a shipped model, in names whose reading leaves columns and sign open."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        file = folder / name.format(step)
        file.parent.mkdir(exist_ok=True)
        torch.save(LAYOUTS["haiku"](true_run().snapshots[step]), file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the names of haiku."""
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def read_run(folder: Path) -> Checkpoint:
    return load(folder, **HINTS)


@pytest.mark.slow
def test_a_head_stays_the_same_head_and_is_read_in_one_way(folder: Path, read_run: Checkpoint):
    run = read_run
    assert run.steps == list(STEPS)
    assert run.step == STEPS[-1]
    assert run.assumed["step"] == STEPS[-1]
    for step in STEPS:
        true, read = true_run().snapshots[step], run.snapshots[step]
        torch.testing.assert_close(read.QK, true.QK, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(read.OV, true.OV, rtol=1e-5, atol=1e-6)
    assert run.readings[0].loss < 0.6
    # The last file decides, as at step 0 nothing predicts, so that columns and sign stay open.
    assert not any(each.predicts for each in load(folder / "step_0.pt", **HINTS).readings)


@pytest.mark.slow
def test_losses_are_on_the_same_prompts(read_run: Checkpoint):
    run = read_run
    prompts = evaluation_prompts(run, n_prompts=EVAL_PROMPTS)
    history = run.history
    assert history["step"].tolist() == [step for step in STEPS for _ in range(2)]
    for step, rows in history.groupby("step"):
        heads = true_run().snapshots[step]
        error = (predict(heads, prompts) - prompts.y_query).square().mean(1).double()
        np.testing.assert_allclose(rows["eval_loss"], float(error.mean()), rtol=1e-5)
        np.testing.assert_allclose(
            rows["eval_loss_sem"], float(error.std()) / EVAL_PROMPTS**0.5, rtol=1e-5
        )
        np.testing.assert_allclose(rows["omega"], heads.omega.mean(1), rtol=1e-4, atol=1e-7)
        outputs = head_outputs(heads, prompts).double()[..., 0]
        spread = outputs.std(0)
        np.testing.assert_allclose(rows["share"], spread / spread.sum(), rtol=1e-4)
        clean = prompts.y_query_clean[:, 0].double()
        rise = (outputs.sum(1)[:, None] - outputs - clean[:, None]) ** 2
        rise = (rise - (outputs.sum(1) - clean)[:, None] ** 2).mean(0)
        np.testing.assert_allclose(rows["rise"], rise, rtol=1e-3, atol=1e-6)
    assert history["loss"].isna().all()


def test_a_bias_that_training_leaves_at_zero_at_first(tmp_path: Path):
    """The architecture is one for all steps: step 0 of torch's attention has biases of zeros."""
    for step in (0, 100):
        module = torch.nn.MultiheadAttention(6, 2)
        if step:
            torch.nn.init.normal_(module.in_proj_bias)
        torch.save(module.state_dict(), tmp_path / f"model_{step}.pt")
    run = load(tmp_path, n_heads=2)
    assert run.snapshots[0].model == run.snapshots[100].model
    assert run.config.model.biases


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("step_1000.pt", "step_200.pt"), [200, 1000]),
        (("epoch=3.ckpt", "epoch=0.ckpt"), [0, 3]),
        (("epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"), [6, 12]),
        (("net_h2_iter0050.pth", "net_h2_iter0100.pth"), [50, 100]),
        (("1000.npz", "2000.npz"), [1000, 2000]),
        (("seed0.pt", "seed1.pt"), []),
        (("model_0.pt", "model_1.pt"), []),
        (("step_1_s0.pt", "step_2_s1.pt"), []),
        (("step_1.pt", "best.pt"), []),
        (("step_01.pt", "step_1.pt"), []),
        (("step_1.pt",), []),
    ],
)
def test_names_that_hold_a_step(names: tuple[str, ...], steps: list[int]):
    by_step = steps_of([Path("runs") / name for name in names])
    assert list(by_step) == steps


def test_whoever_says_that_it_is_a_run_is_believed():
    files = [Path("model_0.pt"), Path("model_1.pt")]
    assert steps_of(files) == {}
    assert list(steps_of(files, one_run=True)) == [0, 1]
    others = [Path("a/step_1.pt"), Path("b/step_2.pt")]
    assert runs_among(others) == [[path] for path in others]


@pytest.mark.slow
def test_a_pattern_a_list_and_folders_are_one_run(tmp_path: Path):
    folder = write_run(tmp_path / "folders", name="checkpoint-{}/pytorch_model.bin")
    torch.save({}, folder / "checkpoint-0" / "optimizer.pt")
    torch.save({}, folder / "optimizer.pt")
    said = {"columns": "x,y", "sign": "minus", "scale": 6**-0.5, "model": {"positions": "none"}}
    for path in (str(folder / "checkpoint-*"), list(folder.glob("checkpoint-*"))):
        run = load(path, **HINTS, **said)
        assert (run.steps, run.path) == (list(STEPS), folder)
    assert load(folder, **HINTS, **said).steps == list(STEPS)


def test_files_that_say_everything(tmp_path: Path):
    for step in STEPS:
        convert(true_run().at(step), "npz", tmp_path / f"step_{step}.npz")
    run = load(tmp_path)
    assert run.steps == list(STEPS)
    assert not run.assumed
    np.testing.assert_array_equal(run.snapshots[2000].W_Q, true_run().snapshots[2000].W_Q)


def test_what_is_no_run(tmp_path: Path):
    folder = write_run(tmp_path / "mine")
    torch.save(LAYOUTS["haiku"](true_run().weights), folder / "best.pt")
    files = [folder / "best.pt", folder / "step_0.pt"]
    assert_refused(r"differ in the step number only, got best.pt, step_0.pt", load, files)
    assert_refused("several files of weights", load, folder)
    assert_refused("must be a pattern that matches checkpoints", load, tmp_path / "none_*.pt")
    assert_refused("must be a pattern that matches checkpoints", load, [])
    wider = load(CHECKPOINTS / "softmax-h4-s0").weights
    (folder / "best.pt").unlink()
    torch.save(LAYOUTS["haiku"](wider), folder / "step_0.pt")
    assert_refused(r"step_0.pt: .* must have the shape .* of the last", load, folder)


@pytest.mark.slow
def test_analyses_and_formats_take_a_run(read_run: Checkpoint, tmp_path: Path):
    run = read_run
    patterns = over_steps(run, n_prompts=64)
    assert patterns.step.tolist() == list(STEPS)
    assert patterns.headlines[-1] == "debiased_gd"
    np.testing.assert_array_equal(
        patterns.eval_loss, run.history.drop_duplicates("step")["eval_loss"]
    )
    assert len(over_steps(run, "ablate", what="heads", n_prompts=64).to_frame()) == 3 * 2
    run.save_pretrained(tmp_path / "native")
    again = load(tmp_path / "native")
    assert again.steps == list(STEPS)
    assert again.history["eval_loss"].tolist() == run.history["eval_loss"].tolist()
    assert run.at(2000).step == 2000
    with pytest.raises(ValueError, match="step must be one of 0, 2000, 10000, got 7"):
        run.at(7)


@pytest.mark.slow
def test_classify_writes_steps_and_losses(folder: Path, read_run: Checkpoint, tmp_path: Path, run):
    table = tmp_path / "table.csv"
    done = run("classify", folder, *OPTIONS, "--n-prompts", "64", "--out", table, "--json")
    documents = json.loads(done.out)
    assert [each["step"] for each in documents] == list(STEPS)
    assert [Path(each["path"]).name for each in documents] == [f"step_{n}.pt" for n in STEPS]
    assert "3 files are one run, steps 0 to 10000" in done.err
    frame = pd.read_csv(table)
    losses = read_run.history.drop_duplicates("step")["eval_loss"]
    np.testing.assert_allclose(frame.sort_values("step")["loss"], losses, rtol=1e-6)
    assert frame.sort_values("step")["pattern"].iloc[-1] == "debiased_gd"
