"""Pairs against masks one by one, a greedy order that can be worked out by hand, and gates: heads that help, do nothing and
harm get their roles."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analyses.lib import gates
from analyses.lib.gates import HeadGates, learn_gates
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.stats import halves
from mechinterp.config import TaskConfig
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.deep_models import random_gpt2, random_model


def test_pairs_are_masks_of_two(few):
    model = random_model(2)
    found = ablate_heads(model, few, sets="pairs")
    assert found.names[:5] == ("L0H0", "L0H1", "L0H2", "L0H3", "L1H0")
    masks = [[], [(0, 1)], [(1, 2)], [(0, 1), (1, 2)]]
    errors = masked_errors(model, few, masks)
    full, one, other, both = errors.T
    apart = both - one - other + full
    for matrix, values in ((found.rise, both - full), (found.interaction, apart)):
        assert matrix[1, 6] == matrix[6, 1] == pytest.approx(values.mean(), rel=1e-9)
    sem = apart.std(ddof=1) / 30**0.5
    assert found.interaction_sem[1, 6] == pytest.approx(sem, rel=1e-9)
    assert found.rise[1, 1] == pytest.approx((one - full).mean(), rel=1e-9)
    assert not found.interaction.diagonal().any()
    frame = found.to_frame()
    assert len(frame) == 28
    assert frame.query("head == 'L0H1' and other == 'L1H2'")["rise"].item() == found.rise[1, 6]
    assert repr(found).startswith("PairAblation(L")
    assert found.plot().data[0].z.shape == (8, 8)


def test_heads_of_one_layer_interact_by_the_product_of_their_outputs(prompts):
    # With y_hat = a + b + rest the interaction is (e - a - b)^2 - (e - a)^2 - (e - b)^2 + e^2 = 2 a b.
    from mechinterp.models.heads import head_outputs

    weights = diagonal_heads([0.2, -0.1, 0.4], [3.4, -2.9, 0.3], d_x=5)
    found = ablate_heads(
        ICLTransformer.from_weights(weights, task=TaskConfig()), prompts, sets="pairs"
    )
    outputs = head_outputs(weights, prompts)[..., 0]
    expected = 2 * (outputs[:, 0] * outputs[:, 1]).mean().item()
    assert found.interaction[0, 1] == pytest.approx(expected, rel=1e-9)


def test_the_greedy_order_takes_what_is_missed_least(prompts):
    # A zero head, and a debiased pair of which either half alone is far worse than none.
    weights = diagonal_heads([0.0, 0.02, 0.4, -0.02], [0.0, 22.0, 0.1, -22.0], d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = ablate_heads(model, prompts, sets="greedy")
    chosen_on, measured = halves(prompts)
    names = found.heads
    assert sorted(names) == ["L0H0", "L0H1", "L0H2", "L0H3"]
    order = [(int(name[1]), int(name[3])) for name in names]
    for step, head in enumerate(order):
        baselines = [[*order[:step], rival] for rival in order[step:]]
        risks = masked_errors(model, chosen_on, baselines).mean(0)
        assert risks.min() == risks[0], head
    masks = [order[:size] for size in range(5)]
    errors = masked_errors(model, measured, masks)
    risk, ratio_sem = found.risk, found.ratio_sem
    np.testing.assert_allclose(risk, errors.mean(0), rtol=1e-12)
    full = errors[:, 0].mean()
    off = errors[:, 2] - errors[:, 2].mean() / full * errors[:, 0]  # the delta method
    assert ratio_sem[2] == pytest.approx(off.std(ddof=1) / 128**0.5 / full, rel=1e-9)
    zero = measured.y_query_clean.square().mean().item()
    assert risk[-1] == pytest.approx(zero, rel=1e-12)
    assert risk[3] > 5 * zero
    assert list(found.to_frame()["masked_next"]) == [*names, ""]
    assert found.to_frame()["n_kept"].tolist() == [4, 3, 2, 1, 0]
    np.testing.assert_array_equal(found.plot().data[0].y, risk)
    for ratios, needed in (([1, 1.5, 3, 3, 3], 3), ([1, 3, 1.5, 3, 3], 2), ([1, 3, 3, 3, 1], 0)):
        assert replace(found, ratio=np.array(ratios, dtype=float)).needed == needed


def test_too_few_prompts_to_halve(few):
    with pytest.raises(ValueError, match=r"^prompts must be >= 8, .*, got 7\.$"):
        ablate_heads(random_model(1), few[:7], sets="greedy")


@pytest.mark.slow
def test_roles_of_heads_that_help_do_nothing_and_harm(prompts):
    prompts = prompts[:128]
    # A kernel smoother; a zero head; and a head that takes away a share of the first one's prediction.
    weights = diagonal_heads([0.5, 0.0, 0.5], [1.5, 0.0, -0.8], d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = learn_gates(model, prompts, steps=50, learning_rate=0.3)
    assert found.roles == ["facilitating", "irrelevant", "interfering"]
    np.testing.assert_allclose(found.scores.sum(0), 1, rtol=1e-12)
    assert found.closed[0, 0] > 0.8
    assert found.opened[0, 2] < 0.2
    assert (found.opened[0, 1], found.closed[0, 1]) == pytest.approx((0.982, 0.018), abs=1e-3)
    alone = ablate_heads(model, prompts[64:])
    assert np.array_equal(found.rise, alone.rise)
    assert found.risks[0] < found.full_risk
    columns = ["layer", "head", "role", "facilitating", "irrelevant", "interfering"]
    assert list(found.to_frame().columns)[:6] == columns
    assert repr(found).startswith("HeadGates(1 facilitating, 1 irrelevant, 1 interfering; risk ")
    assert found.plot().data[0].z.shape == (1, 3)


@pytest.mark.parametrize("make", [random_model, random_gpt2])
def test_a_gate_of_zero_is_a_mask(make, few):
    predictor = predictor_of(make())
    factors = torch.ones(predictor.n_layers, predictor.n_heads, dtype=torch.float64)
    factors[1, 1] = 0
    with torch.no_grad():
        risk = gates._risk(predictor, few, factors).item()
    assert risk == pytest.approx(masked_errors(predictor, few, [[(1, 1)]]).mean(), rel=1e-10)


@pytest.mark.slow
def test_progress_is_told_of_masking_and_of_each_fit(few):
    told: list[tuple[str, int]] = []

    def progress(items, text):
        for done, item in enumerate(items, 1):
            yield item
            told.append((text, done))

    found = learn_gates(random_model(1), few, steps=3, progress=progress)
    fits = [
        (f"fitting gates ({kind})", n) for kind in ("free", "opened", "closed") for n in (1, 2, 3)
    ]
    assert told[-9:] == fits
    assert {text for text, _ in told[:-9]} == {"masking heads (zero)"}
    untold = learn_gates(random_model(1), few, steps=3)
    assert np.array_equal(found.closed, untold.closed)


def test_gates_leave_the_model_as_it_was(few):
    model = random_model(2)
    before = model.predict(few)
    found = learn_gates(model, few, steps=3)
    assert isinstance(found, HeadGates)
    assert torch.equal(model.predict(few), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_settings_are_refused(few):
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        learn_gates(random_model(1), few, steps=0)
