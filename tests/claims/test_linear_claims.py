"""The claims of Zhang, Singh, Latham, Saxe 2025 (arXiv 2501.16265) on linear attention, and what
was derived from them.

A test is named by a claim's number and what is claimed; what misses its tolerance is asserted as
measured, under a name that says so. Claim 4's search for further rests, and errors and bad input,
are in tests/theory/test_linear.py. Weights start from N(0, init^2), times are in tau, and unless
said otherwise N is 31 and the eigenvalues are 0.4, 0.3, 0.2, 0.1. The softmax heads of claim 20
have no value weights on x and no key-query weights on y, as the linear ones; of that claim only the
number of drops is tested, the paper states no levels.
"""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch

from mechinterp.analysis.training.plateaus import Plateaus, crossings, drops, plateaus
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.predictors import one_step_pcr, pcr
from mechinterp.icl.prompts import Prompts
from mechinterp.theory import linear_dynamics as dynamics
from mechinterp.theory import linear_jumps as jumping
from mechinterp.theory.linear import (
    Moments,
    fixed_point,
    fixed_point_loss,
    modes,
    moment_ratio,
    population_moments,
)
from mechinterp.theory.linear_heads import (
    Heads,
    MergedHeads,
    SeparateHeads,
    merged_heads,
    separate_heads,
)
from mechinterp.training.linear.descent import full_batch_descent, sample_moments, training_set
from mechinterp.training.linear.flow import Flow, flow
from tests.conftest import sampled

pytestmark = pytest.mark.slow

EIGENVALUES = np.array([0.4, 0.3, 0.2, 0.1])
MOMENTS = population_moments(EIGENVALUES, context_length=31)
FOUND = modes(MOMENTS)
SEEDS = range(10)


def task(context_length: int = 31) -> TaskConfig:
    law = CovarianceConfig(kind="eigenvalues", eigenvalues=tuple(EIGENVALUES))
    return TaskConfig(
        d_x=4, context_length=context_length, covariance=law, beta_var=1.0, noise_var=0.0
    )


def prompts(count: int, context_length: int = 31) -> Prompts:
    (found,) = training_set(task(context_length), count, seed=1, chunk=count)
    return found


def products(found: Prompts) -> torch.Tensor:
    """z = vec(b x_query^T), [prompt, 16]."""
    b = torch.einsum("bnd,bn->bd", found.x, found.y[..., 0]) / found.x.shape[1]
    return torch.einsum("bi,bj->bij", b, found.x_query).flatten(1)


def trained(heads: Heads, moments: Moments = MOMENTS, gap: float = 1e-8) -> Flow:
    return flow(heads, moments, duration=1e9, until_loss=modes(moments).levels[-1] + gap)


@cache
def separate(init: float, seed: int) -> tuple[Flow, Plateaus]:
    run = trained(separate_heads(5, 4, std=init, seed=seed))
    return run, plateaus(run, MOMENTS)


def all_plateaus(init: float) -> list[Plateaus]:
    return [separate(init, seed)[1] for seed in SEEDS]


@cache
def set_moments(size: int) -> Moments:
    return sample_moments(training_set(task(), size, seed=0), basis=np.eye(4))


def test_01_merged_heads_are_explicit_attention_and_a_network_on_z():
    found, heads = prompts(500), merged_heads(8, 4, std=1.0, seed=0)
    query = torch.cat([found.x_query, torch.zeros(500, 1)], -1)[:, None]
    X = torch.cat([torch.cat([found.x, found.y], -1), query], 1)
    explicit = 0.0
    for v, U in zip(heads.v, heads.U, strict=True):
        W_V, W_KQ = torch.zeros(2, 5, 5, dtype=torch.float64)
        W_V[4, 4], W_KQ[:4, :4] = v, torch.from_numpy(U)
        explicit = explicit + (W_V @ X.mT @ X @ W_KQ @ X.mT)[:, 4, -1] / 31
    w_1, w_2 = (torch.from_numpy(part).reshape(8, -1) for part in (heads.U, heads.v))
    network = products(found) @ w_1.T @ w_2
    scale = explicit.abs().max()
    assert (explicit - network[:, 0]).abs().max() < 1e-10 * scale
    reduced = products(found) @ torch.from_numpy(heads.M).ravel()
    assert (reduced - network[:, 0]).abs().max() < 1e-10 * scale


