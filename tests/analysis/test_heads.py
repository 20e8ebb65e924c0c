"""Masking: hooks against zeroed weights, subsets against brute force, Shapley values against permutations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.single import ablate, ablate_heads
from mechinterp.analysis.ablation.subsets import ablate_subsets
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step, diagonal_heads
from mechinterp.models.heads import head_outputs, predict, stack
from mechinterp.models.hooked.masks import METHODS, mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.deep_models import random_model


@pytest.fixture
def weights():
    """Three heads that all do something, and a zero head."""
    return diagonal_heads([0.13, -0.13, 0.4, 0.0], [3.4, -2.9, 0.3, 0.0], d_x=5)


@pytest.fixture
def model(weights):
    return ICLTransformer.from_weights(weights, task=TaskConfig())


def without(weights, *heads):
    """The weights with W_O of some heads zeroed."""
    w_o = weights.W_O.clone()
    w_o[list(heads)] = 0
    return replace(weights, W_O=w_o)


def squares(prediction, prompts):
    return (prediction - prompts.y_query_clean).square().mean(1)


def test_zero_ablation_is_zeroing_the_output_weights(model, weights, prompts):
    found = ablate_heads(model, prompts)
    full = squares(predict(weights, prompts), prompts)
    assert found.full_risk == pytest.approx(full.mean().item(), rel=1e-12)
    for head in range(4):
        rise = squares(predict(without(weights, head), prompts), prompts) - full
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-12)
        assert found.rise_sem[0, head] == pytest.approx(
            rise.std().item() / 16, rel=1e-10, abs=1e-12
        )
    assert found.rise[0, 3] == 0


def test_mean_ablation_replaces_a_head_by_its_mean_output(model, weights, prompts):
    found = ablate_heads(model, prompts, method="mean")
    outputs = head_outputs(weights, prompts)
    full = squares(outputs.sum(1), prompts)
    for head in range(4):
        replaced = outputs.sum(1) - outputs[:, head] + outputs[:, head].mean(0)
        rise = squares(replaced, prompts) - full
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-12)


def test_masking_leaves_nothing_on_the_model(model, prompts):
    before = model.predict(prompts)
    ablate_heads(model, prompts, method="mean")
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(0, 0), (0, 2)])):
        assert not torch.equal(model.predict(prompts), before)
    assert torch.equal(model.predict(prompts), before)


def test_masks_of_several_heads_add_up(model, weights, prompts):
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(0, 0), (0, 2)])):
        masked = model.predict(prompts)
    torch.testing.assert_close(
        masked, predict(without(weights, 0, 2), prompts), rtol=1e-12, atol=1e-12
    )


def test_masking_one_head_of_a_pair_lets_the_mean_response_in(prompts):
    # With omega -> 0 one head alone predicts mu times the mean response, which the pair had cancelled.
    pair = debiased_gradient_step(0.88, 1e-3, d_x=5)
    model = ICLTransformer.from_weights(pair, task=TaskConfig())
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(0, 1)])):
        alone = model.predict(prompts)
    expected = 440 * prompts.y.mean(1) + predict(pair, prompts) / 2
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-2)
    assert ablate_heads(model, prompts).rise.min() > 1000


def test_subsets_equal_brute_force_and_shapley_values_equal_permutations(weights, prompts):
    found = ablate_subsets(weights, prompts)
    outputs = head_outputs(weights, prompts)

    def risk(heads):
        total = sum((outputs[:, h] for h in heads), torch.zeros_like(outputs[:, 0]))
        return squares(total, prompts)

    full = risk(range(4))
    assert found.kept.shape == (16, 4)
    assert len({tuple(row) for row in found.kept}) == 16
    for row, kept in enumerate(found.kept):
        one = risk(np.flatnonzero(kept))
        assert found.risk[row] == pytest.approx(one.mean().item(), rel=1e-10)
        assert found.risk_sem[row] == pytest.approx(one.std().item() / 16, rel=1e-10)
        rise = one - full
        assert found.rise[row] == pytest.approx(rise.mean().item(), rel=1e-9, abs=1e-12)
        assert found.rise_sem[row] == pytest.approx(rise.std().item() / 16, rel=1e-9, abs=1e-12)
    gains = torch.zeros(4, len(prompts), dtype=torch.float64)
    for order in itertools.permutations(range(4)):
        for place, head in enumerate(order):
            gains[head] += risk(order[:place]) - risk(order[: place + 1])
    gains /= 24
    np.testing.assert_allclose(found.shapley, gains.mean(1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.shapley_sem, gains.std(1) / 16, rtol=1e-9, atol=1e-12)
    assert found.shapley.sum() == pytest.approx(found.risk[0] - found.risk[-1], rel=1e-10)


def test_single_masks_by_hooks_and_by_subsets_agree(model, weights, prompts):
    by_hooks = ablate_heads(model, prompts)
    subsets = ablate_subsets(weights, prompts).to_frame().set_index("kept")
    assert by_hooks.rise[0, 0] == pytest.approx(subsets.loc["H1 H2 H3", "rise"], rel=1e-10)
    assert by_hooks.rise_sem[0, 1] == pytest.approx(subsets.loc["H0 H2 H3", "rise_sem"], rel=1e-10)


def test_two_responses(prompts):
    task = TaskConfig(d_y=2)
    two = sample_prompts(task, 64, generator=generator_for(0, "eval", 1), dtype=torch.float64)
    pair = debiased_gradient_step(0.88, 0.1, d_x=5, d_y=2)
    by_hooks = ablate_heads(ICLTransformer.from_weights(pair, task=task), two)
    subsets = ablate_subsets(pair, two)
    assert by_hooks.full_risk == pytest.approx(subsets.risk[-1], rel=1e-10)
    assert by_hooks.rise[0, 0] == pytest.approx(subsets.rise[2], rel=1e-10)


def test_an_unknown_method_is_refused(model, prompts):
    with pytest.raises(ValueError, match="one of zero, mean, resample, got 'median'"):
        ablate_heads(model, prompts, method="median")


def test_too_many_heads_for_all_subsets(prompts):
    with pytest.raises(ValueError, match="n_heads must be <= 12 for all subsets, got 13"):
        ablate_subsets(stack([diagonal_heads([0.1] * 13, [1.0] * 13, d_x=5)]), prompts)


def test_frames_and_repr(model, weights, prompts):
    found = ablate_heads(model, prompts)
    columns = [
        "method",
        "layer",
        "head",
        "rise",
        "rise_sem",
        "median_rise",
        "carried_by_few",
        "importance",
    ]
    assert list(found.to_frame().columns) == columns
    assert repr(found).startswith("HeadAblation(zero: L0H")
    assert len(found.plot().data) == 1
    subsets = ablate_subsets(weights, prompts)
    assert subsets.to_frame()["kept"].iloc[[0, 1, -1]].tolist() == ["none", "H0", "H0 H1 H2 H3"]
    assert subsets.shapley_frame()["shapley"].tolist() == subsets.shapley.tolist()
    assert repr(subsets).startswith("SubsetAblation(zero: risk ")


@pytest.mark.slow
def test_layers_of_a_deep_model(few):
    deep = random_model()
    found = ablate_heads(deep, few)
    full = squares(deep.predict(few), few)
    for layer, head in np.ndindex(3, 4):
        with torch.no_grad(), deep.hooks(fwd_hooks=mask_heads([(layer, head)])):
            rise = (squares(deep.predict(few), few) - full).detach()
        assert found.rise[layer, head] == pytest.approx(rise.mean().item(), rel=1e-9)
        assert found.rise_sem[layer, head] == pytest.approx(rise.std().item() / 30**0.5, rel=1e-9)
    assert len(found.plot().data) == len(found.plot_importance().data) == 1
    assert found.plot().data[0].z.shape == (3, 4)


def test_importance_and_effective_heads(few):
    rises = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 1.0, -5.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    found = replace(ablate_heads(random_model(), few), rise=rises)
    # exp(-3/4 log 3/4 - 1/4 log 1/4) = 4 / 3^(3/4)
    np.testing.assert_allclose(found.effective_heads, [4.0, 4 / 3**0.75, 0.0], rtol=1e-12)
    np.testing.assert_allclose(found.importance[1], [0.75, 0.25, 0, 0])


def test_medians_and_heads_without_which_the_model_is_worse_than_predicting_0(prompts):
    pair = debiased_gradient_step(0.88, 1e-3, d_x=5)
    weights = stack([pair, diagonal_heads([0.13], [0.01], d_x=5)])
    found = ablate_heads(ICLTransformer.from_weights(weights, task=TaskConfig()), prompts)
    full = squares(predict(weights, prompts), prompts)
    rises = [squares(predict(without(weights, head), prompts), prompts) - full for head in range(3)]
    expected = np.median(torch.stack(rises).numpy(), axis=1)
    np.testing.assert_allclose(found.median_rise[0], expected, rtol=1e-9)
    assert found.null_risk == pytest.approx(prompts.y_query_clean.square().mean().item(), rel=1e-12)
    assert found.breaking == ["L0H0", "L0H1"]
    assert found.layer_frame()["effective_heads"].tolist() == found.effective_heads.tolist()


def test_a_single_prompt_is_refused(model, prompts):
    with pytest.raises(ValueError, match=r"^prompts must be >= 2, .*, got 1\.$"):
        ablate_heads(model, prompts[:1])
    with pytest.raises(ValueError, match=r"At least 2 prompts .* are needed, got 1"):
        ablate_heads(model, prompts[:2], method="resample")


def test_methods_on_a_head_that_adds_a_constant(model, weights, prompts):
    # A head whose output does not depend on the prompt: only zero ablation sees it.
    constant = ICLTransformer(ModelConfig(n_heads=1, biases=True), d_x=5, d_y=1).double()
    with torch.no_grad():
        constant.blocks[0].attn.b_V[0, 0] = 1.0
        constant.blocks[0].attn.W_O[0, 0, 5] = 0.5
    rises = {method: ablate_heads(constant, prompts, method=method) for method in METHODS}
    clean = prompts.y_query_clean.square().mean() - (prompts.y_query_clean - 0.5).square().mean()
    assert rises["zero"].rise[0, 0] == pytest.approx(clean.item(), rel=1e-10)
    for method in ("mean", "resample"):
        assert abs(rises[method].rise[0, 0]) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.slow
def test_resampling_has_honest_errors(model, few):
    # Over many draws of prompts the rises scatter by their standard errors.
    task = TaskConfig(context_length=6)
    found = [
        ablate_heads(
            model,
            sample_prompts(task, 64, generator=generator_for(1, "eval", draw), dtype=torch.float64),
            method="resample",
        )
        for draw in range(300)
    ]
    scatter = np.std([one.rise[0] for one in found], axis=0)[:3]
    sems = np.sqrt(np.mean([one.rise_sem[0] ** 2 for one in found], axis=0))[:3]
    # The spread of 300 draws is known to 1 / sqrt(600) = 4%, more with heavy tails.
    np.testing.assert_allclose(sems, scatter, rtol=0.2)


def test_a_rise_below_zero_has_one_sign(model, prompts):
    found = ablate_heads(model, prompts)
    fallen = replace(found, rise=-np.abs(found.rise) - 1, carried_by_few=found.rise < -np.inf)
    assert " -" in repr(fallen)
    assert "+-" not in repr(fallen)


def test_an_output_bias_belongs_to_every_subset(prompts):
    plain = debiased_gradient_step(0.88, 0.02, d_x=5)
    zeros = torch.zeros(2, plain.W_Q.shape[2], dtype=torch.float64)
    b_O = torch.tensor([0.5], dtype=torch.float64)
    weights = replace(plain, b_Q=zeros, b_K=zeros, b_V=zeros, b_O=b_O)
    found = ablate_subsets(weights, prompts)
    target = prompts.y_query_clean
    assert found.risk[0] == pytest.approx(float((0.5 - target).square().mean()), rel=1e-12)
    full = (predict(weights, prompts) - target).square().mean()
    assert found.risk[-1] == pytest.approx(float(full), rel=1e-12)


def test_a_mask_that_lowers_the_risk_is_not_said_to_raise_it(model):
    prompts = sample_prompts(TaskConfig(), 64, seed=0)
    turned = replace(
        prompts, y_query=-prompts.y_query, y_query_clean=-prompts.y_query_clean, beta=None
    )
    results = {False: ablate(model, prompts), True: ablate(model, turned)}
    for lowers, result in results.items():
        assert bool((result.methods[0].rise <= 0).all()) is lowers
        assert ("lowers it least" in result.sentences()[1]) is lowers
