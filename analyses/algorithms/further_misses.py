"""Still more near misses, as functions of prompts."""

import torch
from torch import Tensor

from analyses.algorithms import near_descents as near
from analyses.algorithms.later_misses import noisy
from analyses.algorithms.learners import dense, pooled, sparse
from analyses.algorithms.near_misses import filtered
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, task_pool


def clipped_x(random: near.Random) -> near.Drawn:
    (etas, n_layers), limit = near.steps(random), float(random.uniform(1.2, 1.8))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        x = c.x.clamp(-limit, limit)
        return w[-1] + etas[n] * x.mT @ (c.y - x @ w[-1]) / x.shape[1]

    return near.walk(step, n_layers), dense(random)


def cubic_residuals(random: near.Random) -> near.Drawn:
    (etas, n_layers), size = near.steps(random, 0.2, 0.35), float(random.uniform(0.05, 0.15))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        rest = c.y - c.x @ w[-1]
        return w[-1] + etas[n] * c.x.mT @ (rest + size * rest**3) / c.x.shape[1]

    return near.walk(step, n_layers), dense(random)


def other_axes_in_each_layer(random: near.Random) -> near.Drawn:
    """Steps whose sizes differ by coordinate, otherwise in every layer."""
    task, (etas, n_layers) = dense(random), near.steps(random, 0.25, 0.45)
    d = torch.from_numpy(random.uniform(0.6, 1.4, (n_layers, task.d_x, 1)))
    return near.walk(lambda c, n, w: w[-1] + etas[n] * d[n] * c.gradient(w[-1]), n_layers), task


def sampled_pairs(random: near.Random) -> near.Drawn:
    """Each layer reads every third pair no more than half."""
    etas, n_layers = near.steps(random)

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        weight = torch.ones(c.x.shape[1], 1).double()
        weight[n % 3 :: 3] = 0.5
        return w[-1] + etas[n] * c.x.mT @ (weight * (c.y - c.x @ w[-1])) / c.x.shape[1]

    return near.walk(step, n_layers), dense(random)


def fast_shrinkage(random: near.Random) -> near.Drawn:
    """ISTA with inertia (FISTA)."""
    (etas, n_layers), limit = near.steps(random, 0.4, 0.6), float(random.uniform(0.03, 0.08))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        ahead = w[-1] + (n / (n + 3) * (w[-1] - w[-2]) if n else 0)
        moved = ahead + etas[0] * c.gradient(ahead)
        return moved.sign() * torch.relu(moved.abs() - limit)

    return near.walk(step, n_layers), sparse(random)


def shrinkage_by_size(random: near.Random) -> near.Drawn:
    """Thresholds in proportion to the largest entry of w."""
    (etas, n_layers), share = near.steps(random, 0.5, 0.9), float(random.uniform(0.1, 0.25))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        moved = w[-1] + etas[n] * c.gradient(w[-1])
        return moved.sign() * torch.relu(moved.abs() - share * moved.abs().amax(1, keepdim=True))

    return near.walk(step, n_layers), sparse(random)


def damped_newton(random: near.Random) -> near.Drawn:
    damping = float(random.uniform(0.6, 0.85))

    def phi(s: Tensor, n: int) -> Tensor:
        m = 0.3 * s
        for _ in range(n):
            m = m + damping * (m - m.square() * s)
        return m

    return filtered(phi, 4), dense(random)


def rounded(random: near.Random) -> near.Drawn:
    """Predictions of descent, rounded."""
    learner, task = near.gd(random)
    grid = float(random.uniform(0.3, 0.6))
    return lambda prompts: grid * (learner(prompts) / grid).round(), task


def two_penalties(random: near.Random) -> near.Drawn:
    """The mean of two ridge regressions."""
    small, large = float(random.uniform(0.1, 0.5)), float(random.uniform(15, 30))
    return lambda p: 0.5 * (ridge(p, penalty=small) + ridge(p, penalty=large)), noisy(random)


def reweighted_ridge(random: near.Random) -> near.Drawn:
    """Ridge, then once more on pairs that weigh less where it missed them."""
    penalty = float(random.uniform(0.3, 1.5))

    def learner(prompts: Prompts) -> Tensor:
        c = near.Context(prompts)
        eye = penalty / c.x.shape[1] * torch.eye(c.S.shape[1]).to(c.S)
        rest = (c.y - c.x @ torch.linalg.solve(c.S + eye, c.b)).square()
        x = c.x / (1 + rest / rest.mean(1, keepdim=True))
        return c.read(torch.linalg.solve(x.mT @ c.x / x.shape[1] + eye, x.mT @ c.y / x.shape[1]))

    return learner, noisy(random)


def penalty_by_query(random: near.Random) -> near.Drawn:
    """Ridge with more penalty where the query is long."""
    factor = float(random.uniform(1, 3))

    def learner(prompts: Prompts) -> Tensor:
        c = near.Context(prompts)
        penalty = factor * prompts.x_query.square().mean(1)[:, None, None].double()
        eye = torch.eye(c.S.shape[1]).to(c.S)
        return c.read(torch.linalg.solve(c.S + penalty / c.x.shape[1] * eye, c.b))

    return learner, noisy(random)


def uneven_pool(random: near.Random) -> near.Drawn:
    """The posterior mean where half of the tasks count four times as much."""
    task = pooled(random)
    pool = task_pool(task).double()
    prior = torch.where(torch.arange(len(pool)) % 2 == 0, 4.0, 1.0).double().log()

    def learner(prompts: Prompts) -> Tensor:
        misfit = (prompts.y[:, None].double() - prompts.x[:, None].double() @ pool).square()
        weight = (prior - misfit.sum((2, 3)) / (2 * task.noise_var)).softmax(1)
        w = (weight[..., None, None] * pool).sum(1)
        return (prompts.x_query[:, None].double() @ w)[:, 0]

    return learner, task


def two_descents(random: near.Random) -> near.Drawn:
    """The longer of two descents where the responses are large, the shorter else."""
    slow, fast = near.depth(random), float(random.uniform(0.5, 0.7))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        large = c.y.square().mean(1, keepdim=True) > 1
        return w[-1] + torch.where(large, fast, 0.3) * c.gradient(w[-1])

    return near.walk(step, slow), dense(random)


FURTHER: dict[str, near.Family] = {
    "clipped x": clipped_x,
    "cubic residuals": cubic_residuals,
    "other axes in each layer": other_axes_in_each_layer,
    "pairs that weigh half in turn": sampled_pairs,
    "FISTA": fast_shrinkage,
    "thresholds by the largest entry": shrinkage_by_size,
    "damped Newton": damped_newton,
    "rounded predictions": rounded,
    "two penalties": two_penalties,
    "reweighted ridge": reweighted_ridge,
    "penalty by the query": penalty_by_query,
    "a pool of uneven tasks": uneven_pool,
    "two descents by the size of y": two_descents,
}