def test_01_merged_heads_and_the_network_descend_alike():
    found, heads = prompts(500), merged_heads(8, 4, std=1e-2, seed=0)
    z, y = products(found), found.y_query
    layers = [torch.from_numpy(part).reshape(8, -1).clone() for part in (heads.U, heads.v)]
    losses = []
    for _ in range(301):
        w_1, w_2 = (layer.requires_grad_() for layer in layers)
        loss = (y - z @ w_1.T @ w_2).square().mean()
        gradients = torch.autograd.grad(loss, layers)
        losses.append(loss.item())
        layers = [(w - 0.2 * g).detach() for w, g in zip(layers, gradients, strict=True)]
    moments = sample_moments([found], basis=np.eye(4))
    run = full_batch_descent(heads, moments, FOUND, learning_rate=0.2, steps=300)
    np.testing.assert_allclose(run.loss, losses, rtol=1e-8)
    assert losses[-1] < 0.3


def test_02_moments_are_those_of_samples():
    sampled = set_moments(400_000)
    for measured, exact in ((sampled.yz, MOMENTS.yz), (sampled.zz, MOMENTS.zz)):
        assert np.linalg.norm(measured - exact) < 0.01 * np.linalg.norm(exact)
    x = np.random.default_rng(0).standard_normal((100_000, 31, 4)) * EIGENVALUES**0.5
    gram = np.matmul(x.transpose(0, 2, 1), x) / 31
    square = np.einsum("bij,bjk->ik", gram, gram) / len(x)
    exact = np.diag(EIGENVALUES**2 * moment_ratio(EIGENVALUES, context_length=31))
    assert np.linalg.norm(square - exact) < 0.01 * np.linalg.norm(exact)


def test_03_loss_and_gradient_are_those_of_samples_and_of_autograd():
    found, M = prompts(100_000), np.random.default_rng(0).standard_normal((4, 4))
    z, y = products(found), found.y_query[:, 0]
    rest = y - z @ torch.from_numpy(M).ravel()
    pull = (rest[:, None] * z).numpy()
    squares = rest.square().numpy()
    assert abs(squares.mean() - MOMENTS.loss(M)) < 3 * squares.std() / 1e5**0.5
    error = (pull.mean(0) - MOMENTS.gradient(M).ravel()) / (pull.std(0) / 1e5**0.5)
    assert np.abs(error).max() < 4  # the largest of 16
    weight = torch.tensor(M, requires_grad=True)
    zz, yz = torch.from_numpy(MOMENTS.zz), torch.from_numpy(MOMENTS.yz)
    (
        MOMENTS.yy - 2 * (yz * weight).sum() + torch.einsum("ij,ijkl,kl->", weight, zz, weight)
    ).backward()
    np.testing.assert_allclose(-weight.grad.numpy() / 2, MOMENTS.gradient(M), atol=1e-12)


def test_04_all_sixteen_subsets_are_rests_at_their_levels():
    for count in range(5):
        for subset in combinations(range(4), count):
            M = fixed_point(FOUND, subset)
            assert abs(MOMENTS.loss(M) - fixed_point_loss(FOUND, subset)) < 1e-12
            rows = list(subset)
            v = FOUND.targets[rows] ** (1 / 3)
            keys = (v[:, None] * FOUND.vectors[:, rows].T)[:, None]
            pull = SeparateHeads(v=v, K=keys, Q=keys).velocity(MOMENTS.gradient(M))
            assert all(np.abs(p).max(initial=0) < 1e-12 for p in (pull.v, pull.K, pull.Q))
    assert FOUND.levels.round(10).tolist() == [
        1,
        0.6405797101,
        0.377372163,
        0.2098045954,
        0.1359950716,
    ]


def test_05_merged_heads_drop_once_and_separate_heads_once_per_direction():
    for seed in range(20):
        run = flow(merged_heads(8, 4, std=1e-2, seed=seed), MOMENTS, duration=2000.0)
        assert len(drops(run)) == 1
        assert abs(run.loss[-1] - FOUND.levels[-1]) < 1e-6
    for init in (1e-2, 1e-3):
        assert [len(found.drop_time) for found in all_plateaus(init)] == [4] * len(SEEDS)


def test_06_conserved_quantities_drift_less_than_1e_8():
    merged = trained(merged_heads(8, 4, std=1e-2, seed=0)).heads.conserved()
    difference, value = separate(1e-2, 0)[0].heads.conserved()
    for quantity in (merged, difference, value):
        assert np.abs(quantity - quantity[0]).max() < 1e-8


