"""Masking: hooks against zeroed weights, subsets against brute force, Shapley values against permutations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.heads import ablate_heads, ablate_subsets, mask_heads
from mechinterp.config import TaskConfig
from mechinterp.models.constructions import debiased_gradient_step, diagonal_heads
from mechinterp.models.functional import head_outputs, predict, stack
from mechinterp.models.transformer import ICLTransformer


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
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-14)
        assert found.rise_sem[0, head] == pytest.approx(
            rise.std().item() / 16, rel=1e-10, abs=1e-14
        )
    assert found.rise[0, 3] == 0


def test_mean_ablation_replaces_a_head_by_its_mean_output(model, weights, prompts):
    found = ablate_heads(model, prompts, method="mean")
    outputs = head_outputs(weights, prompts)
    full = squares(outputs.sum(1), prompts)
    for head in range(4):
        replaced = outputs.sum(1) - outputs[:, head] + outputs[:, head].mean(0)
        rise = squares(replaced, prompts) - full
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-14)


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
        masked, predict(without(weights, 0, 2), prompts), rtol=1e-12, atol=1e-13
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


@pytest.mark.parametrize("method", ["zero", "mean"])
def test_subsets_equal_brute_force_and_shapley_values_equal_permutations(weights, prompts, method):
    found = ablate_subsets(weights, prompts, method=method)
    outputs = head_outputs(weights, prompts)
    absent = outputs.mean(0) if method == "mean" else torch.zeros_like(outputs[0])

    def risk(heads):
        total = sum(
            (outputs[:, h] if h in heads else absent[h].expand(len(prompts), -1)) for h in range(4)
        )
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
    from mechinterp.icl.prompts import generator_for, sample_prompts

    two = sample_prompts(task, 64, generator=generator_for(0, "eval", 1), dtype=torch.float64)
    pair = debiased_gradient_step(0.88, 0.1, d_x=5, d_y=2)
    by_hooks = ablate_heads(ICLTransformer.from_weights(pair, task=task), two)
    subsets = ablate_subsets(pair, two)
    assert by_hooks.full_risk == pytest.approx(subsets.risk[-1], rel=1e-10)
    assert by_hooks.rise[0, 0] == pytest.approx(subsets.rise[2], rel=1e-10)


@pytest.mark.parametrize("ablate", [ablate_heads, ablate_subsets])
def test_an_unknown_method_is_refused(ablate, model, prompts):
    with pytest.raises(ValueError, match="method must be one of zero, mean, got 'median'"):
        ablate(model, prompts, method="median")


def test_too_many_heads_for_all_subsets(prompts):
    with pytest.raises(ValueError, match="n_heads must be <= 12 for all subsets, got 13"):
        ablate_subsets(stack([diagonal_heads([0.1] * 13, [1.0] * 13, d_x=5)]), prompts)


def test_frames_and_repr(model, weights, prompts):
    found = ablate_heads(model, prompts)
    assert list(found.to_frame().columns) == ["method", "layer", "head", "rise", "rise_sem"]
    assert repr(found).startswith("HeadAblation(zero: L0H")
    assert len(found.plot().data) == 1
    subsets = ablate_subsets(weights, prompts)
    assert subsets.to_frame()["kept"].iloc[[0, 1, -1]].tolist() == ["none", "H0", "H0 H1 H2 H3"]
    assert subsets.shapley_frame()["shapley"].tolist() == subsets.shapley.tolist()
    assert repr(subsets).startswith("SubsetAblation(zero: risk ")
