"""Learners that are close to an algorithm of the list but differ from it, by name."""

from dataclasses import replace

import torch
from torch import Tensor

from analyses.algorithms import families as make
from analyses.algorithms import near_descents as near
from analyses.algorithms.families import Descent, Drawn, Family, Random, dense, noisy, sparse
from analyses.algorithms.learners import GD, GDPP, NEWTON, law_of
from analyses.lib.theory.learners import lasso, nearest_neighbours, pcr
from mechinterp import Prompts, TaskConfig
from mechinterp.icl.predictors import dmmse, nadaraya_watson, ridge


def with_intercept(prompts: Prompts, penalty: float) -> Tensor:
    x, y = prompts.x.mean(1, keepdim=True), prompts.y.mean(1, keepdim=True)
    moved = replace(prompts, x=prompts.x - x, y=prompts.y - y, x_query=prompts.x_query - x[:, 0])
    return ridge(moved, penalty=penalty) + y[:, 0]


def components(random: Random) -> Drawn:
    task = dense(random)
    kept = task.d_x - int(random.integers(1, 3))
    return lambda prompts: pcr(prompts, components=kept), task


def kernel_ridge(prompts: Prompts, width: float) -> Tensor:
    x, q, y = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
    K, k = ((-torch.cdist(s, x).square() / (2 * width**2 * x.shape[2])).exp() for s in (x, q))
    return (k @ torch.linalg.solve(K + 0.02 * torch.eye(x.shape[1]).double(), y))[:, 0]


def forgetting(prompts: Prompts, keep: float, penalty: float) -> Tensor:
    age = torch.arange(prompts.x.shape[1] - 1, -1, -1).double()
    root = (keep**age).sqrt()[:, None]
    return ridge(replace(prompts, x=prompts.x * root, y=prompts.y * root), penalty=penalty)


def uneven_ridge(random: Random) -> Drawn:
    task = dense(random)
    root = torch.from_numpy(random.uniform(0.3, 2.5, task.d_x)).sqrt()
    return lambda p: ridge(replace(p, x=p.x / root, x_query=p.x_query / root), penalty=4.0), task


def shares(first: str, second: str, share: float) -> Family:
    """Weighted mean of two algorithms."""

    def build(random: Random) -> Drawn:
        task, n_layers = dense(random), make.depth(random)
        a, b = (law_of(name, task, n_layers, random) for name in (first, second))
        return lambda prompts: (1 - share) * a(prompts) + share * b(prompts), task

    return build


def posterior(prompts: Prompts, task: TaskConfig, factor: float = 1, every: int = 1) -> Tensor:
    """Posterior mean for scaled noise, under every n-th task of the pool."""
    pool = task.pool()[::every]
    return dmmse(prompts, pool=pool, noise_var=factor * task.noise_var)


def pool_and_ridge(prompts: Prompts, task: TaskConfig, share: float) -> Tensor:
    own = ridge(prompts, penalty=task.posterior_penalty)
    return share * posterior(prompts, task) + (1 - share) * own


def uneven_pool(prompts: Prompts, task: TaskConfig) -> Tensor:
    """Posterior mean under a prior in which half of the tasks have four times the weight."""
    pool = task.pool().double()
    prior = torch.where(torch.arange(len(pool)) % 2 == 0, 4.0, 1.0).double().log()
    misfit = (prompts.y[:, None].double() - prompts.x[:, None].double() @ pool).square()
    weight = (prior - misfit.sum((2, 3)) / (2 * task.noise_var)).softmax(1)
    return Descent(prompts).read((weight[..., None, None] * pool).sum(1))


def filtered(phi, *ranges, n_layers: int | None = None) -> Family:
    """Predictions of w = phi(S, layer, numbers) b."""

    def learner(prompts: Prompts, etas: list[float], *numbers: float) -> Tensor:
        c = Descent(prompts)
        s, V = torch.linalg.eigh(c.S)
        filters = (phi(s, n, *numbers) for n in range(n_layers or len(etas)))
        return torch.stack([c.read(V @ (one[..., None] * (V.mT @ c.b))) for one in filters])

    if n_layers:
        return make.alone(lambda prompts, *numbers: learner(prompts, [], *numbers), *ranges)
    return make.layers(learner, *ranges, sizes=None)


def third_order(s: Tensor, n: int) -> Tensor:
    """Third-order iteration for the inverse: M (3 - S M (3 - S M))."""
    m = s / s.max() ** 2
    for _ in range(n):
        m = m * (3 - s * m * (3 - s * m))
    return m


def newton_then_descent(s: Tensor, n: int, alpha: float, eta: float) -> Tensor:
    """Two layers of Newton's iteration, then steps of gradient descent."""
    m = alpha * s
    for layer in range(1, n + 1):
        m = 2 * m - m.square() * s if layer < 2 else m + eta * (1 - s * m)
    return m


def damped_newton(s: Tensor, n: int, damping: float) -> Tensor:
    m = 0.3 * s
    for _ in range(n):
        m = m + damping * (m - m.square() * s)
    return m


