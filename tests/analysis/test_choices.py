"""Heads are chosen on some prompts and measured on others, and the errors say how much the choice matters."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import (
    SPLITS,
    Choices,
    best_head_first,
    prune,
)
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.stats import random_halves, ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer

TASK = TaskConfig(d_x=2, context_length=1)
HALF = 13
"""Prompts of each kind. Odd: no half of the prompts has as many of one kind as of the other."""
GAMMA, RHO = 0.5, 1.0
KEPT_A, KEPT_B = np.array([2.25, 2.25]), np.array([6.25, 0.25])
"""Errors on prompts of the first and of the second kind with the first, or the second, head alone."""


def layer_of(omega: list[list[float]]) -> ICLTransformer:
    """One layer of linear attention on one pair with y = 1, whose heads add these on prompts about either coordinate."""
    weights = replace(diagonal_heads(omega, [1.0] * len(omega), d_x=2), score="linear")
    return ICLTransformer.from_weights(weights, task=TASK)


def three_heads(*, second: float = 1.0, third: float = GAMMA) -> ICLTransformer:
    """On prompts about the first coordinate head 0 adds 1 to the prediction and head 2 `third`; on those about the
    second coordinate head 1 adds `second`, and head 2 takes `third` away."""
    return layer_of([[1.0, 0.0], [0.0, second], [third, -third]])


def prompts_of(
    model: ICLTransformer, about: list[int], above: float | torch.Tensor = RHO
) -> Prompts:
    """Prompts about these coordinates, whose targets lie so far above what the model predicts."""
    x = torch.eye(2, dtype=torch.float64)[about]
    zero, one = torch.zeros(len(x), 1).double(), torch.ones(len(x), 1, 1).double()
    prompts = Prompts(x[:, None], one, x, zero, zero, torch.zeros(len(x), 2, 1).double())
    target = model.predict(prompts) + above
    return replace(prompts, y_query=target, y_query_clean=target)


def test_of_two_equal_heads_each_is_chosen_half_of_the_time():
    model = three_heads()
    prompts = prompts_of(model, [0, 1] * HALF)
    found = prune(model, prompts, rule=best_head_first)
    # The half with more prompts of the first kind keeps head 0, the other one head 1.
    assert found.chosen.tolist() == [[0.5, 0.5, 0.0]]
    kind = np.arange(2 * HALF) % 2
    errors = np.zeros(2 * HALF)
    for half in random_halves(2 * HALF, SPLITS):
        alone = KEPT_A if (kind[half] == 0).sum() > HALF / 2 else KEPT_B
        errors += ~half * alone[kind] / SPLITS
    assert found.full_risk == pytest.approx(RHO**2, rel=1e-12)
    assert found.ratio == pytest.approx(errors.mean(), rel=1e-12)
    # Between the heads on all prompts: half of the difference of their risks, squared, is the variance V; V / 2 counts.
    between = (KEPT_B.mean() - KEPT_A.mean()) / 2 / 2**0.5
    within = errors.std(ddof=1) / (2 * HALF) ** 0.5
    assert found.ratio_sem == pytest.approx(np.hypot(within, between), rel=1e-12)
    assert found.risk_sem == pytest.approx(np.hypot(within, between), rel=1e-12)
    assert found.to_frame()["chosen"].tolist() == [0.5, 0.5, 0.0]
    assert found.plot_chosen().data[0].z.tolist() == [[0.5, 0.5, 0.0]]


def test_a_clear_choice_is_that_of_all_prompts_and_adds_nothing_to_the_error():
    model = three_heads(second=0.1, third=0.05)
    prompts = prompts_of(model, [0, 1] * HALF)
    found = prune(model, prompts, rule=best_head_first)
    assert found.chosen.tolist() == found.kept.tolist() == [[True, False, False]]
    errors = masked_errors(model, prompts, [[], [(0, 1), (0, 2)]])
    ratio, sem = ratio_and_sem(errors[:, 1], errors[:, 0])
    assert (found.ratio, found.ratio_sem) == (float(ratio), float(sem))


def test_an_error_is_that_of_choices_that_a_prompt_had_no_part_in():
    # Two choices of four prompts; each was made on two of them.
    kept = np.array([[[True, False]], [[False, True]]])
    weight = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    choices = Choices(kept, np.array([0.5, 0.5]), weight)
    errors = np.array([[2.0, 2.0, 99.0, 99.0], [99.0, 99.0, 4.0, 4.0]])
    assert choices.crossed(errors).tolist() == [2.0, 2.0, 4.0, 4.0]
    assert choices.ratio(errors, np.ones(4))[0] == 3.0
    flat = np.array([[2.0] * 4, [4.0] * 4])
    # SEM of 2, 2, 4, 4, half of the variance 1 between the choices, and the mean error 2 of the fits.
    assert choices.ratio(flat, np.ones(4))[1] == pytest.approx((1 / 3 + 1 / 2) ** 0.5, rel=1e-12)
    expected = (1 / 3 + 1 / 2 + 4) ** 0.5
    fits = np.array([1.0, 3.0])
    assert choices.ratio(flat, np.ones(4), fits)[1] == pytest.approx(expected, rel=1e-12)
    assert choices.ratio(flat, np.full(4, 2.0), fits) == pytest.approx((1.5, expected / 2))


def test_halves_are_halves():
    halves = random_halves(9, 3)
    assert halves.sum(1).tolist() == [4, 5] * 3
    assert (halves[::2] ^ halves[1::2]).all()
    assert len({tuple(half) for half in halves}) == 6
    with pytest.raises(ValueError, match="need at least 4 prompts, got 3"):
        random_halves(3, 1)
    with pytest.raises(ValueError, match="splits must be >= 1, got 0"):
        random_halves(4, 0)


def test_a_rise_that_few_prompts_carry_is_read_by_its_median():
    """Of 200 prompts two, about the first coordinate, hang on head 0."""
    model = layer_of([[30.0, 0.1], [0.0, 1.0]])
    prompts = prompts_of(model, [0, 0] + [1] * 198, torch.linspace(0.5, 1, 200).double()[:, None])
    found = ablate_heads(model, prompts)
    assert found.carried_by_few.tolist() == [[True, False]]
    assert list(found.to_frame())[3:5] == ["median_rise", "rise"]
    assert f"(zero: L0H0 median {found.median_rise[0, 0]:+.3g}, mean +" in repr(found)
    few = prune(model, prompts, rule=lambda rise: np.array([[False, True]]))
    assert few.carried_by_few
    assert f"heads kept: {few.refit_risk:.3g} with a new read-out; excess risk " in repr(few)
    clear = prune(model, prompts, rule=lambda rise: np.array([[True, False]]))
    assert not clear.carried_by_few
    assert "heads kept: excess risk " in repr(clear)
