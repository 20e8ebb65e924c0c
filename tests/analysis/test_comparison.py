"""Tables of several models: settings by what their seeds share, and sweeps with what was asked for and what came of it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp import sample_prompts
from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.comparison import MAX_POINTS, Comparison, compare, model_row, models_frame
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.native.folder import HISTORY_COLUMNS
from mechinterp.checkpoints.native.tables import write_own_table
from mechinterp.config import ExperimentConfig, TaskConfig, override, value_of
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import stack
from mechinterp.report.to_csv import classification_frame
from tests.conftest import CHECKPOINTS, refused

NAMES = ("softmax-h2-s0", "softmax-h2-s1", "softmax-h2-s8", "softmax-h1-s0", "softmax-h8-s1")


@pytest.fixture(scope="module")
def models() -> list[Checkpoint]:
    return [load(CHECKPOINTS / name) for name in NAMES]


@pytest.fixture(scope="module")
def found(models: list[Checkpoint]) -> Comparison:
    return compare(models, n_prompts=256)


@pytest.mark.slow
def test_settings_share_a_name_and_have_a_row_for_each_pattern(found: Comparison):
    settings = [*["softmax-h2"] * 3, "softmax-h1-s0", "softmax-h8-s1"]
    assert found.models["setting"].tolist() == settings
    assert found.models["seed"].tolist() == [0, 1, 8, 0, 1]
    assert found.fields.to_dict("list") == {
        "setting": ["softmax-h2", "softmax-h1-s0", "softmax-h8-s1"],
        "model.n_heads": ["2", "1", "8"],
    }
    rows = found.settings_frame()
    assert rows[["setting", "pattern", "models", "of"]].values.tolist() == [
        ["softmax-h2", "debiased_gd", 2, 3],
        ["softmax-h2", "kernel_regression", 1, 3],
        ["softmax-h1-s0", "kernel_regression", 1, 1],
        ["softmax-h8-s1", "undetermined", 1, 1],
    ]
    pair = found.to_frame()["loss"][:2].to_numpy()
    assert rows["loss"][0] == pytest.approx(pair.mean())
    assert rows["loss_sem"][0] == pytest.approx(abs(pair[0] - pair[1]) / 2)
    assert rows["loss_sem"][1:].isna().all()


@pytest.mark.slow
def test_losses_are_on_prompts_that_models_share(found: Comparison, models: list[Checkpoint]):
    prompts = sample_prompts(models[0].task, 1280)
    errors = [(m.predictor.predict(prompts) - prompts.y_query).square().mean(1) for m in models]
    squares = torch.stack(errors).double().numpy()
    np.testing.assert_allclose(found.models["loss"], squares.mean(1), rtol=1e-6)
    sems = squares.std(1, ddof=1) / 1280**0.5
    np.testing.assert_allclose(found.models["loss_sem"], sems, rtol=1e-5)


@pytest.mark.slow
def test_scales_leave_dummies_out_and_do_not_count_heads(
    found: Comparison, models: list[Checkpoint]
):
    frame = found.to_frame()
    for row, model in enumerate(models):
        scales = circuits(model)
        active = np.array(classify(model, n_prompts=256).labels) != "dummy"
        assert frame["omega_abs"][row] == pytest.approx(np.abs(scales.omega_mean[0][active]).mean())
    # 3.44 for each sign, in two heads or in eight.
    assert frame["mu_abs"][[0, 4]].tolist() == pytest.approx([6.85, 6.85], abs=0.05)


@pytest.mark.slow
def test_figures_have_one_entry_of_the_legend_for_each_setting(found: Comparison):
    for figure in (found.plot(), found.plot_curves()):
        shown = [trace.name for trace in figure.data if trace.showlegend]
        assert shown == ["softmax-h2", "softmax-h1-s0", "softmax-h8-s1"]
        assert len({trace.line.color for trace in figure.data}) == 3
    curve = found.plot_curves().data[0]
    history = load(CHECKPOINTS / NAMES[0]).history.drop_duplicates("step")
    assert len(curve.x) <= MAX_POINTS < len(history)
    assert (curve.x[-1], curve.y[-1]) == (500_001, history["eval_loss"].iloc[-1])


def test_names_that_share_nothing_are_numbered(tmp_path: Path):
    paths = [tmp_path / name for name in ("one", "two")]
    for path, seed in zip(paths, (0, 1), strict=True):
        shutil.copytree(CHECKPOINTS / f"softmax-h1-s{seed}", path)
    found = compare([load(path) for path in paths], n_prompts=64)
    assert found.models["setting"].tolist() == ["setting 1"] * 2
    with refused("checkpoint"):
        compare([])


def test_a_name_is_not_markup_in_a_figure(tmp_path: Path):
    shutil.copytree(CHECKPOINTS / "softmax-h1-s0", tmp_path / "<a>%{x}")
    trace = compare([load(tmp_path / "<a>%{x}")], n_prompts=64).plot().data[0]
    assert trace.name == "&lt;a&gt;&#37;{x}"
    assert trace.hovertemplate.startswith("&lt;a&gt;&#37;{x} (0)<br>")


BASE = ExperimentConfig(task=TaskConfig(noise_var=0.2))
MODELS = {
    "step": override(BASE, "model.n_heads=3", "seed=4", "train.snapshot_every=10"),
    "lost": override(BASE, "train.learning_rate=1"),
    "kernel": override(
        BASE, "model.n_heads=1", "model.d_head=6", "task.supports=[[0, 1, 2, 3, 4]]"
    ),
}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Three heads of which two make a step of size 0.88, and a kernel head, with the history of the first."""
    step = stack([debiased_gradient_step(0.88, 0.02, d_x=5), zero_head(d_x=5)])
    columns = {"step": [0, 7], "head": [0, 0]} | {name: [0.0, 0.0] for name in HISTORY_COLUMNS}
    losses = {"loss": [float("nan"), 0.25], "eval_loss": [1.0, 0.5]}
    history = pd.DataFrame(columns | losses)
    save(tmp_path / "step", MODELS["step"], step, step=7, history=history)
    save(tmp_path / "kernel", MODELS["kernel"], kernel_head(omega=0.5, mu=1.5, d_x=5), step=9)
    return tmp_path


