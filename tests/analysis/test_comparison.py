"""Models that differ in nothing but seeds are one setting, whatever they are called."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from analyses.lib.shared_losses import shared_losses
from mechinterp.analysis.comparison import MAX_POINTS, Comparison, compare
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from tests.conftest import CHECKPOINTS

NAMES = ("softmax-h2-s0", "softmax-h2-s1", "softmax-h2-s8", "softmax-h1-s0", "softmax-h8-s1")


@pytest.fixture(scope="module")
def models() -> list[Checkpoint]:
    return [load(CHECKPOINTS / name) for name in NAMES]


@pytest.fixture(scope="module")
def found(models: list[Checkpoint]) -> Comparison:
    return compare(models, n_prompts=256)


@pytest.mark.slow
def test_settings_are_named_by_what_their_models_share(found: Comparison):
    settings = [*["softmax-h2"] * 3, "softmax-h1-s0", "softmax-h8-s1"]
    assert found.models["setting"].tolist() == settings
    assert found.models["seed"].tolist() == [0, 1, 8, 0, 1]
    assert found.fields.to_dict("list") == {
        "setting": ["softmax-h2", "softmax-h1-s0", "softmax-h8-s1"],
        "model.n_heads": ["2", "1", "8"],
    }


@pytest.mark.slow
def test_a_row_of_a_setting_holds_the_models_of_one_pattern(found: Comparison):
    models, settings = found.to_frame(), found.settings_frame()
    rows = settings[["setting", "pattern", "models", "of"]].values.tolist()
    assert rows == [
        ["softmax-h2", "debiased_gd", 2, 3],
        ["softmax-h2", "kernel_regression", 1, 3],
        ["softmax-h1-s0", "kernel_regression", 1, 1],
        ["softmax-h8-s1", "undetermined", 1, 1],
    ]
    pair = models["loss"][:2].to_numpy()
    assert settings["loss"][0] == pytest.approx(pair.mean())
    assert settings["loss_sem"][0] == pytest.approx(abs(pair[0] - pair[1]) / 2)
    assert settings["loss_sem"][1:].isna().all()


@pytest.mark.slow
def test_losses_are_on_prompts_that_models_share(found: Comparison, models: list[Checkpoint]):
    expected = shared_losses(
        dict(zip(NAMES, models, strict=True)), models[0].config.task, n_prompts=1280
    )
    np.testing.assert_allclose(found.models["loss"], expected.loss[0])
    np.testing.assert_allclose(found.models["loss_sem"], expected.loss_sem[0])


@pytest.mark.slow
def test_scales_leave_dummies_out_and_do_not_count_heads(
    found: Comparison, models: list[Checkpoint]
):
    frame = found.to_frame()
    for row, model in enumerate(models):
        scales = circuits(model)
        active = np.array(classify(model, n_prompts=256).labels) != "dummy"
        assert frame["omega_abs"][row] == pytest.approx(np.abs(scales.omega_mean[active]).mean())
    # 3.44 for each sign, in two heads or in eight.
    assert frame["mu_abs"][[0, 4]].tolist() == pytest.approx([6.85, 6.85], abs=0.05)


def test_figures_have_one_entry_of_the_legend_for_each_setting(found: Comparison):
    for figure in (found.plot(), found.plot_curves()):
        assert len(figure.data) == 5
        shown = [trace.name for trace in figure.data if trace.showlegend]
        assert shown == ["softmax-h2", "softmax-h1-s0", "softmax-h8-s1"]
        colors = [trace.line.color for trace in figure.data]
        assert len(set(colors)) == 3
        assert colors[0] == colors[1] == colors[2]
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


def test_a_name_is_not_markup_in_a_figure(tmp_path: Path):
    shutil.copytree(CHECKPOINTS / "softmax-h1-s0", tmp_path / "<a>%{x}")
    trace = compare([load(tmp_path / "<a>%{x}")], n_prompts=64).plot().data[0]
    assert trace.name == "&lt;a&gt;&#37;{x}"
    assert trace.hovertemplate.startswith("&lt;a&gt;&#37;{x} (0)<br>")


def test_nothing_cannot_be_compared():
    with pytest.raises(ValueError, match="at least one checkpoint, got none"):
        compare([])
