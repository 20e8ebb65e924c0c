"""Steps of the fitted algorithm in place of what layers add: models built by hand follow them."""

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from transformer_lens.tools.analysis.interchange import (
    NormMatchedPlacebo,
    SubspaceInterchange,
    collect_activations,
    intervened_logits,
    random_basis,
)

from mechinterp.analysis.multi_layer.step_interventions import StepInterventions, intervene_on_steps
from mechinterp.config import ExperimentConfig, ModelConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.descent import rotated
from mechinterp.models.run.predictor import predictor_of
from mechinterp.training.general.trainer import initial_deep_weights
from tests.analysis.test_algorithm import DENSE, FALLING, LABELS, SPARSE
from tests.conftest import sampled


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
@pytest.mark.parametrize(
    "label",
    sampled(
        ["gd_plus_plus", "preprocess_then_optimise", "preconditioned_descent"],
        keep=lambda label: label == "gd_plus_plus",
    ),
)
def test_what_else_an_algorithm_holds_is_put_in_too(label: str):
    weights, task = LABELS[label]
    found = intervene_on_steps(rotated(weights, seed=0), task=task, n_prompts=128)
    assert found.algorithm == label
    np.testing.assert_allclose(found.replaced_r2, 1, rtol=0, atol=1e-6)
    known = ~np.isnan(found.exchanged_r2)
    np.testing.assert_allclose(found.exchanged_r2[known], 1, rtol=0, atol=1e-6)
    assert found.control_r2[-1] < 0.5


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_what_is_held_is_exchanged_by_the_interchange_of_transformer_lens_too(layer: int):
    """Of the prediction so far, in the direction that is read out; a random direction of the same length is none."""
    weights = rotated(FALLING, seed=0)
    hooked = predictor_of(weights).hooked
    prompts = sample_prompts(DENSE, 64, seed=3, dtype=torch.float64)
    moments = PromptMoments(prompts, DENSE)
    descent = next(one for one in ALGORITHMS if one.label == "gradient_descent")
    path = descent.predictions(moments, [0.7, 0.5, 0.3, 0.2], 4)
    expected = path[-1] - path[layer - 1] + path[layer - 1].roll(1, 0)

    read_out = weights.reading[1]
    own = SubspaceInterchange(read_out / read_out.norm())
    other = NormMatchedPlacebo(own, random_basis(weights.d_model, 1, seed=0).double())
    inputs, name = hooked.inputs(prompts), hooked.stream_name(layer)
    last = torch.full((64,), inputs.shape[1] - 1)
    at = {"task_logits": lambda given: hooked.model(given)[:, -1], "positions": last}
    streams = collect_activations(hooked.model, name, inputs, **at).roll(1, 0)
    found = {
        how: intervened_logits(hooked.model, name, how, inputs, streams, **at)
        for how in (own, other)
    }
    torch.testing.assert_close(found[own], expected, rtol=0, atol=1e-10)
    assert (found[other] - expected).square().mean() > 0.5 * (path[-1] - expected).square().mean()


@pytest.mark.slow
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
    weights = initial_deep_weights(config)
    # 16 to 1, 16 and 16 numbers, fitted to half of the prompts; two prompts per number.
    with pytest.raises(ValueError, match=r"^n_prompts must be >= 132, .*66 numbers.*, got 131\.$"):
        intervene_on_steps(weights, task=SPARSE, n_prompts=131)
    with pytest.raises(ValueError, match=r"near to an algorithm with a path, got unstructured\.$"):
        intervene_on_steps(weights, task=SPARSE, n_prompts=132)
