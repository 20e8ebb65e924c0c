"""Cross-fitted cost of a pruning rule in the analyses of sparse regression: choices on halves, and their error."""

import numpy as np
import pytest

from analyses.sparse.crossed import SPLITS, Choices, crossed, random_halves
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruning_rules import best_head_first
from mechinterp.analysis.stats import ratio_and_sem
from tests.analysis.one_pair import HALF, KEPT_A, KEPT_B, RHO, prompts_of, three_heads
from tests.conftest import refused


def test_of_two_equal_heads_each_is_chosen_half_of_the_time():
    model = three_heads()
    prompts = prompts_of(model, [0, 1] * HALF)
    found = crossed(model, prompts, best_head_first)
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


def test_a_clear_choice_is_that_of_all_prompts_and_adds_nothing_to_the_error():
    model = three_heads(second=0.1, third=0.05)
    prompts = prompts_of(model, [0, 1] * HALF)
    found = crossed(model, prompts, best_head_first)
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
    with refused(4, "prompts", 3):
        random_halves(3, 1)
    with refused("splits", 1, 0):
        random_halves(4, 0)
