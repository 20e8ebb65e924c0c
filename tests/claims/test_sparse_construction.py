"""C1-C8: what holds exactly or by drawing prompts, without a trained model; settings and thresholds
are ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.lib.theory.learners import lasso
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import (
    descend,
    excess_risk,
    gradient_descent,
    ols,
    preprocess_then_optimise,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from tests.conftest import sampled

SMALL = TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4)
WIDE = TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.25)
ETA = 0.8
STEPS = 128
SEEDS = sampled((0, 1, 2), keep=(0).__eq__)


def draw(task: TaskConfig, n: int, *, seed: int = 0) -> Prompts:
    return sample_prompts(task, n, generator=generator_for(seed, "eval", 0), dtype=torch.float64)


@pytest.fixture(scope="module")
def small() -> Prompts:
    return draw(SMALL, 64)


def risk(predictions: Tensor, prompts: Prompts) -> Tensor:
    """Mean excess risk, of every step if there are steps."""
    return excess_risk(predictions, prompts).mean(-1)


@dataclass(frozen=True)
class Tuned:
    """Best value of a learner's setting, by mean excess risk."""

    value: float
    risk: float
    """Mean excess risk over the prompts, unit y^2."""
    risk_sem: float
    """Standard error of `risk` over the prompts."""


def tuned(
    learner: Callable[[float], Float[Tensor, "batch d_y"]],
    values: Sequence[float],
    prompts: Prompts,
) -> Tuned:
    """Value with the smallest excess risk of a learner on these prompts."""
    risks = [excess_risk(learner(value), prompts).double() for value in values]
    best = min(range(len(values)), key=lambda index: risks[index].mean().item())
    chosen = risks[best]
    sem = chosen.std().item() / len(chosen) ** 0.5
    return Tuned(float(values[best]), chosen.mean().item(), sem)


def best_ridge(prompts: Prompts) -> Tuned:
    penalties = np.geomspace(0.3, 300, 31).tolist()
    return tuned(lambda penalty: ridge(prompts, penalty=penalty), penalties, prompts)


def best_step(prompts: Prompts, *, steps: int = STEPS) -> float:
    """The risk of preprocess-then-optimise at its best step, one for all prompts."""
    return risk(preprocess_then_optimise(prompts, steps=steps), prompts).min().item()


# C1, C2: the construction


def test_c1_the_first_layer_writes_the_reweighted_covariates(small: Prompts):
    weights = preprocess_then_optimise_model([ETA] * 3, d_x=16)
    model = ICLTransformer.from_weights(weights, task=SMALL)
    _, cache = model.run_with_cache(small.tokens)
    r = (small.x * small.y).mean(1)
    expected = torch.cat([small.x, small.x_query[:, None]], dim=1) * r[:, None]
    behind = cache["resid_post", 0]
    assert (behind[..., 17:] - expected).abs().max() <= 1e-12
    assert torch.equal(behind[..., :17], cache["resid_pre", 0][..., :17])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3])
def test_c2_the_later_layers_descend(small: Prompts, steps: int):
    etas = [ETA] * steps
    weights = preprocess_then_optimise_model(etas, d_x=16)
    expected = preprocess_then_optimise(small, steps=steps, eta=ETA)[-1]
    model = ICLTransformer.from_weights(weights, task=SMALL)
    for found in (predict_deep(weights, small), model.predict(small)):
        assert (found - expected).abs().max() <= 1e-12
    assert weights.heads_per_layer == (tuple(range(16)), *[(0,)] * steps)


@pytest.mark.slow
def test_c2_without_its_mask_the_construction_errs_from_the_second_step_on(small: Prompts):
    expected = preprocess_then_optimise(small, steps=4, eta=ETA)
    for steps in (1, 2, 3, 4):
        weights = preprocess_then_optimise_model([ETA] * steps, d_x=16)
        # The query twice: the first one is then a key of everything, the second reads as before.
        tokens = torch.cat([small.tokens, small.tokens[:, -1:]], dim=1)
        model = ICLTransformer.from_weights(weights, task=SMALL)
        # 41 keys where there were 40.
        found = model.run_with_hooks(tokens, fwd_hooks=[(_is_pattern, _times(41 / 40))])[:, -1]
        error = (found - expected[steps]).abs().max().item()
        assert error <= 1e-12 if steps == 1 else error > 0.01


def _is_pattern(name: str) -> bool:
    return name.endswith("hook_pattern")


def _times(factor: float):
    return lambda pattern, hook: pattern * factor