@pytest.mark.slow
def test_a_row_holds_the_config_and_what_was_found(run_folder: Path):
    frame = models_frame(MODELS, run_folder, diverged={"lost": 100})
    assert frame["name"].tolist() == list(MODELS)
    assert frame["id"].tolist() == [config.id for config in MODELS.values()]
    for field in ("seed", "task.noise_var", "task.covariance.kind", "train.learning_rate"):
        assert frame[field].tolist() == [value_of(config, field) for config in MODELS.values()]
    assert frame["steps"].tolist() == [7, 100, 9]
    assert frame["diverged"].tolist() == [False, True, False]
    assert frame["pattern"].fillna("none").tolist() == ["debiased_gd", "none", "kernel_regression"]
    assert frame["loss"].tolist()[0] == 0.25
    assert frame["eval_loss"].tolist()[0] == 0.5
    assert frame[["loss", "eval_loss"]].isna().all(axis=1).tolist() == [False, True, True]
    assert frame["labels"].tolist() == [["positive", "negative", "dummy"], None, ["positive"]]
    # mu omega of both heads adds up to eta = 0.88, with |omega| = 0.02.
    assert frame["omega"][0] == pytest.approx([0.02, -0.02, 0], rel=1e-6)
    assert frame["mu"][0] == pytest.approx([22, -22, 0], rel=1e-6)
    assert (frame["omega"][2], frame["mu"][2]) == (pytest.approx([0.5]), pytest.approx([1.5]))


def test_every_table_of_models_has_the_same_row():
    """`compare` and `classify --out` take their columns from it, models_frame too; evidence that is no single number is None."""
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    found = classify(checkpoint, n_prompts=64)
    row = model_row(checkpoint, found)
    assert row["eta"] == found.scales.eta.item()
    assert (row["zero_sum"], row["pattern"]) == (found.scales.zero_sum, found.label)
    assert (row["p_values"], row["loss"]) == (None, None)
    assert row["mu"] == found.circuits.mu[0, :, 0].tolist()
    compared = compare([checkpoint], n_prompts=64).to_frame().iloc[0]
    for name in ("pattern", "eta", "mu_abs", "omega_abs"):
        assert compared[name] == row[name]
    table = classification_frame([row]).iloc[0]
    for name in ("path", "reason", "n_heads", "labels", "learner_r2", "eta"):
        assert table[name] == row[name]
    assert "p_values" not in table


@pytest.mark.slow
def test_the_table_is_the_same_after_a_trip_through_its_file(run_folder: Path):
    frame = models_frame(MODELS, run_folder, diverged={"lost": None})
    file = run_folder / "results.parquet"
    write_own_table(file, frame)
    stored = pd.read_parquet(file)
    assert stored.columns.tolist() == frame.columns.tolist()
    assert stored["steps"].isna().tolist() == [False, True, False]
    assert str(stored["train.snapshot_every"].dtype) == "Int64"
    assert stored["train.snapshot_every"].dropna().tolist() == [10]
    assert stored["model.d_head"].dropna().tolist() == [6]
    assert [None if mu is None else mu.tolist() for mu in stored["mu"]] == frame["mu"].tolist()
    # One that is there is replaced: it is made anew whenever the run goes on.
    again = models_frame({"step": MODELS["step"]}, run_folder)
    write_own_table(file, again)
    assert len(pd.read_parquet(file)) == 1


@pytest.mark.slow
def test_a_model_that_is_missing_or_cannot_be_written_is_named(run_folder: Path):
    with refused("/lost", error=CheckpointError):
        models_frame(MODELS, run_folder)
    frame = models_frame({"step": replace(MODELS["step"])}, run_folder)
    with refused("results.parquet", error=CheckpointError):
        write_own_table(run_folder / "step" / "config.json" / "results.parquet", frame)
