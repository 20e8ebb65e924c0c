"""Training on moments: the flow against closed forms, descent against automatic differentiation."""

import numpy as np
import pytest
import torch

from analyses.lib.theory import linear_dynamics as dynamics
from analyses.lib.theory import linear_jumps as bounds
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.theory import linear_jumps as jumping
from mechinterp.theory.linear import (
    MergedHeads,
    SeparateHeads,
    merged_heads,
    modes,
    population_moments,
    separate_heads,
)
from mechinterp.training import linear as module
from mechinterp.training.linear import flow, full_batch_descent
from mechinterp.training.linear_models import sample_moments, training_set
from tests.conftest import refused

EIGENVALUES = (0.4, 0.3, 0.2, 0.1)
MOMENTS = population_moments(np.array(EIGENVALUES), context_length=31)
MODES = modes(MOMENTS)
TASK = TaskConfig(
    d_x=4,
    context_length=31,
    covariance=CovarianceConfig(kind="eigenvalues", eigenvalues=EIGENVALUES),
    beta_var=1.0,
    noise_var=0.0,
)


def white(scale):
    moments = population_moments(np.full(4, scale), context_length=31)
    return moments, modes(moments)


# Merged heads


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_aligned_merged_heads_follow_the_white_time_course(scale):
    moments, directions = white(scale)
    r = np.random.default_rng(0).standard_normal(8)
    r /= np.linalg.norm(r)
    heads = MergedHeads(v=1e-2 * r, U=1e-2 * r[:, None, None] * np.eye(4) / 2)
    run = flow(heads, moments, duration=60 / scale**2)
    sigma, loss = dynamics.white_time_course(run.time, directions, scale=1e-2)
    assert np.abs(run.loss - loss).max() < 1e-8 * loss[0]
    assert np.abs(run.M[:, 0, 0] - sigma).max() < 1e-8 * sigma[-1]


def test_random_merged_heads_follow_it_with_their_effective_scale():
    moments, directions = white(1.0)
    for seed in range(3):
        heads = merged_heads(8, 4, std=1e-3, seed=seed)
        scale = dynamics.effective_scale(heads, directions)
        half = dynamics.white_half_time(directions, scale=scale)
        run = flow(heads, moments, duration=4 * half, times=np.linspace(0, 4 * half, 2001))
        _, loss = dynamics.white_time_course(run.time, directions, scale=scale)
        assert np.abs(run.loss - loss).max() < 1e-3 * loss[0]
        sigma = np.trace(run.M, axis1=1, axis2=2) / 4
        measured = np.interp(directions.targets[0] / 2, sigma, run.time)
        assert abs(measured / half - 1) < 1e-3


@pytest.mark.slow
def test_merged_heads_follow_the_course_of_five_numbers():
    times = np.linspace(0, 400, 2001)
    heads = merged_heads(8, 4, std=1e-3, seed=0)
    run = flow(heads, MOMENTS, duration=400.0, times=times)
    scale = dynamics.effective_scale(heads, MODES)
    loss = dynamics.merged_time_course(times, MODES, scale=scale)[2]
    assert np.abs(run.loss - loss).max() < 5e-4
    assert abs(run.loss[-1] - MODES.levels[-1]) < 1e-5


# Separate heads


@pytest.mark.parametrize("mode", [0, 3])
def test_a_head_on_an_eigenvector_is_the_scalar_equation(mode):
    one = 0.02 * np.eye(4)[mode].reshape(1, 1, 4)
    duration = 3.5 / (0.02 * MODES.rates[mode])
    times = np.linspace(0, duration, 101)
    heads = SeparateHeads(v=np.array([0.02]), K=one, Q=one)
    run = flow(heads, MOMENTS, duration=3 * duration, tau=3.0, times=3 * times)
    v = jumping.growth_value(times, 0.02, rate=MODES.rates[mode], target=MODES.targets[mode])
    np.testing.assert_allclose(run.time, 3 * times)
    np.testing.assert_allclose(run.heads.v[:, 0], v, rtol=1e-6)