# C3: what Algorithm 1 is


def test_c3_it_is_descent_preconditioned_by_the_squared_correlations(small: Prompts):
    G = small.x.mT @ small.x / 40
    r = (small.x * small.y).mean(1)
    w, expected = torch.zeros_like(r), []
    for _ in range(21):
        expected.append((w * small.x_query).sum(1, keepdim=True))
        w = w - ETA * r.square() * ((G @ w[..., None])[..., 0] - r)
    found = preprocess_then_optimise(small, steps=20, eta=ETA)
    assert (found - torch.stack(expected)).abs().max() <= 1e-12


# C4: it wins where coordinates are many, task vectors sparse and their entries not small


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_c4_it_beats_ridge_least_squares_and_descent(seed: int):
    prompts = draw(WIDE, 128, seed=seed)
    ours = best_step(prompts)
    assert ours <= 0.35 * best_ridge(prompts).risk
    assert ours <= 0.25 * risk(ols(prompts), prompts).item()
    plain = risk(gradient_descent(prompts, steps=STEPS), prompts)
    assert ours <= 0.35 * plain.min().item()
    eighth = risk(preprocess_then_optimise(prompts, steps=8), prompts)[8]
    assert eighth <= 0.35 * plain[8]


@pytest.mark.slow
def test_c4_with_one_step_size_for_all_prompts_it_wins_at_d_64_and_loses_at_d_16():
    etas = np.geomspace(0.05, 20, 32).tolist()
    for task, wins in ((WIDE, True), (SMALL, False)):
        prompts = draw(task, 256)
        tuning, held_out = prompts[:128], prompts[128:]
        for steps in (2, 3):
            found = []
            for learner in (preprocess_then_optimise, gradient_descent):
                risks = torch.stack(
                    [risk(learner(tuning, steps=steps, eta=eta)[-1], tuning) for eta in etas]
                )
                predictions = learner(held_out, steps=steps, eta=etas[risks.argmin()])[-1]
                found.append(risk(predictions, held_out).item())
            assert (found[0] < found[1]) == wins


# C5, C6: like Lasso, and nearly without the dimension


def best_lasso(prompts: Prompts) -> Tuned:
    alphas = np.geomspace(0.01, 0.5, 10).tolist()
    return tuned(lambda alpha: lasso(prompts, alpha=alpha), alphas, prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_x", "length"),
    sampled(
        [(16, 40), (16, 64), (64, 64), (64, 128), (64, 256), (128, 128), (128, 512)],
        keep=((16, 40), (64, 128)).__contains__,
    ),
)
def test_c5_it_is_comparable_to_lasso(d_x: int, length: int):
    task = replace(SMALL if d_x == 16 else WIDE, d_x=d_x, context_length=length)
    prompts = draw(task, 64)
    assert 0.25 <= best_step(prompts) / best_lasso(prompts).risk <= 2.0


@pytest.mark.slow
def test_c5_its_risk_falls_faster_than_one_over_the_context_length():
    lengths = np.array([64, 128, 256])
    risks = [best_step(draw(replace(WIDE, context_length=int(n)), 128)) for n in lengths]
    assert np.polyfit(np.log(lengths), np.log(risks), 1)[0] <= -1.5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_c6_its_risk_hardly_grows_with_the_dimension():
    one, two = (draw(replace(WIDE, d_x=d, context_length=256), 128) for d in (64, 128))
    assert best_step(two) / best_step(one) <= 2.5
    assert best_ridge(two).risk / best_ridge(one).risk >= 1.8


# C7: where it does not win


@pytest.mark.slow
def test_c7_it_loses_to_ridge_where_the_task_vector_is_dense():
    prompts = draw(replace(SMALL, sparsity=16), 256)
    assert best_step(prompts) >= 1.2 * best_ridge(prompts).risk


@pytest.mark.slow
@pytest.mark.parametrize("task", [SMALL, WIDE], ids=["d16", "d64"])
def test_c7_it_needs_each_correlation_at_its_own_coordinate(task: TaskConfig):
    prompts = draw(task, 128)
    r = (prompts.x * prompts.y).mean(1)
    order = torch.rand(r.shape, generator=torch.Generator().manual_seed(0)).argsort(1)
    permuted = r.gather(1, order)
    steps = descend(
        (prompts.x * permuted[:, None])[..., None],
        prompts.y,
        (prompts.x_query * permuted)[..., None],
        steps=STEPS,
    )
    assert risk(steps, prompts).min().item() >= 2 * best_step(prompts)


# C8: the references
