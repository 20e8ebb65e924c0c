"""Linear attention in closed form, against explicit sequences, automatic differentiation and each other."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from analyses.lib.theory import linear_dynamics as dynamics
from analyses.lib.theory import linear_jumps as bounds
from analyses.lib.theory.linear import conserved, fixed_point, fixed_point_loss, moment_ratio
from mechinterp.theory import linear_jumps as jumping
from mechinterp.theory.linear import (
    SeparateHeads,
    merged_heads,
    modes,
    population_moments,
    separate_heads,
)
from mechinterp.theory.linear_jumps import claims_not_applying
from tests.conftest import refused

EIGENVALUES = np.array([0.4, 0.3, 0.2, 0.1])
TILTED = np.array([[0.5, 0.1, 0.0], [0.1, 0.3, -0.05], [0.0, -0.05, 0.2]])
OMEGA = np.array([[1.5, 0.2, 0.1], [0.2, 0.7, 0.0], [0.1, 0.0, 1.1]])
VARIANTS = {
    "plain": {"context_length": 7},
    "noise": {"context_length": 7, "noise_var": 0.6},
    "task covariance": {"context_length": 7, "task_covariance": OMEGA},
    "lengths": {"context_length": [2, 5, 9]},
    "lengths over tokens": {"context_length": [2, 5, 9], "count_query": True, "noise_var": 0.3},
}


@pytest.fixture
def moments():
    return population_moments(EIGENVALUES, context_length=31)


@pytest.fixture
def directions(moments):
    return modes(moments)


def random_matrix(seed, d_x):
    return np.random.default_rng(seed).standard_normal((d_x, d_x))


def assert_near(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def at_rest(heads, moments):
    """That the gradient on all weights is zero."""
    pull = heads.velocity(moments.gradient(heads.M))
    return all(np.abs(part).max(initial=0) < 1e-12 for part in vars(pull).values())


def sequences(rng, count, length, *, task_covariance=None, noise_var=0.0):
    """Tokens [sequence, token, 4] with the query last and its label 0, and the query's target."""
    x = rng.standard_normal((count, length + 1, 3)) @ np.linalg.cholesky(TILTED).T
    root = np.eye(3) if task_covariance is None else np.linalg.cholesky(task_covariance)
    w = rng.standard_normal((count, 3)) @ root.T
    y = np.einsum("bnd,bd->bn", x, w)
    noisy = y + noise_var**0.5 * rng.standard_normal(y.shape)
    noisy[:, -1] = 0
    return np.concatenate([x, noisy[..., None]], -1), y[:, -1]


def explicit_attention(tokens, heads, *, divisor):
    """Last entry of sum_i W_V X X^T W_KQ X / N at the query, from whole token matrices."""
    y_hat = 0.0
    for v, U in zip(heads.v, heads.U, strict=True):
        W_V, W_KQ = np.zeros((4, 4)), np.zeros((4, 4))
        W_V[3, 3], W_KQ[:3, :3] = v, U
        X = tokens.transpose(0, 2, 1)
        y_hat = y_hat + (W_V @ X @ tokens @ W_KQ @ X)[:, 3, -1] / divisor
    return y_hat


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_population_loss_is_that_of_explicit_sequences(variant):
    options = VARIANTS[variant]
    law = {name: options[name] for name in ("task_covariance", "noise_var") if name in options}
    rng, heads = np.random.default_rng(0), merged_heads(2, 3, std=0.8, seed=1)
    squares = []
    for length in np.atleast_1d(options["context_length"]):
        tokens, target = sequences(rng, 40_000, int(length), **law)
        divisor = length + 1 if options.get("count_query") else length
        squares.append((target - explicit_attention(tokens, heads, divisor=divisor)) ** 2)
    error = np.sqrt(np.mean([s.var() / s.size for s in squares]) / len(squares))
    measured = np.mean([s.mean() for s in squares])
    assert abs(population_moments(TILTED, **options).loss(heads.M) - measured) < 3 * error


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_is_minus_half_the_derivative_of_the_loss(variant):
    moments = population_moments(TILTED, **VARIANTS[variant])
    M = torch.tensor(random_matrix(0, 3), requires_grad=True)
    yz, zz = torch.from_numpy(moments.yz), torch.from_numpy(moments.zz)
    loss = moments.yy - 2 * (yz * M).sum() + torch.einsum("ij,ijkl,kl->", M, zz, M)
    (gradient,) = torch.autograd.grad(loss, M)
    M = M.detach().numpy()
    np.testing.assert_allclose(moments.loss(M), loss.item(), rtol=1e-12)
    assert_near(moments.gradient(M), -gradient.numpy() / 2)