def test_07_aligned_white_merged_heads_are_eq_10():
    moments = population_moments(np.ones(4), context_length=31)
    r = np.random.default_rng(0).standard_normal(8)
    r /= np.linalg.norm(r)
    heads = MergedHeads(v=1e-2 * r, U=1e-2 * r[:, None, None] * np.eye(4) / 2)
    run = flow(heads, moments, duration=60.0)
    _, loss = dynamics.white_time_course(run.time, modes(moments), scale=1e-2)
    assert np.abs(run.loss - loss).max() < 1e-8 * loss[0]


@pytest.mark.parametrize(("init", "tolerance"), [(1e-2, 5e-3), (1e-3, 1e-3)])
def test_07_white_merged_heads_follow_eq_10(init, tolerance):
    moments = population_moments(np.ones(4), context_length=31)
    found = modes(moments)
    for seed in range(5):
        heads = merged_heads(8, 4, std=init, seed=seed)
        scale = dynamics.effective_scale(heads, found)
        half = dynamics.white_half_time(found, scale=scale)
        run = flow(heads, moments, duration=4 * half, times=np.linspace(0, 4 * half, 2001))
        _, loss = dynamics.white_time_course(run.time, found, scale=scale)
        assert np.abs(run.loss - loss).max() < tolerance * loss[0]
        sigma = np.trace(run.M, axis1=1, axis2=2) / 4
        measured = np.interp(found.targets[0] / 2, sigma, run.time)
        assert abs(measured / half - 1) < tolerance


def test_08_escape_of_merged_heads_takes_a_constant_per_decade():
    inits, half = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2], []
    for init in inits:
        run = trained(merged_heads(8, 4, std=init, seed=0))
        assert len(drops(run)) == 1
        half.append(np.interp(-(1 + FOUND.levels[-1]) / 2, -run.loss, run.time))
    slope = np.diff(half) / np.diff(-np.log(inits))
    np.testing.assert_allclose(slope, 1 / np.linalg.norm(FOUND.rates), rtol=1e-2)


def test_09_merged_heads_follow_five_numbers():
    times = np.linspace(0, 400, 2001)
    for seed in range(5):
        heads = merged_heads(8, 4, std=1e-3, seed=seed)
        run = flow(heads, MOMENTS, duration=400.0, times=times)
        scale = dynamics.effective_scale(heads, FOUND)
        loss = dynamics.merged_time_course(times, FOUND, scale=scale)[2]
        assert np.abs(run.loss - loss).max() < 5e-4


@pytest.mark.parametrize(("init", "tolerance"), [(1e-2, 1e-3), (1e-3, 1e-5)])
def test_10_separate_heads_visit_all_levels_in_order(init, tolerance):
    for found in all_plateaus(init):
        assert found.n_learned.tolist() == [0, 1, 2, 3, 4]
        assert np.abs(found.loss - FOUND.levels).max() < tolerance
        assert np.array_equal(found.learned > 0.5, np.tri(5, 4, -1) > 0)


@pytest.mark.parametrize(("init", "norm"), [(1e-2, 3e-2), (1e-3, 1e-3)])
def test_11_one_head_holds_each_direction(init, norm):
    misses, ratios = [], []
    for seed in SEEDS:
        run, found = separate(init, seed)
        for row in range(1, 5):
            place = int(np.flatnonzero(run.time == found.time[row])[0])
            head = np.abs(found.value[row] * found.key_cosine[row, :, 0, row - 1]).argmax()
            v = abs(found.value[row, head])
            assert abs(v / FOUND.targets[row - 1] ** (1 / 3) - 1) < 0.03
            for cosine in (found.key_cosine, found.query_cosine):
                misses.append(1 - abs(cosine[row, head, 0, row - 1]))
            for part in (run.heads.K, run.heads.Q):
                ratios.append(abs(np.linalg.norm(part[place, head]) / v - 1))
    assert np.median(misses) < 1e-3
    assert max(ratios) < norm, max(ratios)


def growth_error(run: Flow, mode: int) -> float:
    """Largest difference in |v| / v_inf from eq. (21), matched at 0.3, until the head is done."""
    end = FOUND.targets[mode] ** (1 / 3)
    done = int(np.flatnonzero(run.learned[:, mode] > 0.999)[0])
    head = np.abs(run.heads.v[done] * run.heads.K[done, :, 0, mode]).argmax()
    v = np.abs(run.heads.v[: done + 1, head]) / end
    last = int(np.flatnonzero(v < 0.3)[-1])
    start = np.interp(0.3, v[last : last + 2], run.time[last : last + 2])
    law = {"rate": FOUND.rates[mode], "target": FOUND.targets[mode]}
    value = jumping.growth_value(run.time[last + 1 : done + 1] - start, 0.3 * end, **law)
    return float(np.abs(value / end - v[last + 1 :]).max())