@pytest.mark.slow
def test_repeated_eigenvalues_keep_the_levels():
    moments = population_moments(np.array([0.3, 0.3, 0.3, 0.1]), context_length=31)
    levels, targets = modes(moments).levels, modes(moments).targets
    np.testing.assert_allclose(levels, [1, 0.7368, 0.4736, 0.2104, 0.1366], atol=6e-5)
    heads = separate_heads(5, 4, std=1e-3, seed=0)
    run = flow(heads, moments, duration=1e7, until_loss=levels[-1] + 1e-9)
    for level in levels:
        assert np.abs(run.loss - level).min() < 1e-3
    first = run.M[np.abs(run.loss - levels[1]).argmin()]
    np.testing.assert_allclose(np.linalg.svd(first)[1] / targets[0], [1, 0, 0, 0], atol=0.02)
    assert np.abs(first - np.diag(np.diag(first))).max() > 0.1


# Rank


def test_second_pair_of_a_grown_head_grows_exponentially():
    moments = population_moments(np.array([0.6, 0.4]), context_length=31)
    directions = modes(moments)
    v, norms = bounds.settled_head(directions.targets[:1])
    times = []
    for seed in (1e-3, 1e-5):
        K = np.array([[[norms[0], 0], [0, seed]]])
        run = flow(SeparateHeads(v=np.array([v]), K=K, Q=K), moments, duration=200.0)
        times.append(np.interp(-(directions.levels[1:].mean()), -run.loss, run.time))
    wait, law = times[1] - times[0], 2 * np.log(10) / (v * directions.rates[1])
    np.testing.assert_allclose(wait, 24.953, atol=2e-3)
    np.testing.assert_allclose(wait, law, rtol=1e-4)


# The flow itself


HEADS = merged_heads(3, 4, std=0.3, seed=0), separate_heads(3, 4, std=0.3, seed=0, rank=2)
EACH = pytest.mark.parametrize("heads", HEADS, ids=repr)


@pytest.mark.parametrize("make", [merged_heads, separate_heads])
def test_both_solvers_agree(make, monkeypatch):
    heads, times = make(4, 4, std=0.1, seed=0), np.linspace(0, 300, 31)
    runs = []
    for limit in (0, 1000):
        monkeypatch.setattr(module, "LARGEST_IMPLICIT", limit)
        runs.append(flow(heads, MOMENTS, duration=300.0, times=times))
    np.testing.assert_allclose(runs[0].M, runs[1].M, rtol=0, atol=1e-5)


@EACH
def test_flow_is_the_flow_of_the_velocity(heads):
    times = np.array([0.0, 1.0, 40.0, 40.0 + 1e-3])
    run = flow(heads, MOMENTS, duration=60.0, times=times)
    np.testing.assert_array_equal(run.heads.v[0], heads.v)
    np.testing.assert_array_equal(run.time, times)
    np.testing.assert_allclose(run.M, run.heads.M, atol=1e-12)
    np.testing.assert_allclose(run.loss, MOMENTS.loss(run.M), atol=1e-12)
    np.testing.assert_allclose(run.learned, run.M.diagonal(axis1=1, axis2=2) / MODES.targets)
    slope = (run.loss[2] - run.loss[3]) / 1e-3
    np.testing.assert_allclose(run.descent[2:].mean(), slope, rtol=1e-4)
    third = type(heads)(**{name: part[2] for name, part in vars(run.heads).items()})
    pull = third.velocity(MOMENTS.gradient(third.M))
    for name, part in vars(run.heads).items():
        measured = (part[3] - part[2]) / 1e-3
        np.testing.assert_allclose(measured, getattr(pull, name), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"duration": 0.0}, ("duration and tau", "> 0", 0.0)),
        ({"times": np.array([0.0, 11.0])}, ("times", "at most", 10.0)),
        ({"times": np.array([3.0, 2.0])}, ("times", "rise")),
        ({"heads": MergedHeads(v=np.zeros(1), U=np.zeros((1, 4, 4)))}, ("heads", "zero")),
        ({"heads": merged_heads(2, 3, std=0.1, seed=0)}, ("d_x = 4", 3)),
    ],
)
def test_bad_flows_are_refused(options: dict, words: tuple):
    options = {"heads": merged_heads(2, 4, std=0.1, seed=0), "duration": 10.0} | options
    with refused(*words):
        flow(options.pop("heads"), MOMENTS, **options)