def test_moment_ratio_and_targets(directions):
    ratio = moment_ratio(EIGENVALUES, context_length=31)
    np.testing.assert_allclose(ratio, [1.112903, 1.139785, 1.193548, 1.354839], atol=5e-7)
    np.testing.assert_allclose(directions.targets, 1 / (EIGENVALUES * ratio), rtol=1e-12)
    np.testing.assert_allclose(directions.targets, [2.24638, 2.92453, 4.18919, 7.38095], atol=5e-6)
    np.testing.assert_allclose(directions.rates, EIGENVALUES**2, rtol=1e-12)
    ends = [1.30967, 1.43005, 1.61204, 1.94702]
    np.testing.assert_allclose(directions.targets ** (1 / 3), ends, atol=5e-6)


LEVELS = {
    31: [1, 0.6405797101, 0.3773721630, 0.2098045954, 0.1359950716],
    8: [1, 0.72174, 0.52714, 0.41286, 0.37075],
    16: [1, 0.67179, 0.43573, 0.29027, 0.23102],
    100: [1, 0.61353, 0.32599, 0.13731, 0.04722],
    1000: [1, 0.60140, 0.30269, 0.10388, 0.00497],
}


@pytest.mark.parametrize("context_length", LEVELS)
def test_levels(context_length):
    levels = modes(population_moments(EIGENVALUES, context_length=context_length)).levels
    tolerance = 5e-11 if context_length == 31 else 5.1e-6
    np.testing.assert_allclose(levels, LEVELS[context_length], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("count_query", "expected"),
    [(True, [1, 0.7042, 0.4948, 0.3694, 0.3213]), (False, [1, 0.725, 0.5331, 0.4207, 0.3795])],
)
def test_levels_over_varying_lengths(count_query, expected):
    moments = population_moments(EIGENVALUES, context_length=range(1, 32), count_query=count_query)
    np.testing.assert_allclose(modes(moments).levels, expected, atol=6e-5)


def rotated_population(task_eigenvalues):
    basis = np.linalg.qr(random_matrix(5, 4))[0]
    task = None if task_eigenvalues is None else (basis * task_eigenvalues) @ basis.T
    law = {"context_length": 31, "noise_var": 0.2, "task_covariance": task}
    return population_moments((basis * EIGENVALUES) @ basis.T, **law)


@pytest.mark.parametrize("task_eigenvalues", [None, np.array([0.2, 1.0, 2.0, 0.5])], ids=str)
def test_every_subset_is_a_fixed_point_with_its_loss(task_eigenvalues):
    moments = rotated_population(task_eigenvalues)
    directions = modes(moments)
    for count in range(5):
        for subset in combinations(range(4), count):
            M = fixed_point(directions, subset)
            assert_near(moments.loss(M), fixed_point_loss(directions, subset))
            rows = list(subset)
            v, K = np.cbrt(directions.targets[rows]), directions.vectors[:, rows].T
            keys = (v[:, None] * K)[:, None]
            heads = SeparateHeads(v=v, K=keys, Q=keys)
            assert_near(heads.M, M)
            assert at_rest(heads, moments)
    np.testing.assert_allclose(fixed_point(directions, range(4)), moments.minimiser(), atol=1e-11)
    np.testing.assert_allclose(
        fixed_point_loss(directions, range(4)), directions.levels[-1], rtol=1e-12
    )


def test_loss_falls_apart_into_directions(moments, directions):
    M = random_matrix(8, 4)
    ratio = moment_ratio(EIGENVALUES, context_length=31)
    across = np.outer(EIGENVALUES**2 * ratio, EIGENVALUES) * M**2
    expected = directions.diagonal_loss(directions.learned(M)) + across.sum() - np.trace(across)
    np.testing.assert_allclose(moments.loss(M), expected, rtol=1e-12)
    rest = (EIGENVALUES / ratio * (1 - directions.learned(M)) ** 2).sum()
    np.testing.assert_allclose(
        directions.diagonal_loss(directions.learned(M)), directions.levels[-1] + rest
    )


