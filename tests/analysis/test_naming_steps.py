"""Steps of the fitted algorithm in place of what layers add: models built by hand follow them."""

import numpy as np
import pytest
import torch
from transformer_lens.tools.analysis.interchange import (
    NormMatchedPlacebo,
    SubspaceInterchange,
    collect_activations,
    intervened_logits,
    random_basis,
)

from mechinterp.analysis.multi_layer.naming import Naming, name_algorithm
from mechinterp.analysis.multi_layer.naming_scores import step_effects
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.descent import rotated
from mechinterp.models.run.predictor import predictor_of
from tests.analysis.test_naming import DENSE, FALLING, LABELS
from tests.conftest import sampled


@pytest.fixture(scope="module")
def descent() -> Naming:
    return name_algorithm(rotated(FALLING, seed=0), task=DENSE, n_prompts=128)


@pytest.mark.slow
def test_an_exact_model_follows_its_algorithm(descent: Naming):
    assert descent.followed == "gradient_descent"
    np.testing.assert_allclose(descent.steps.steps_r2, 1, rtol=0, atol=1e-8)
    np.testing.assert_allclose(descent.steps.exchanged_r2, 1, rtol=0, atol=1e-8)


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
    found = name_algorithm(rotated(weights, seed=0), task=task)
    assert found.followed == found.label == label
    np.testing.assert_allclose(found.steps.steps_r2, 1, rtol=0, atol=1e-6)
    exchanged = found.steps.exchanged_r2
    # Algorithm 1 has predicted nothing after its first layer.
    assert np.isnan(exchanged).tolist() == [
        label == "preprocess_then_optimise",
        *[False] * (len(exchanged) - 1),
    ]
    np.testing.assert_allclose(exchanged[~np.isnan(exchanged)], 1, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_model_that_takes_other_steps_does_not_follow():
    """The stream moves on by the steps of another step size than those that are put in."""
    weights, task = LABELS["gradient_descent"]
    predictor, prompts = predictor_of(weights), sample_prompts(task, 128, dtype=torch.float64)
    newton = next(one for one in ALGORITHMS if one.label == "newton")
    found = step_effects(predictor, newton, np.array([0.1]), prompts, task)
    assert found.steps_r2.min() < 0.95


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


def test_too_few_prompts_for_the_images_are_not_enough():
    weights, task = LABELS["gradient_descent"]
    descent = next(one for one in ALGORITHMS if one.label == "gradient_descent")
    # Images of the prediction and 8 entries of x, fitted to half of the prompts, two for each.
    for n, known in ((35, False), (36, True)):
        prompts = sample_prompts(task, n, dtype=torch.float64)
        scalars = np.array([0.7, 0.5, 0.3, 0.2])
        found = step_effects(predictor_of(weights), descent, scalars, prompts, task)
        assert (found is not None) == known