def test_a_flow_that_cannot_go_on_says_where():
    refused = pytest.raises((RuntimeError, ValueError), match=r"cannot be followed past|finite")
    with np.errstate(all="ignore"), refused:
        flow(merged_heads(2, 4, std=1e150, seed=0), MOMENTS, duration=10.0)


# Descent


def predicted(M, prompts):
    b = (prompts.x * prompts.y).mean(1)
    return torch.einsum("bi,ij,bj->b", b, M, prompts.x_query)


def test_moments_of_a_set_do_not_depend_on_its_chunks():
    prompts = draw_prompts(TASK, 50, dtype=torch.float64)
    whole = sample_moments([prompts], basis=MODES.vectors)
    parts = sample_moments([prompts[:20], prompts[20:21], prompts[21:]], basis=MODES.vectors)
    np.testing.assert_allclose(parts.zz, whole.zz, rtol=1e-12)
    M = np.random.default_rng(0).standard_normal((4, 4))
    error = prompts.y_query[:, 0] - predicted(torch.from_numpy(M), prompts)
    np.testing.assert_allclose(whole.loss(M), error.square().mean().item(), rtol=1e-12)
    basis = np.linalg.qr(M)[0]
    turned = sample_moments([prompts], basis=basis)
    np.testing.assert_allclose(turned.loss(basis.T @ M @ basis), whole.loss(M), rtol=1e-12)


@EACH
def test_descent_on_moments_is_descent_on_the_prompts(heads):
    chunks = list(training_set(TASK, 300, seed=0, chunk=128))
    moments = sample_moments(chunks, basis=MODES.vectors)
    run = full_batch_descent(heads, moments, MODES, learning_rate=0.05, steps=40, every=20)
    weights = [torch.tensor(part, requires_grad=True) for part in vars(heads).values()]
    descent, losses = torch.optim.SGD(weights, lr=0.05), []
    for _ in range(41):
        M = torch.einsum("h,hij->ij" if len(weights) == 2 else "h,hri,hrj->ij", *weights)
        errors = [prompts.y_query[:, 0] - predicted(M, prompts) for prompts in chunks]
        loss = torch.cat(errors).square().mean()
        losses.append(loss.item())
        descent.zero_grad()
        loss.backward()
        descent.step()
    np.testing.assert_allclose(run.loss, np.array(losses)[[0, 20, 40]], rtol=1e-10)
    np.testing.assert_allclose(run.time, [0, 2, 4])


def test_descent_with_small_steps_is_the_flow():
    heads = separate_heads(4, 4, std=0.3, seed=0)
    run = full_batch_descent(heads, MOMENTS, MODES, learning_rate=5e-3, steps=3000, every=300)
    exact = flow(heads, MOMENTS, duration=30.0, times=run.time)
    assert exact.loss[-1] < 0.8
    np.testing.assert_allclose(run.loss, exact.loss, atol=2e-3)


def descend(*, std: float = 0.1, **options: object):
    heads, good = merged_heads(2, 4, std=std, seed=0), {"learning_rate": 0.1, "steps": 5}
    return full_batch_descent(heads, MOMENTS, MODES, **good | options)


def moments_of_two_responses():
    two = draw_prompts(TaskConfig(d_x=4, d_y=2), 3)
    return sample_moments([two], basis=np.eye(4))


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: descend(learning_rate=0.0), ("learning_rate", "> 0", 0.0)),
        (lambda: descend(steps=0), ("steps", ">= 1", 0)),
        (lambda: descend(every=0), ("every", ">= 1", 0)),
        (lambda: descend(at=np.array([0, 2, 2, 5])), ("at", "rise", "steps = 5", "[0, 2, 2, 5]")),
        (lambda: sample_moments([], basis=np.eye(4)), ("batches", "one prompt")),
        (moments_of_two_responses, ("one response", "d_y = 2")),
        (lambda: next(iter(training_set(TASK, 0, seed=0))), ("n_sequences", ">= 1", 0)),
    ],
)
def test_bad_descents_are_refused(use, words: tuple):
    with refused(*words):
        use()


def test_a_descent_that_diverges_says_when():
    with refused("step 100", "learning_rate 50", error=FloatingPointError):
        descend(std=1.0, learning_rate=50.0, steps=100, every=100)
