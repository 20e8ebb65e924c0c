"""The analyses of heads on a model built by hand, whose every answer is known in closed form.

`preprocess_then_optimise_model` with d_x 16: three steps of size 0.5 in layers of one head and 15 zero heads. With steps
of 0.8 descent is unstable on 0.4% of the prompts, and their errors drown what a head is worth.
"""

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.ablation.pruning_rules import best_head_first
from mechinterp.analysis.probing.p_probe import descent_curves
from mechinterp.analysis.probing.probe import probe
from mechinterp.analysis.probing.target_functions import reweighted
from mechinterp.analysis.stats import halves
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import descend, excess_risk, preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of

pytestmark = pytest.mark.slow

D_X, ETA, STEPS = 16, 0.5, 3
SLOT = slice(D_X + 1, 2 * D_X + 1)
TASK = TaskConfig(d_x=D_X, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4)


@pytest.fixture(scope="module")
def model():
    weights = preprocess_then_optimise_model([ETA] * STEPS, d_x=D_X)
    return ICLTransformer.from_weights(weights, task=TASK)


@pytest.fixture(scope="module")
def prompts():
    generator = generator_for(0, "eval", 0)
    return draw_prompts(TASK, 2000, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def few(prompts):
    return prompts[:128]


@pytest.fixture(scope="module")
def ablation(model, few):
    return ablate(model, few, what="heads")


def closed_form(prompts, coordinates=range(D_X)):
    """Excess risk after each step of Algorithm 1 with fixed steps, on these reweighted coordinates alone."""
    phi = reweighted(prompts)[0][..., list(coordinates), None]
    path = descend(phi[:, :-1], prompts.y, phi[:, -1], steps=STEPS, eta=ETA)
    return excess_risk(path, prompts)


def others(coordinate):
    return [j for j in range(D_X) if j != coordinate]


def test_the_full_model_is_algorithm_1_with_fixed_steps(model, few, ablation):
    path = preprocess_then_optimise(few, steps=STEPS, eta=ETA)
    torch.testing.assert_close(model.predict(few), path[STEPS], rtol=0, atol=1e-12)
    risk = excess_risk(path[STEPS], few).mean().item()
    assert ablation.full_risk == pytest.approx(risk, rel=1e-12)


def test_masking_finds_the_heads_that_are_there(ablation, few):
    assert not ablation.rise[1:, 1:].any()
    assert ablation.importance[1:].max(1).tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_allclose(ablation.effective_heads[1:], 1, rtol=1e-12)
    # Without one of three equal steps there are two, whichever is left out.
    path = closed_form(few).mean(1)
    np.testing.assert_allclose(ablation.rise[1:, 0], path[2] - path[3], rtol=1e-10)
    assert path[2] > path[3]


def test_a_head_of_the_first_layer_is_a_coordinate(ablation, few):
    full = closed_form(few)[STEPS].mean()
    for head in range(D_X):
        rise = closed_form(few, others(head))[STEPS].mean() - full
        assert ablation.rise[0, head] == pytest.approx(rise.item(), rel=1e-8, abs=1e-12)


def test_pruning_the_first_layer_ruins_the_model(model, few):
    found = prune(model, few, rule=best_head_first)
    assert found.kept.sum(1).tolist() == [1, 16, 16, 16]
    full = closed_form(few, range(16))[STEPS].numpy()
    alone = [closed_form(few, [head])[STEPS].numpy() for head in range(16)]
    without = [closed_form(few, others(head))[STEPS].numpy() for head in range(16)]
    chosen_on, measured = halves(np.arange(len(few)))
    best = np.argmax([(one - full)[chosen_on].mean() for one in without])
    assert found.kept[0].tolist() == [head == best for head in range(16)]
    assert found.risk == pytest.approx(alone[best][measured].mean(), rel=1e-9)
    # Where all 16 coordinates leave half of the signal, one leaves nearly all.
    assert found.ratio - 2 * found.ratio_sem > 1.3


def test_descent_on_the_features_is_algorithm_1(model, few):
    found = predictor_of(model).query_streams(few, 1)
    torch.testing.assert_close(found[..., SLOT], reweighted(few)[0], rtol=0, atol=1e-12)
    curves = descent_curves({"slot": found[..., SLOT]}, few, steps=16)
    expected = excess_risk(preprocess_then_optimise(few, steps=16), few).mean(1)
    np.testing.assert_allclose(curves.risk[0], expected, rtol=0, atol=1e-12)


def test_probes_see_the_structure_from_the_first_layer_on(model, prompts):
    found = probe(model, prompts, targets="reweighted x").probes["reweighted x"]
    assert abs(found.r2[0, 0]) < 0.05
    assert found.r2[1:, 0] == pytest.approx(1, abs=1e-6)
    assert abs(found.control_r2).max() < 0.05
