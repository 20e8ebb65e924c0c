"""Learners of sparse settings, the claims judged by their measures, and the measures' errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.sparse import questions as ask
from analyses.sparse.fairness import (
    LEARNERS,
    algorithm_1,
    both,
    descent,
    fitted,
    jackknife,
    lista,
    moments,
    refined,
    risk,
)
from analyses.sparse.questions import Numbers, of_row, verdicts
from analyses.sparse.setting import typical_ratio, unseen
from analyses.sparse.start import config_of, start_of, step_sizes
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import (
    excess_risk,
    gradient_descent,
    preprocess_then_optimise,
)
from mechinterp.models.hooked.transformer import ICLTransformer

ANALYSES = Path(__file__).parents[1] / "analyses"
TASK = TaskConfig(d_x=4, context_length=64, sparsity=1, nonzeros="signs", noise_var=0.1)


@pytest.fixture
def sparse_prompts():
    return draw_prompts(TASK, 64, generator=generator_for(0, "eval", 0), dtype=torch.float64)


def test_paths_with_one_size_are_the_learners_of_the_package(sparse_prompts):
    gram, r, _ = moments(sparse_prompts)
    sizes, alone = torch.full((3, 1), 0.3, dtype=torch.float64), torch.zeros(3, 1)
    plain, ours = (
        learner(sparse_prompts, steps=3, eta=0.3)[3, :, 0]
        for learner in (gradient_descent, preprocess_then_optimise)
    )
    read = lambda w: (w * sparse_prompts.x_query).sum(1)  # noqa: E731
    torch.testing.assert_close(read(descent(gram, r, sizes)), plain)
    torch.testing.assert_close(read(algorithm_1(gram, r, sizes)), ours)
    for path in (both, lista):
        found = read(path(gram, r, torch.cat([sizes, alone], dim=1)))
        torch.testing.assert_close(found, plain)


def of_modes(values: list[float]) -> tuple[torch.Tensor, ...]:
    """Moments without noise whose G is diagonal with these eigenvalues, and task vectors of signs."""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * len(values))
    gram = torch.tensor(values, dtype=torch.float64).diag().expand(len(signs), -1, -1)
    return gram, (gram @ signs[..., None])[..., 0], signs


def test_the_best_steps_of_descent_are_found_where_they_are_known():
    """Two eigenvalues, two steps: 1 / l1 and 1 / l2 end at the solution. From equal steps a search
    ends at the equal ones that are best, whose risk is far from 0."""
    descent, target = LEARNERS["gd"], of_modes([1.0, 0.2])
    found = fitted(descent, target, 2)
    assert sorted(found.flatten().tolist()) == pytest.approx([1, 5], rel=1e-3)
    equal = refined(descent, torch.ones(2, 1, dtype=torch.float64), target)
    assert equal[0].item() == pytest.approx(equal[1].item(), rel=1e-9)
    assert risk(descent, equal, target) > 0.1 > 1e-6 > risk(descent, found, target)


def test_the_best_steps_of_algorithm_1_are_found_where_they_are_known():
    """G = 1 and task vectors (1, 1/2): r^2 has the eigenvalues 1 and 1/4."""
    gram, _, signs = of_modes([1.0, 1.0])
    beta = signs * torch.tensor([1.0, 0.5], dtype=torch.float64)
    found = fitted(LEARNERS["algorithm"], (gram, beta, beta), 3)
    assert sorted(found.flatten().tolist()) == pytest.approx([1, 4], rel=1e-3)
    assert risk(LEARNERS["algorithm"], found, (gram, beta, beta)) < 1e-6


def test_a_jackknife_of_means_is_their_standard_error():
    blocks = np.random.default_rng(0).normal(size=8)
    without = [np.delete(blocks, b).mean() for b in range(8)]
    assert jackknife(without) == pytest.approx(blocks.std(ddof=1) / 8**0.5)


def test_claims_are_judged_by_medians_and_new_read_outs():
    """What few prompts carry, the mean rise or risk, has no part in it."""
    held = Numbers([4.0, 2.0, 1.5], [0.4, 0.8, 0.9], later=1.2, later_median=1.9, first=2.5)
    assert verdicts(held) == {"C10": True, "C11": True, "C12": True}
    for change, fails in (
        ({"effective": [1.9, 1.0, 1.0]}, "C10"),
        ({"effective": [4.0, 2.8, 1.5]}, "C10"),
        ({"shares": [0.7, 0.8, 0.9]}, "C10"),
        ({"shares": [0.4, 0.5, 0.6]}, "C10"),
        ({"later": 1.3}, "C11"),
        ({"later_median": 2.1}, "C11"),
        ({"first": 1.9}, "C12"),
        ({"later": 1.25, "first": 1.85}, "C12"),
    ):
        found = verdicts(replace(held, **change))
        assert not found[fails]
        assert sum(found.values()) == 2
    row = {"n_layers": 3, "first": 1e12, "first_refit": 1.5, "n_eff_1": 8.0}
    row |= {f"n_eff_{n}_median": value for n, value in enumerate(held.effective, 1)}
    row |= {f"top_share_{n}": value for n, value in enumerate(held.shares, 1)}
    row |= {"later_refit": 1.2, "later_median": 1.5, "pairs_refit": 1.3, "pairs_median": 1.5}
    expected = {"C10": True, "C11": True, "C12": False, "C11_pairs": False}
    assert of_row(row) == expected
    kept = {"later_refit_to_single": 1.2 * 0.75, "C13": True}
    assert of_row(row | {"to_single": 0.75, "later_to_single": 1e12}) == expected | kept
    assert not of_row(row | {"to_single": 0.8})["C13"]


def test_a_ratio_is_of_medians_where_few_prompts_carry_a_mean():
    own, theirs = np.random.default_rng(0).uniform(1, 3, size=(2, 1000))
    pair, how = typical_ratio(own, theirs)
    assert how == "mean"
    assert pair[0] == pytest.approx(own.mean() / theirs.mean())
    own[:5] = 1e6
    (value, sem), how = typical_ratio(own, theirs)
    assert how == "median"
    assert value == pytest.approx(np.median(own) / np.median(theirs))
    # A median of n values of density 1/2 has the standard error 1 / sqrt(n).
    expected = value * (1 / np.median(own) ** 2 + 1 / np.median(theirs) ** 2) ** 0.5 / 1000**0.5
    assert sem == pytest.approx(expected, rel=0.25)


def test_heads_at_work_are_counted_by_median_rises():
    folder = ANALYSES.parent / "checkpoints" / "d8s2-linear-h8x4-l3-noise0.1-s0"
    checkpoint = load(folder)
    prompts = draw_prompts(checkpoint.task, 512, seed=0)
    found = ask.effective_heads(ask.rises_of(checkpoint.model, prompts))
    heads = [(layer, head) for layer in range(3) for head in range(8)]
    errors = masked_errors(checkpoint.model, prompts, [[], *([head] for head in heads)])
    median = np.median(errors[:, 1:] - errors[:, :1], axis=0).reshape(3, 8).clip(0)
    shares = median / median.sum(1, keepdims=True)
    entropy = -(shares * np.log(shares.clip(1e-300))).sum(1)
    np.testing.assert_allclose(found.of_medians, np.exp(entropy), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_error_of_effective_heads_is_that_of_repeated_samples():
    generator = np.random.default_rng(0)
    mean = np.array([[1.0, 0.5, 0.2, -0.3]])
    draws = mean + 0.8 * generator.standard_normal((400, 400, 1, 4))
    found = [ask.effective_heads(draw) for draw in draws]
    numbers, sems = ([getattr(one, name) for one in found] for name in ("number", "sem"))
    assert np.mean(sems) == pytest.approx(np.std(numbers), rel=0.1)


@pytest.mark.slow
def test_training_from_the_construction_starts_with_the_risk_of_its_fitted_steps():
    config = config_of(1)
    etas = step_sizes(config, 64)
    assert len(etas) == config.model.n_layers - 1
    assert max(etas) > 1.5 * min(etas)
    measured = unseen(config.task, 64).to(torch.float64)
    gram, r, _ = moments(measured)
    w = algorithm_1(gram, r, torch.tensor(etas, dtype=torch.float64)[:, None])
    prediction = (w * measured.x_query).sum(1, keepdim=True)
    expected = excess_risk(prediction, measured).numpy()
    measured = measured.to(torch.float32)
    for arm, exact in (("built, alone", True), ("built, with other heads", False)):
        model = ICLTransformer.from_weights(start_of(arm, config, etas), task=config.task)
        found = ask.risks(model, measured)
        assert np.allclose(found, expected, rtol=1e-3, atol=1e-4) == exact
