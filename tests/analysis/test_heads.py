"""Masks of heads: zeroed weights, subsets by brute force, Shapley values by permutations, pairs, a greedy order, and gates."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from analyses.lib import gates
from analyses.lib.gates import learn_gates
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.shares import effective_number, layer_shares
from mechinterp.analysis.stats import halves
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.constructions.one_layer import debiased_gradient_step, diagonal_heads
from mechinterp.models.heads import head_outputs, predict, stack
from mechinterp.models.hooked.masks import METHODS, mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import changed, refused
from tests.deep_models import random_gpt2, random_model


@pytest.fixture
def weights():
    """Three heads that all do something, and a zero head."""
    return diagonal_heads([0.13, -0.13, 0.4, 0.0], [3.4, -2.9, 0.3, 0.0], d_x=5)


@pytest.fixture
def model(weights):
    return ICLTransformer.from_weights(weights, task=TaskConfig())


def without(weights, *heads):
    """The weights with W_O of some heads zeroed."""
    return weights.without((0, head) for head in heads)


def squares(prediction, prompts):
    return (prediction - prompts.y_query_clean).square().mean(1)


def test_zero_ablation_is_zeroing_the_output_weights(model, weights, prompts):
    found = ablate(model, prompts, what="heads")
    full = squares(predict(weights, prompts), prompts)
    assert found.full_risk == pytest.approx(full.mean().item(), rel=1e-12)
    for head in range(4):
        rise = squares(predict(without(weights, head), prompts), prompts) - full
        sem = rise.std().item() / 16
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-12)
        assert found.rise_sem[0, head] == pytest.approx(sem, rel=1e-10, abs=1e-12)
    assert found.rise[0, 3] == 0
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(0, 0), (0, 2)])):
        masked = model.predict(prompts)
    both = predict(without(weights, 0, 2), prompts)
    torch.testing.assert_close(masked, both, rtol=1e-12, atol=1e-12)


def test_mean_ablation_replaces_a_head_by_its_mean_output(model, weights, prompts):
    found = ablate(model, prompts, method="mean", what="heads")
    outputs = head_outputs(weights, prompts)
    full = squares(outputs.sum(1), prompts)
    for head in range(4):
        replaced = outputs.sum(1) - outputs[:, head] + outputs[:, head].mean(0)
        rise = squares(replaced, prompts) - full
        assert found.rise[0, head] == pytest.approx(rise.mean().item(), rel=1e-10, abs=1e-12)


def test_masking_one_head_of_a_pair_lets_the_mean_response_in(prompts):
    # With omega -> 0 one head alone predicts mu times the mean response, which the pair had cancelled.
    pair = debiased_gradient_step(0.88, 1e-3, d_x=5)
    model = ICLTransformer.from_weights(pair, task=TaskConfig())
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(0, 1)])):
        alone = model.predict(prompts)
    expected = 440 * prompts.y.mean(1) + predict(pair, prompts) / 2
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-2)
    assert ablate(model, prompts, what="heads").rise.min() > 1000


def test_subsets_equal_brute_force_and_shapley_values_equal_permutations(weights, prompts):
    found = ablate(weights, prompts, what="subsets").to_frame()
    assert found["kept"].iloc[[0, 1, -1]].tolist() == ["none", "L0H0", "L0H0 L0H1 L0H2 L0H3"]
    outputs = head_outputs(weights, prompts)

    def risk(heads):
        total = sum((outputs[:, h] for h in heads), torch.zeros_like(outputs[:, 0]))
        return squares(total, prompts)

    full = risk(range(4))
    assert found["kept"].nunique() == len(found) == 16
    for row in found.itertuples():
        kept = [head for head in range(4) if f"L0H{head}" in row.kept]
        one = risk(kept)
        assert row.n_kept == len(kept)
        assert row.risk == pytest.approx(one.mean().item(), rel=1e-10)
        assert row.risk_sem == pytest.approx(one.std().item() / 16, rel=1e-10)
        assert row.ratio == pytest.approx((one.mean() / full.mean()).item(), rel=1e-10)
        rise = one - full
        assert row.rise == pytest.approx(rise.mean().item(), rel=1e-9, abs=1e-12)
        assert row.rise_sem == pytest.approx(rise.std().item() / 16, rel=1e-9, abs=1e-12)
    gains = torch.zeros(4, len(prompts), dtype=torch.float64)
    for order in itertools.permutations(range(4)):
        for place, head in enumerate(order):
            gains[head] += risk(order[:place]) - risk(order[: place + 1])
    gains /= 24
    values = ablate(weights, prompts, what="shapley")
    np.testing.assert_allclose(values.grid("shapley")[0], gains.mean(1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        values.grid("shapley_sem")[0], gains.std(1) / 16, rtol=1e-9, atol=1e-12
    )
    assert values.grid("shapley").sum() == pytest.approx(
        found["risk"].iloc[0] - full.mean().item(), rel=1e-10
    )


def test_shapley_values_of_heads_that_add_up_have_a_closed_form(prompts):
    """With outputs o_h and v(S) = -(sum_S o - y)^2 a value is o_h (2 y - sum of all o): each pair shares its 2 o_g o_h."""
    weights = diagonal_heads([0.2, -0.1, 0.4], [3.4, -2.9, 0.3], d_x=5)
    found = ablate(weights, prompts, what="shapley")
    outputs = head_outputs(weights, prompts)
    expected = (outputs * (2 * prompts.y_query_clean - outputs.sum(1))[:, None]).mean((0, 2))
    np.testing.assert_allclose(found.grid("shapley")[0], expected, rtol=1e-9)
    # Of a metric that adds up over heads, here the prediction itself, a head has what it adds.
    own = ablate(weights, prompts, what="shapley", metric=lambda predicted, _: -predicted[:, 0])
    np.testing.assert_allclose(own.grid("shapley")[0], outputs.mean(0)[:, 0], rtol=1e-9)


def test_shapley_values_of_several_layers_sum_to_the_whole_effect(few):
    model = random_model(2, 2)
    found = ablate(model, few, what="shapley")
    risks = masked_errors(model, few, [[], found_heads(model)])
    whole = risks[:, 1] - risks[:, 0]
    assert found.grid("shapley").sum() == pytest.approx(whole.mean(), rel=1e-10)
    assert ablate(model, few, what="subsets").grid("rise")[0] == pytest.approx(
        whole.mean(), rel=1e-10
    )


def found_heads(model):
    return predictor_of(model).heads


def test_two_responses(prompts):
    task = TaskConfig(d_y=2)
    two = draw_prompts(task, 64, generator=generator_for(0, "eval", 1), dtype=torch.float64)
    pair = debiased_gradient_step(0.88, 0.1, d_x=5, d_y=2)
    by_hooks = ablate(ICLTransformer.from_weights(pair, task=task), two, what="heads")
    subsets = ablate(pair, two, what="subsets")
    assert by_hooks.full_risk == pytest.approx(subsets.grid("risk")[-1], rel=1e-10)
    assert by_hooks.rise[0, 0] == pytest.approx(subsets.grid("rise")[2], rel=1e-10)


def test_importance_and_effective_heads():
    rises = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 1.0, -5.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    # exp(-3/4 log 3/4 - 1/4 log 1/4) = 4 / 3^(3/4)
    np.testing.assert_allclose(effective_number(rises), [4.0, 4 / 3**0.75, 0.0], rtol=1e-12)
    np.testing.assert_allclose(layer_shares(rises)[1], [0.75, 0.25, 0, 0])


def test_medians_and_heads_without_which_the_model_is_worse_than_predicting_0(prompts):
    pair = debiased_gradient_step(0.88, 1e-3, d_x=5)
    weights = stack([pair, diagonal_heads([0.13], [0.01], d_x=5)])
    found = ablate(ICLTransformer.from_weights(weights, task=TaskConfig()), prompts, what="heads")
    full = squares(predict(weights, prompts), prompts)
    rises = [squares(predict(without(weights, head), prompts), prompts) - full for head in range(3)]
    expected = np.median(torch.stack(rises).numpy(), axis=1)
    np.testing.assert_allclose(found.grid("median_rise")[0], expected, rtol=1e-9)
    assert found.null_risk == pytest.approx(prompts.y_query_clean.square().mean().item(), rel=1e-12)
    assert found.breaking == ["L0H0", "L0H1"]
    assert found.layer_frame()["effective_heads"].tolist() == found.effective_heads.tolist()


def test_methods_on_a_head_that_adds_a_constant(model, weights, prompts):
    # A head whose output does not depend on the prompt: only zero ablation sees it.
    constant = ICLTransformer(ModelConfig(n_heads=1, biases=True), d_x=5, d_y=1).double()
    with torch.no_grad():
        constant.blocks[0].attn.b_V[0, 0] = 1.0
        constant.blocks[0].attn.W_O[0, 0, 5] = 0.5
    rises = {method: ablate(constant, prompts, method=method, what="heads") for method in METHODS}
    clean = prompts.y_query_clean.square().mean() - (prompts.y_query_clean - 0.5).square().mean()
    assert rises["zero"].rise[0, 0] == pytest.approx(clean.item(), rel=1e-10)
    for method in ("mean", "resample"):
        assert abs(rises[method].rise[0, 0]) < 1e-12


def test_what_cannot_be_masked_is_refused(model, prompts):
    with refused("zero, mean, resample", "median"):
        ablate(model, prompts, method="median", what="heads")
    with refused("n_heads", 12, 13):
        ablate(diagonal_heads([0.1] * 13, [1.0] * 13, d_x=5), prompts, what="subsets")
    with refused("prompts", 8, 1):
        ablate(model, prompts[:1], what="heads")
    with refused("prompts", 8, 2):
        ablate(model, prompts[:2], method="resample", what="heads")


def test_an_output_bias_belongs_to_every_subset(prompts):
    plain = debiased_gradient_step(0.88, 0.02, d_x=5)
    zeros = torch.zeros(2, plain.d_head, dtype=torch.float64)
    b_O = torch.tensor([0.5], dtype=torch.float64)
    weights = changed(plain, b_Q=zeros, b_K=zeros, b_V=zeros, b_O=b_O)
    found = ablate(weights, prompts, what="subsets")
    target = prompts.y_query_clean
    assert found.grid("risk")[0] == pytest.approx(float((0.5 - target).square().mean()), rel=1e-12)
    full = (predict(weights, prompts) - target).square().mean()
    assert found.grid("risk")[-1] == pytest.approx(float(full), rel=1e-12)


def test_pairs_are_masks_of_two(few):
    model = random_model(2)
    found = ablate(model, few, what="pairs")
    masks = [[], [(0, 1)], [(1, 2)], [(0, 1), (1, 2)]]
    errors = masked_errors(model, few, masks)
    full, one, other, both = errors.T
    apart = both - one - other + full
    frame = found.to_frame()
    assert len(frame) == 28
    (row,) = frame.query("head == 'L0H1' and other == 'L1H2'").to_dict("records")
    assert row["rise"] == pytest.approx((both - full).mean(), rel=1e-9)
    assert row["interaction"] == pytest.approx(apart.mean(), rel=1e-9)
    assert row["median_interaction"] == pytest.approx(np.median(apart), rel=1e-9)
    assert row["interaction_sem"] == pytest.approx(apart.std(ddof=1) / 30**0.5, rel=1e-9)
    matrix = np.array(found.plot().data[0].z)
    assert matrix[1, 6] == matrix[6, 1] == row["interaction"]
    assert not matrix.diagonal().any()


def test_pairs_of_one_head_are_refused(prompts):
    model = ICLTransformer.from_weights(diagonal_heads([0.2], [3.4], d_x=5), task=TaskConfig())
    with refused("pairs", "two heads"):
        ablate(model, prompts, what="pairs")


def test_heads_of_one_layer_interact_by_the_product_of_their_outputs(prompts):
    # With y_hat = a + b + rest the interaction is (e - a - b)^2 - (e - a)^2 - (e - b)^2 + e^2 = 2 a b.
    weights = diagonal_heads([0.2, -0.1, 0.4], [3.4, -2.9, 0.3], d_x=5)
    found = ablate(ICLTransformer.from_weights(weights, task=TaskConfig()), prompts, what="pairs")
    outputs = head_outputs(weights, prompts)[..., 0]
    expected = 2 * (outputs[:, 0] * outputs[:, 1]).mean().item()
    assert found.grid("interaction")[0] == pytest.approx(expected, rel=1e-9)


def test_the_greedy_order_takes_what_is_missed_least(prompts):
    # A zero head, and a debiased pair of which either half alone is far worse than none.
    weights = diagonal_heads([0.0, 0.02, 0.4, -0.02], [0.0, 22.0, 0.1, -22.0], d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = ablate(model, prompts, what="greedy")
    chosen_on, measured = halves(prompts)
    names = found.rows["masked_next"].tolist()[:-1]
    assert sorted(names) == ["L0H0", "L0H1", "L0H2", "L0H3"]
    order = [(int(name[1]), int(name[3])) for name in names]
    for step, head in enumerate(order):
        baselines = [[*order[:step], rival] for rival in order[step:]]
        risks = masked_errors(model, chosen_on, baselines).mean(0)
        assert risks.min() == risks[0], head
    masks = [order[:size] for size in range(5)]
    errors = masked_errors(model, measured, masks)
    risk, ratio_sem = found.grid("risk"), found.grid("ratio_sem")
    np.testing.assert_allclose(risk, errors.mean(0), rtol=1e-12)
    full = errors[:, 0].mean()
    off = errors[:, 2] - errors[:, 2].mean() / full * errors[:, 0]  # the delta method
    assert ratio_sem[2] == pytest.approx(off.std(ddof=1) / 128**0.5 / full, rel=1e-9)
    zero = measured.y_query_clean.square().mean().item()
    assert risk[-1] == pytest.approx(zero, rel=1e-12)
    assert risk[3] > 5 * zero
    np.testing.assert_array_equal(found.plot().data[0].y, risk)
    for ratios, needed in (([1, 1.5, 3, 3, 3], 3), ([1, 3, 1.5, 3, 3], 2), ([1, 3, 3, 3, 1], 0)):
        columns = dict(found.columns) | {"risk": found.full_risk * np.array(ratios)}
        assert replace(found, columns=columns).needed == needed


@pytest.mark.parametrize("make", [random_model, random_gpt2])
def test_a_gate_of_zero_is_a_mask(make, few):
    predictor = predictor_of(make())
    factors = torch.ones(predictor.n_layers, predictor.n_heads, dtype=torch.float64)
    factors[1, 1] = 0
    with torch.no_grad():
        risk = gates._risk(predictor, few, factors).item()
    assert risk == pytest.approx(masked_errors(predictor, few, [[(1, 1)]]).mean(), rel=1e-10)


def test_gates_leave_the_model_as_it_was(few):
    model = random_model(2)
    before = model.predict(few)
    learn_gates(model, few, steps=3)
    with refused("prompts", 8, 7):
        ablate(model, few[:7], what="greedy")
    with refused("steps", 0):
        learn_gates(model, few, steps=0)
    assert torch.equal(model.predict(few), before)
    assert all(parameter.grad is None for parameter in model.parameters())