def test_coupled_moments_have_no_modes():
    with pytest.raises(ValueError, match="must share one eigenbasis; they couple directions by"):
        modes(population_moments(TILTED, context_length=7, task_covariance=OMEGA))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"covariance": np.array([0.1, -0.2])}, ("covariance", "positive", "[0.1, -0.2]")),
        ({"covariance": np.array([0.1, np.nan])}, ("covariance", "positive")),
        ({"covariance": np.array([[1.0, 0.5], [0.0, 1.0]])}, ("covariance", "symmetric")),
        ({"task_covariance": np.array([1.0, -1.0])}, ("task_covariance", "positive")),
        ({"task_covariance": np.zeros((2, 2))}, ("task_covariance", "not all 0")),
        ({"task_covariance": np.ones(3)}, ("size 2", "got 3")),
        ({"context_length": [3, 0]}, ("context_length", ">= 1", [3, 0])),
        ({"noise_var": -0.1}, ("noise_var", ">= 0", -0.1)),
    ],
)
def test_bad_populations_are_refused(options: dict, words: tuple):
    options = {"covariance": np.ones(2), "context_length": 5} | options
    with refused(*words):
        population_moments(options.pop("covariance"), **options)


def test_claims_are_withdrawn_where_they_do_not_apply():
    assert claims_not_applying(EIGENVALUES, rank=1, n_heads=4) == ()
    (repeated,) = claims_not_applying(np.array([0.3, 0.1, 0.3]), rank=1, n_heads=3)
    assert repeated.startswith("Eigenvalues repeat")
    (few,) = claims_not_applying(EIGENVALUES, rank=1, n_heads=3)
    assert few.startswith("3 head(s) of rank 1 learn at most 3 of 4 directions")
    few, wide = claims_not_applying(EIGENVALUES, rank=3, n_heads=1)
    assert few.startswith("1 head(s) of rank 3 learn at most 3")
    assert "divides by 3" in wide


# Heads


HEADS = merged_heads(3, 4, std=0.5, seed=0), separate_heads(3, 4, std=0.5, seed=0, rank=2)


def test_velocity_of_heads_is_the_gradient_of_the_loss(moments):
    for heads in HEADS:
        weights = [torch.tensor(part, requires_grad=True) for part in vars(heads).values()]
        M = torch.einsum("h,hij->ij" if len(weights) == 2 else "h,hri,hrj->ij", *weights)
        assert_near(heads.M, M.detach().numpy())
        yz, zz = torch.from_numpy(moments.yz), torch.from_numpy(moments.zz)
        loss = moments.yy - 2 * (yz * M).sum() + torch.einsum("ij,ijkl,kl->", M, zz, M)
        velocity = vars(heads.velocity(moments.gradient(heads.M))).values()
        for part, gradient in zip(velocity, torch.autograd.grad(loss, weights), strict=True):
            assert_near(part, -gradient.numpy() / 2)


def test_velocity_leaves_the_conserved_quantities(moments):
    for heads in HEADS:
        pull = vars(heads.velocity(moments.gradient(heads.M)))
        moved = type(heads)(**{n: part + 1e-7 * pull[n] for n, part in vars(heads).items()})
        for after, before in zip(conserved(moved), conserved(heads), strict=True):
            assert_near(after, before)
        assert abs(np.square(moved.v).sum() - np.square(heads.v).sum()) > 1e-9


# Time courses


def solve(velocity, start, times):
    accuracy = {"rtol": 1e-12, "atol": 1e-15}
    return solve_ivp(velocity, (0, times[-1]), start, "DOP853", t_eval=times, **accuracy).y


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_white_time_course_solves_its_equation(scale):
    directions = modes(population_moments(np.full(4, scale), context_length=31))
    times = np.linspace(0, 12 / scale**2, 50)
    sigma, loss = dynamics.white_time_course(times, directions, scale=1e-2, tau=2.0)
    ratio = 1 + 5 / 31

    def logistic(_, value):
        return 2 * (scale**2 * 2 * value - 2 * scale**3 * ratio * value**2) / 2.0

    expected = solve(logistic, [1e-4 / 2], times)[0]
    np.testing.assert_allclose(sigma, expected, rtol=1e-9)
    parabola = scale * 4 - 2 * scale**2 * 4 * sigma + scale**3 * ratio * 4 * sigma**2
    np.testing.assert_allclose(loss, parabola, rtol=1e-11)
    half = dynamics.white_half_time(directions, scale=1e-2, tau=2.0)
    middle, _ = dynamics.white_time_course(np.array([half, 1e5]), directions, scale=1e-2, tau=2.0)
    np.testing.assert_allclose(middle, [0.5 / (scale * ratio), 1 / (scale * ratio)], rtol=1e-12)