def growth_errors(init: float) -> list[float]:
    return [growth_error(separate(init, seed)[0], mode) for seed in SEEDS for mode in range(4)]


def test_12_value_weights_follow_eq_21():
    assert np.median(growth_errors(1e-2)) < 1e-2
    assert np.median(growth_errors(1e-3)) < 1e-3
    assert max(growth_errors(1e-3)) < 1e-2


def test_12_closed_form_of_eq_21_goes_both_ways():
    for rate, target in zip(FOUND.rates, FOUND.targets, strict=True):
        law = {"rate": rate, "target": target}
        v = target ** (1 / 3) * np.linspace(0.02, 0.98, 25)
        elapsed = jumping.growth_time(v, **law) - jumping.growth_time(v[:1], **law)
        np.testing.assert_allclose(jumping.growth_value(elapsed, v[0], **law), v, rtol=1e-9)


@pytest.mark.parametrize(("init", "tolerance"), [(1e-2, 2e-2), (1e-3, 5e-3)])
def test_13_jumps_come_when_the_initial_weights_foretell(init, tolerance):
    errors = []
    for seed, found in zip(SEEDS, all_plateaus(init), strict=True):
        assert found.predicted.mode.tolist() == [0, 1, 2, 3]
        errors.append(np.abs(found.predicted.time / found.crossing_time - 1))
        bound = jumping.first_jump_bound(separate_heads(5, 4, std=init, seed=seed), FOUND)
        assert bound < found.crossing_time[0]
    assert np.median(errors, axis=0).max() < tolerance


def test_14_plateaus_last_in_proportion_to_one_over_init_and_lambda_squared():
    for seed in SEEDS:
        first = {init: separate(init, seed)[1].crossing_time[0] * init for init in (1e-2, 1e-3)}
        run = trained(separate_heads(5, 4, std=3e-3, seed=seed))
        middle = crossings(run, FOUND.levels)[0] * 3e-3
        assert abs(first[1e-2] / first[1e-3] - 1) < 0.04
        assert abs(middle / first[1e-3] - 1) < 0.02
    scaled = []
    for mode in range(4):
        one = 0.02 * np.eye(4)[mode].reshape(1, 1, 4)
        heads = SeparateHeads(v=np.array([0.02]), K=one, Q=one)
        run = flow(heads, MOMENTS, duration=55 / FOUND.rates[mode])
        half = np.interp(FOUND.targets[mode] ** (1 / 3) / 2, run.heads.v[:, 0], run.time)
        scaled.append(half * FOUND.rates[mode])
    assert max(scaled) / min(scaled) < 1.05


@pytest.mark.parametrize(("init", "median", "worst"), [(1e-2, 1e-6, 1e-2), (1e-3, 1e-6, 1e-6)])
def test_15_plateaus_are_principal_component_regression(init, median, worst):
    distance = np.array([found.pcr_distance for found in all_plateaus(init)])
    assert np.median(distance) < median
    assert distance.max() < worst


def test_15_with_long_contexts_plateaus_are_the_projected_task():
    found, covariance = prompts(2000, 1000), np.diag(EIGENVALUES)
    for components in range(5):
        kept = found.x_query * (torch.arange(4) < components)
        exact = torch.einsum("bdk,bd->bk", found.beta, kept)
        ours = one_step_pcr(found, components=components, covariance=covariance)
        assert (ours - exact).square().mean() < 0.006
        regression = pcr(found, components=components, covariance=covariance)
        assert (ours - regression).square().mean() < 0.01


def test_16_heads_of_rank_two_rest_long_only_where_two_divides():
    inits = (1e-2, 1e-3)
    expected = [
        np.diff([jumping.residence_in_head(FOUND, a, a + 1, scale=s) for s in inits])[0]
        for a in (0, 2)
    ]
    for seed in range(5):
        stays = []
        for init in inits:
            run = trained(separate_heads(3, 4, std=init, seed=seed, rank=2))
            stays.append(np.diff(crossings(run, FOUND.levels), prepend=0.0))
        ratio, rise = stays[1] / stays[0], stays[1] - stays[0]
        assert np.abs(ratio[[0, 2]] / 10 - 1).max() < 0.1
        np.testing.assert_allclose(rise[[1, 3]], expected, rtol=0.03)