def estimated_penalty(prompts: Prompts, factor: float) -> Tensor:
    """Ridge with a penalty estimated from the residuals of each prompt."""
    c = Descent(prompts)
    rest = c.y - c.x @ torch.linalg.solve(c.S + 0.01 * torch.eye(c.S.shape[1]).to(c.S), c.b)
    return c.read(c.solved(factor * rest.square().mean((1, 2))[:, None, None]))


def shrunk_least_squares(prompts: Prompts) -> Tensor:
    """Least squares times the James-Stein factor."""
    c = Descent(prompts)
    L, d = c.x.shape[1:]
    w = torch.linalg.solve(c.S, c.b)
    noise = (c.y - c.x @ w).square().sum(1, keepdim=True) / (L - d)
    kept = 1 - (d - 2) * noise / (L * make.inner(w, c.S @ w)).clamp(min=1e-12)
    return c.read(kept.clamp(min=0) * w)


def standardised_ridge(prompts: Prompts, penalty: float) -> Tensor:
    """Ridge on coordinates with unit variance in the prompt."""
    size = prompts.x.std(1, keepdim=True)
    moved = replace(prompts, x=prompts.x / size, x_query=prompts.x_query / size[:, 0])
    return ridge(moved, penalty=penalty)


def reweighted_ridge(prompts: Prompts, penalty: float) -> Tensor:
    """Ridge, repeated with less weight for pairs that it missed."""
    c = Descent(prompts)
    eye = penalty / c.x.shape[1] * torch.eye(c.S.shape[1]).to(c.S)
    rest = (c.y - c.x @ torch.linalg.solve(c.S + eye, c.b)).square()
    x = c.x / (1 + rest / rest.mean(1, keepdim=True))
    return c.read(torch.linalg.solve(x.mT @ c.x / x.shape[1] + eye, x.mT @ c.y / x.shape[1]))


def penalty_by_query(prompts: Prompts, factor: float) -> Tensor:
    """Ridge with a larger penalty for longer queries."""
    c = Descent(prompts)
    return c.read(c.solved(factor * prompts.x_query.square().mean(1)[:, None, None].double()))


def two_penalties(prompts: Prompts, small: float, large: float) -> Tensor:
    """Mean of two ridge regressions."""
    return 0.5 * (ridge(prompts, penalty=small) + ridge(prompts, penalty=large))


def neighbours(prompts: Prompts) -> Tensor:
    return nearest_neighbours(prompts, count=3)