@pytest.mark.parametrize("mode", range(4))
def test_growth_solves_the_scalar_equation(directions, mode):
    lam, ratio = EIGENVALUES[mode], moment_ratio(EIGENVALUES, context_length=31)[mode]
    law = {"rate": directions.rates[mode], "target": directions.targets[mode], "tau": 3.0}

    def velocity(_, v):
        return (lam**2 * v**2 - lam**3 * ratio * v**5) / 3.0

    times = np.linspace(0, 3.2 / (0.02 * lam**2), 60)
    grown = solve(velocity, [0.02], times)[0]
    end = directions.targets[mode] ** (1 / 3)
    assert grown[-1] > 0.8 * end
    np.testing.assert_allclose(jumping.growth_value(times, 0.02, **law), grown, rtol=1e-9)
    inside = grown < 0.999 * end
    elapsed = jumping.growth_time(grown[inside], **law) - jumping.growth_time(np.array(0.02), **law)
    np.testing.assert_allclose(elapsed, times[inside], rtol=1e-9, atol=1e-7)


def test_predicted_jumps_of_heads_that_grow_alone(directions):
    # Each head sits on one eigenvector with equal weights: v' = g v^2 until it jumps.
    start = np.array([0.02, 0.03, 0.01, 0.05])
    weights = (start[:, None] * np.eye(4))[:, None]
    jumps = jumping.predict_jumps(SeparateHeads(v=start, K=weights, Q=weights), directions)
    limit = jumping.free_threshold() * directions.targets ** (1 / 3)
    times = (1 / start - 1 / limit) / directions.rates
    order = times.argsort()
    assert jumps.mode.tolist() == jumps.head.tolist() == order.tolist()
    np.testing.assert_allclose(jumps.time, times[order], rtol=1e-7)
    # The exact middle of the drop, by the scalar equation.
    for mode, (rate, target) in enumerate(zip(directions.rates, directions.targets, strict=True)):
        ends = np.array([start[mode], jumping.MIDPOINT * target ** (1 / 3)])
        elapsed = np.diff(jumping.growth_time(ends, rate=rate, target=target))
        np.testing.assert_allclose(elapsed, times[mode], rtol=1e-5)


def test_residence_grows_by_a_constant_per_decade(directions):
    for pair, expected in (((0, 1), 8.54), ((2, 3), 107.1)):
        short, long = (bounds.residence_in_head(directions, *pair, scale=s) for s in (1e-2, 1e-3))
        assert abs(long - short - expected) < 0.05
    assert bounds.long_levels(directions, rank=1) == [0, 1, 2, 3, 4]
    assert bounds.long_levels(directions, rank=3) == [0, 3, 4]


def at_zero(rank: int = 1) -> SeparateHeads:
    return SeparateHeads(v=np.zeros(2), K=np.zeros((2, rank, 4)), Q=np.zeros((2, rank, 4)))


# Key and query on different eigenvectors, and no value weight: at rest for ever.
AT_REST = SeparateHeads(v=np.zeros(1), K=np.eye(4)[None, :1], Q=np.eye(4)[None, 1:2])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: fixed_point(f, [4]), ("0 to 3", 4)),
        (lambda f: fixed_point_loss(f, [1, 1]), ("each once", [1, 1])),
        (lambda f: claims_not_applying(EIGENVALUES, rank=0, n_heads=3), ("rank", ">= 1", 0)),
        (lambda f: merged_heads(2, 3, std=0.0, seed=0), ("std", "> 0", 0.0)),
        (lambda f: separate_heads(0, 3, std=0.1, seed=0), ("n_heads", ">= 1", 0)),
        (lambda f: dynamics.white_half_time(f, scale=0.0), ("scale", "> 0", 0.0)),
        (lambda f: dynamics.white_half_time(f, scale=0.1), ("covariance", "white")),
        (lambda f: jumping.growth_time(np.ones(1), rate=1.0, target=1.0), ("v", "between 0 and 1")),
        (lambda f: jumping.growth_time(np.ones(1) / 2, rate=0.0, target=1.0), ("rate", "> 0")),
        (lambda f: jumping.predict_jumps(at_zero(), f), ("weights", "> 0")),
        (lambda f: jumping.predict_jumps(at_zero(rank=2), f), ("rank 1", "got 2")),
        (lambda f: jumping.predict_jumps(AT_REST, f), ("grow", "none")),
        (lambda f: bounds.residence_in_head(f, 0, 1, scale=0.0), ("scale", "> 0")),
        (lambda f: dynamics.learning_rate_time(0.0, n_factors=2), ("learning_rate", "> 0")),
    ],
)
def test_what_theory_does_not_cover_is_refused(directions, call, words: tuple):
    with refused(*words):
        call(directions)
