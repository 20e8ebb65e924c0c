"""Steps of the fitted algorithm in place of what layers add: models built by hand follow them."""

import numpy as np
import plotly.graph_objects as go
import pytest

from mechinterp.analysis.learners.algorithm_steps import StepInterventions, intervene_on_steps
from mechinterp.config import ExperimentConfig, ModelConfig
from mechinterp.models.constructions_algorithms import rotated
from mechinterp.training.deep import initial_deep_weights
from tests.analysis.test_algorithm import DENSE, FALLING, LABELS, SPARSE


@pytest.fixture(scope="module")
def descent() -> StepInterventions:
    return intervene_on_steps(rotated(FALLING, seed=0), task=DENSE, n_prompts=128)


@pytest.mark.slow
def test_an_exact_model_follows_its_algorithm(descent: StepInterventions):
    assert descent.algorithm == "gradient_descent"
    assert descent.layers == ("0", "1", "2", "3", "all layers")
    np.testing.assert_allclose(descent.replaced_r2, 1, rtol=0, atol=1e-8)
    np.testing.assert_allclose(descent.exchanged_r2, 1, rtol=0, atol=1e-8)
    # With every step that of another prompt, the prediction is that prompt's.
    assert descent.control_r2[-1] < 0
    assert (descent.control_r2 < descent.replaced_r2 - 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("label", ["gd_plus_plus", "preprocess_then_optimise", "preconditioned_gd"])
def test_what_else_an_algorithm_holds_is_put_in_too(label: str):
    weights, task = LABELS[label]
    found = intervene_on_steps(rotated(weights, seed=0), task=task, n_prompts=128)
    assert found.algorithm == label
    np.testing.assert_allclose(found.replaced_r2, 1, rtol=0, atol=1e-6)
    known = ~np.isnan(found.exchanged_r2)
    np.testing.assert_allclose(found.exchanged_r2[known], 1, rtol=0, atol=1e-6)
    assert found.control_r2[-1] < 0.5


def test_table_and_picture(descent: StepInterventions):
    frame = descent.to_frame()
    assert frame["layer"].tolist() == list(descent.layers)
    assert frame["exchanged_r2"].isna().tolist() == [False] * 4 + [True]
    assert isinstance(descent.plot(), go.Figure)
    assert repr(descent).startswith(
        "StepInterventions(steps of gradient_descent in place of all layers: R² 1.000 ± "
    )


def test_refusals():
    config = ExperimentConfig(
        task=SPARSE,
        model=ModelConfig(n_layers=2, n_heads=2, score="linear/L", context_only=True, d_model=32),
    )
    with pytest.raises(ValueError, match=r"near to an algorithm with a path, got unstructured\."):
        intervene_on_steps(initial_deep_weights(config), task=SPARSE, n_prompts=16)