FLOW = filtered(lambda s, n, time: -torch.expm1(-time * (n + 1) * s) / s, (0.8, 1.5))
CENTRED = make.on(make.GD, near.centred_x)
NEAR: dict[str, Family] = {
    "centred descent": CENTRED,
    "descent, scaled read-out": make.layers(near.scaled, [0.75, 0.85, 1.2]),
    "weight decay": near.DECAY,
    "heavy ball": near.HEAVY,
    "Nesterov": near.NESTEROV,
    "conjugate gradients": near.conjugate_gradients,
    "conjugate gradients, last": make.last(near.conjugate_gradients),
    "line search": near.SEARCH,
    "hard thresholding": near.hard_thresholding,
    "least mean squares": near.lms,
    "forgetting": make.alone(forgetting, (0.85, 0.96), (0.2, 1)),
    "free preconditioner": near.free_preconditioner,
    "softmax pairs, small slope": near.pairs_of_heads(0.05, 0.15),
    "softmax pairs, large slope": near.pairs_of_heads(0.4, 0.8),
    "softmax pairs, last": make.last(near.pairs_of_heads(0.05, 0.4)),
    "kernel smoother": make.alone(
        lambda p, omega: nadaraya_watson(p, omega=omega, mu=1.0), (0.3, 0.8)
    ),
    "nearest neighbours": make.alone(neighbours),
    "ridge with intercept": make.alone(with_intercept, (0.1, 1)),
    "principal components": components,
    "saturated residuals": make.descent(near.robust, (0.6, 1.2)),
    "lasso": make.alone(lambda p, alpha: lasso(p, alpha=alpha), (0.05, 0.15), task=sparse),
    "ridge, scaled read-out": make.alone(
        lambda p, factor, penalty: factor * ridge(p, penalty=penalty), [0.85, 1.15], (0.2, 1)
    ),
    "half pool, half ridge": make.given(pool_and_ridge, (0.25, 0.75)),
    "posterior of half the pool": make.given(lambda p, task: posterior(p, task, every=2)),
    "hard thresholding by size": make.descent(
        lambda c, limit: c.moved * (c.moved.abs() >= limit), (0.1, 0.2), **near.SPARSE
    ),
    "uneven ridge": uneven_ridge,
    "a threshold at the end": make.descent(
        near.elastic, (0.08, 0.2), sizes=(0.5, 0.8), task=sparse
    ),
    "gradient flow, last": make.last(FLOW),
    "Chebyshev": make.descent(near.chebyshev, **near.ANY),
    "heavy ball, last": make.last(near.HEAVY),
    "Nesterov, last": make.last(near.NESTEROV),
    "weight decay, last": make.last(near.DECAY),
    "centred descent, last": make.last(CENTRED),
    "averaged iterates": make.then(make.GD, near.averaged),
    "step by the largest eigenvalue": make.descent(near.own_step, (0.9, 1.3), **near.ANY),
    "line search, last": make.last(near.SEARCH),
    "least mean squares, last": make.last(near.lms),
    "minibatches": make.descent(near.minibatches),
    "diagonal preconditioner": near.diagonal_preconditioner,
    "Jacobi": make.descent(near.jacobi, (0.4, 0.7), **near.ANY),
    "Gauss-Seidel": near.gauss_seidel,
    "saturated prediction": make.then(
        make.GD, lambda path, size: size * torch.tanh(path / size), (1.5, 2.5)
    ),
    "softmax pairs, middle slope": near.pairs_of_heads(0.15, 0.4),
    "kernel ridge": make.alone(kernel_ridge, (2.5, 4.0)),
    "pairs of unit length": make.on(make.GD, near.unit_length),
    "sign descent": make.descent(lambda c: c.w + 0.3 / (c.n + 1) * c.gradient().sign(), **near.ANY),
    "exponentiated gradient": make.descent(near.exponentiated, sizes=(0.6, 1.0), task=sparse),
    "posterior at larger noise": make.given(posterior, (3, 6)),
    "root filter": filtered(lambda s, n, c: (s.square() + c).rsqrt(), (0.05, 0.3), n_layers=1),
    "iteration of third order": filtered(third_order, n_layers=3),
    "bounded steps": make.descent(near.bounded_steps, (0.15, 0.3)),
    "some of the pairs": make.descent(near.few_pairs),
    "a third GD++, the rest GD": shares(GD, GDPP, 0.33),
    "coordinates in turn": make.descent(near.blocks, sizes=(0.5, 0.8)),
    "steps of unit length": make.descent(near.of_unit_length, (0.4, 0.7), **near.ANY),
    "Barzilai and Borwein": make.descent(near.two_point_steps, (0.4, 0.7), **near.ANY),
    "halves of the pairs in turn": make.descent(near.halves_in_turn, sizes=(0.2, 0.35)),
    "shrunk moments": make.descent(near.shrunk_moments, (0.15, 0.4)),
    "descent from elsewhere": near.from_elsewhere,
    "steps by the size of y": make.descent(near.step_by_noise, sizes=(0.6, 0.9)),
    "pairs by the length of x": make.descent(near.leverage, (0.3, 0.7)),
    "quadratic features": make.layers(near.quadratic_features, (0.02, 0.06), sizes=(0.25, 0.45)),
    "Newton, then GD": filtered(newton_then_descent, (0.2, 0.35), (0.3, 0.5), n_layers=4),
    "wrong covariance": near.wrong_covariance,
    "largest gradients": near.largest_entries,
    "shrunk gradients": make.descent(near.rounded_steps, (0.05, 0.12), **near.SPARSE),
    "Algorithm 1 with the size of b": make.descent(near.powers_of_b, sizes=(0.8, 1.5), task=sparse),
    "ridge with an estimated penalty": make.alone(estimated_penalty, (2, 6), task=noisy),
    "James and Stein": make.alone(shrunk_least_squares, task=noisy),
    "standardised ridge": make.alone(standardised_ridge, (2, 6)),
    "posterior to a power": make.given(posterior, (0.15, 0.3)),
    "half GD, half Newton, last": make.last(shares(GD, NEWTON, 0.5)),
    "clipped x": make.descent(near.clipped_x, (1.2, 1.8)),
    "cubic residuals": make.descent(
        lambda c, size: c.along(c.rest + size * c.rest**3), (0.05, 0.15), sizes=(0.2, 0.35)
    ),
    "other axes in each layer": near.other_axes_in_each_layer,
    "pairs that weigh half in turn": make.descent(near.sampled_pairs),
    "FISTA": make.descent(near.fast_shrinkage, (0.03, 0.08), sizes=(0.4, 0.6), task=sparse),
    "thresholds by the largest entry": make.descent(
        lambda c, share: make.soft(c.moved, share * c.moved.abs().amax(1, keepdim=True)),
        (0.1, 0.25),
        **near.SPARSE,
    ),
    "damped Newton": filtered(damped_newton, (0.6, 0.85), n_layers=4),
    "rounded predictions": make.then(
        make.GD, lambda path, grid: grid * (path / grid).round(), (0.3, 0.6)
    ),
    "two penalties": make.alone(two_penalties, (0.1, 0.5), (15, 30), task=noisy),
    "reweighted ridge": make.alone(reweighted_ridge, (0.3, 1.5), task=noisy),
    "penalty by the query": make.alone(penalty_by_query, (1, 3), task=noisy),
    "a pool of uneven tasks": make.given(uneven_pool),
    "two descents by the size of y": near.two_descents,
}
