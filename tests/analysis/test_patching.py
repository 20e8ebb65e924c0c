"""Patching by position: as many columns as positions, and the numbers that patching by hand gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformer_lens.utilities import get_act_name

from mechinterp.analysis.patching.activations import (
    HEAD_PARTS,
    LAYER_ACTIVATIONS,
    OF_MLPS,
    patch_activations,
)
from mechinterp.analysis.patching.pairing import clean_and_corrupted
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.constructions.one_layer import from_circuits
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictor_of
from tests import deep_models
from tests.conftest import refused

TASK = TaskConfig(d_x=3, d_y=2)


def random_prompts(length: int, step: int) -> Prompts:
    generator = generator_for(0, "eval", step)
    return draw_prompts(TASK, 8, generator=generator, context_length=length, dtype=torch.float64)


def random_model(**architecture: object) -> ICLTransformer:
    return deep_models.random_model(
        2, 3, sizes={"d_x": 3, "d_y": 2}, std=0.5, d_head=4, **architecture
    )


# d_model is 5: TransformerLens, left to itself, would patch the first five positions, or a sixth of five.
@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 11])
@pytest.mark.parametrize(
    "activation", [n for n in LAYER_ACTIVATIONS + HEAD_PARTS if n not in OF_MLPS]
)
def test_columns_are_positions_and_values_those_by_hand(activation: str, length: int):
    model, clean, corrupted = random_model(), random_prompts(length, 1), random_prompts(length, 2)
    before = corrupted.tokens.clone()
    found = patch_activations(
        model, clean, corrupted, activation=activation, metric=deep_models.first_response
    )
    heads = (3,) if activation in HEAD_PARTS else ()
    assert found.effect.shape == found.effect_sem.shape == (2, length + 1, *heads)
    _, cache = model.run_with_cache(clean.tokens)
    unpatched = model.predict(corrupted)[:, 0]
    for place in np.ndindex(found.effect.shape):
        layer, pos, *head = place
        index = (slice(None), *head, pos) if activation == "pattern" else (slice(None), pos, *head)
        name = get_act_name(activation, layer)

        def patch(values, hook, index=index, name=name):
            values = values.clone()
            values[index] = cache[name][index]
            return values

        with torch.no_grad():
            patched = model.run_with_hooks(corrupted.tokens, fwd_hooks=[(name, patch)])[:, -1, 0]
        change = (patched - unpatched).detach()
        assert found.effect[place] == pytest.approx(change.mean().item(), abs=1e-5)
        assert found.effect_sem[place] == pytest.approx(change.std().item() / 8**0.5, abs=1e-5)
    gained = (model.predict(clean) - model.predict(corrupted))[:, 0]
    assert found.total == pytest.approx(gained.mean().item())
    assert found.total_sem == pytest.approx(gained.std().item() / 8**0.5)
    assert np.abs(found.effect).max() > 1e-2
    assert torch.equal(corrupted.tokens, before)
    assert not [name for name, point in model.hook_dict.items() if point.fwd_hooks]


@pytest.mark.slow
def test_outputs_of_mlps_are_patched():
    """A position of the last MLP's output moves the prediction of its own token alone: only the query's counts."""
    model = random_model(norm="before", d_mlp=8)
    clean, corrupted = (random_prompts(4, step) for step in (1, 2))
    found = patch_activations(
        model, clean, corrupted, activation="mlp_out", metric=deep_models.first_response
    )
    assert not found.effect[1, :-1].any()
    with torch.no_grad():
        caches = [model.run_with_cache(each.tokens)[1] for each in (clean, corrupted)]
        moved = caches[0]["mlp_out", 1][:, -1] - caches[1]["mlp_out", 1][:, -1]
        change = (moved @ model.W_U)[:, 0].mean().item()
    assert found.effect[1, -1] == pytest.approx(change, abs=1e-12)
    with refused("mlp_out", "MLPs"):
        patch_activations(random_model(), activation="mlp_out")


def test_what_cannot_be_patched_is_refused():
    prompts = random_prompts(4, 1)
    with refused("activation", "resid_pre", "'mlp'"):
        patch_activations(random_model(), prompts, prompts, activation="mlp")
    with refused("same shape", "[8, 5, 5]", "[8, 6, 5]"):
        patch_activations(random_model(), prompts, random_prompts(5, 2))
    with refused("evaluation mode"):
        patch_activations(random_model().train(), prompts, random_prompts(4, 2))


def gradient_step(eta: float, d_x: int) -> ICLTransformer:
    """One head of linear attention: y_hat = (eta / L) sum_l y_l x_l . x_query."""
    QK = torch.diag(torch.tensor([1.0] * d_x + [0.0], dtype=torch.float64))[None]
    OV = torch.tensor([[0.0]] * d_x + [[eta]], dtype=torch.float64)[None]
    weights = from_circuits(QK, OV, score="linear/L")
    return ICLTransformer.from_weights(weights, task=TaskConfig(d_x=d_x, context_length=8))


@pytest.mark.parametrize("activation", ["resid_pre", "v"])
def test_by_default_pairs_differ_in_the_task_alone_and_effects_are_known(activation: str):
    model = gradient_step(0.5, 3)
    found = patch_activations(model, activation=activation, n_prompts=40, seed=7)
    clean, corrupted = clean_and_corrupted(model, None, None, n_prompts=40, seed=7)
    noise = [each.y - each.x @ each.beta for each in (clean, corrupted)]
    assert torch.equal(clean.x, corrupted.x)
    assert torch.equal(clean.x_query, corrupted.x_query)
    assert torch.allclose(*noise, atol=1e-12)
    assert torch.equal(corrupted.beta, evaluation_prompts(model, n_prompts=40, seed=8).beta)
    # What a pair adds to the prediction, clean minus corrupted; patching it brings the prediction nearer by that.
    similarity = torch.einsum("blx,bx->bl", clean.x, clean.x_query)
    delta = 0.5 / 8 * similarity * (clean.y - corrupted.y)[..., 0]
    gap = delta.sum(1, keepdim=True)
    expected = (gap.square() - (gap - delta).square()).mean(0)
    effect = found.effect[0, :, 0] if activation == "v" else found.effect[0]
    np.testing.assert_allclose(effect[:-1], expected, rtol=1e-9)
    assert abs(effect[-1]) < 1e-12  # the query is the same on both
    assert found.total == pytest.approx(gap.square().mean().item(), rel=1e-9)


def test_given_prompts_are_corrupted_by_other_task_vectors_of_the_model():
    model = gradient_step(0.5, 3)
    clean = evaluation_prompts(model, n_prompts=10, seed=3, context_length=5)
    found = patch_activations(model, clean, seed=3)
    assert found.effect.shape == (1, 6)
    again = patch_activations(model, *clean_and_corrupted(model, clean, None, n_prompts=1, seed=3))
    np.testing.assert_array_equal(found.effect, again.effect)


def test_given_prompts_without_task_vectors_are_corrupted_by_another_order_of_y():
    model = gradient_step(0.5, 3)
    drawn = evaluation_prompts(model, n_prompts=10, seed=3, context_length=5)
    clean = replace(drawn, beta=None)
    _, corrupted = clean_and_corrupted(model, clean, None, n_prompts=1, seed=3)
    assert torch.equal(corrupted.x, clean.x)
    assert torch.equal(corrupted.y_query, clean.y_query)
    assert torch.equal(corrupted.y.sort(1).values, clean.y.sort(1).values)
    assert not torch.equal(corrupted.y, clean.y)
    found = patch_activations(model, clean, seed=3)
    gap = predictor_of(model).predict(clean) - predictor_of(model).predict(corrupted)
    assert found.total == pytest.approx(gap.square().mean().item(), rel=1e-9)
    assert found.total > 0