@pytest.mark.parametrize(
    ("n_heads", "rank"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (1, 4), (3, 3)]
)
def test_17_all_parametrizations_end_at_the_level_of_their_number(n_heads, rank):
    heads = separate_heads(n_heads, 4, std=1e-2, seed=0, rank=rank)
    run = flow(heads, MOMENTS, duration=1e6)
    assert abs(run.loss[-1] - FOUND.levels[min(n_heads * rank, 4)]) < 1e-5


def test_18_larger_weights_shorten_the_first_plateau_until_it_is_gone():
    times = []
    for init in (1e-3, 1e-2, 5e-2, 0.1, 0.2, 0.5, 1.0):
        run = trained(separate_heads(5, 4, std=init, seed=0))
        times.append(np.interp(-0.9, -run.loss, run.time))
    np.testing.assert_allclose(times, [10737, 1066, 207, 99.1, 45.1, 11.4, 2.16], rtol=5e-3)


@pytest.mark.parametrize("size", [80_000, 5000])
def test_19_full_batch_descent_rests_near_the_levels(size):
    tau, factor = dynamics.learning_rate_time(0.02, n_factors=3, context_length=31)
    heads, moments = separate_heads(5, 4, std=1e-2 * factor, seed=0), set_moments(size)
    options = {"learning_rate": 1 / (2 * tau), "steps": 20_000, "every": 5}
    found = plateaus(full_batch_descent(heads, moments, FOUND, **options), MOMENTS)
    gap = np.abs(found.loss - FOUND.levels)
    if size == 80_000:
        assert gap[0] <= 0.015
        assert gap[1:].max() < 3e-3
    else:
        assert gap[-1] <= 0.01
    # Nearer to the loss that the rests of the population have on this set.
    rests = [moments.loss(fixed_point(FOUND, range(count))) for count in range(5)]
    assert np.abs(found.loss - rests).mean() < gap.mean()


def softmax_descent(start: Heads, *, learning_rate: float, steps: int) -> tuple[np.ndarray, ...]:
    """Losses of full-batch descent on 1000 prompts with softmax heads, query among the keys, and
    the last v."""
    found = prompts(1000)
    x = torch.cat([found.x, found.x_query[:, None]], 1).float()
    y = torch.cat([found.y[..., 0], torch.zeros(1000, 1)], 1).float()
    query, target, losses = found.x_query.float(), found.y_query[:, 0].float(), []
    matrices = (start.K[:, 0], start.Q[:, 0]) if isinstance(start, SeparateHeads) else (start.U,)
    weights = [torch.from_numpy(p).float().requires_grad_() for p in (start.v, *matrices)]
    for _ in range(steps):
        v, *rest = weights
        if len(rest) == 2:
            keys = (query @ rest[1].T)[..., None] * rest[0]
        else:
            keys = torch.einsum("bj,hij->bhi", query, rest[0])
        y_hat = torch.einsum("h,bhn,bn->b", v, torch.softmax(keys @ x.mT, -1), y)
        loss = (target - y_hat).square().mean()
        losses.append(loss.item())
        with torch.no_grad():
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= learning_rate * slope
    return np.array(losses), weights[0].detach().numpy()


def maxima(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fall of the loss per step, and where it has maxima above 5% of the largest."""
    fall = -np.gradient(losses)
    middle = fall[1:-1]
    top = (middle > fall[:-2]) & (middle >= fall[2:]) & (middle > 0.05 * fall.max())
    return fall, 1 + np.flatnonzero(top)


def test_20_merged_softmax_heads_drop_once_and_cancel():
    heads = merged_heads(8, 4, std=1e-3, seed=0)
    losses, v = softmax_descent(heads, learning_rate=0.1, steps=600)
    _, top = maxima(losses)
    assert len(top) == 1
    assert losses[-1] < 0.25
    assert abs(v.sum()) < 0.1 * np.abs(v).sum()


@pytest.mark.parametrize("seed", sampled([0, 1], keep=lambda seed: seed == 0))
def test_20_separate_softmax_heads_drop_more_than_once(seed):
    heads = separate_heads(5, 4, std=5e-2, seed=seed)
    losses, _ = softmax_descent(heads, learning_rate=0.3, steps=2500)
    fall, top = maxima(losses)
    assert len(top) >= 2
    first, second = top[:2]
    assert fall[first:second].min() < 0.2 * fall[second]
