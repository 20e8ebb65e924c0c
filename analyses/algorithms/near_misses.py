"""Learners that are no algorithm of the list but come near to one, as functions of prompts.

Each family draws its numbers at random and gives a function: the prediction after every layer,
[layer, batch, d_y], or the last one alone, [batch, d_y].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from analyses.algorithms import near_descents as near
from analyses.algorithms.learners import GD, GDPP, dense, law_of, pooled, sparse
from mechinterp.config import TaskConfig
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import nadaraya_watson, nearest_neighbours, pcr, ridge
from mechinterp.icl.prompts import Prompts, task_pool
from mechinterp.icl.sparse_predictors import lasso


def smoother(random: near.Random) -> near.Drawn:
    omega = float(random.uniform(0.3, 0.8))
    return lambda prompts: nadaraya_watson(prompts, omega=omega, mu=1.0), dense(random)


def neighbours(random: near.Random) -> near.Drawn:
    return lambda prompts: nearest_neighbours(prompts, count=3), dense(random)


def with_intercept(random: near.Random) -> near.Drawn:
    penalty = float(random.uniform(0.1, 1))

    def learner(prompts: Prompts) -> Tensor:
        x, y = prompts.x.mean(1, keepdim=True), prompts.y.mean(1, keepdim=True)
        moved = {"x": prompts.x - x, "y": prompts.y - y, "x_query": prompts.x_query - x[:, 0]}
        return ridge(Prompts(**{**vars(prompts), **moved}), penalty=penalty) + y[:, 0]

    return learner, dense(random)


def components(random: near.Random) -> near.Drawn:
    task = dense(random)
    kept = task.d_x - int(random.integers(1, 3))
    return lambda prompts: pcr(prompts, components=kept), task


def kernel_ridge(random: near.Random) -> near.Drawn:
    width = float(random.uniform(2.5, 4.0))

    def learner(prompts: Prompts) -> Tensor:
        x, q, y = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
        K, k = (
            (-torch.cdist(side, x).square() / (2 * width**2 * x.shape[2])).exp() for side in (x, q)
        )
        return (k @ torch.linalg.solve(K + 0.02 * torch.eye(x.shape[1]).double(), y))[:, 0]

    return learner, dense(random)


def sparse_lasso(random: near.Random) -> near.Drawn:
    alpha = float(random.uniform(0.05, 0.15))
    return lambda prompts: lasso(prompts, alpha=alpha), sparse(random)


def scaled_ridge(random: near.Random) -> near.Drawn:
    factor, penalty = float(random.choice([0.85, 1.15])), float(random.uniform(0.2, 1))
    return lambda prompts: factor * ridge(prompts, penalty=penalty), dense(random)


def uneven_ridge(random: near.Random) -> near.Drawn:
    task = dense(random)
    root = torch.from_numpy(random.uniform(0.3, 2.5, task.d_x)).sqrt()

    def learner(prompts: Prompts) -> Tensor:
        moved = {"x": prompts.x / root, "x_query": prompts.x_query / root}
        return ridge(Prompts(**{**vars(prompts), **moved}), penalty=4.0)

    return learner, task


def half_of_each(
    first: str, second: str, draw: Callable[[near.Random], TaskConfig], share: float = 0.5
) -> near.Family:
    def build(random: near.Random) -> near.Drawn:
        task, n_layers = draw(random), near.depth(random)
        a, b = (law_of(name, task, n_layers, random) for name in (first, second))
        return lambda prompts: (1 - share) * a(prompts) + share * b(prompts), task

    return build


def half_pool(random: near.Random) -> near.Drawn:
    """The posterior mean under half of the tasks."""
    task = pooled(random)
    pool = task_pool(task)[::2]
    return lambda prompts: dmmse(prompts, pool=pool, noise_var=task.noise_var), task


def warm_pool(random: near.Random) -> near.Drawn:
    """The posterior mean for noise that is three to six times as large."""
    task = pooled(random)
    factor = float(random.uniform(3, 6))
    return lambda p: dmmse(p, pool=task_pool(task), noise_var=factor * task.noise_var), task


def pool_and_ridge(random: near.Random) -> near.Drawn:
    task, share = pooled(random), float(random.uniform(0.25, 0.75))

    def learner(prompts: Prompts) -> Tensor:
        memory = dmmse(prompts, pool=task_pool(task), noise_var=task.noise_var)
        return share * memory + (1 - share) * ridge(prompts, penalty=task.posterior_penalty)

    return learner, task


def filtered(phi: Callable[[Tensor, int], Tensor], n_layers: int) -> near.Learner:
    """Predictions of w = phi(S) b."""

    def learner(prompts: Prompts) -> Tensor:
        c = near.Context(prompts)
        s, V = torch.linalg.eigh(c.S)
        return torch.stack(
            [c.read(V @ (phi(s, n)[..., None] * (V.mT @ c.b))) for n in range(n_layers)]
        )

    return learner


def flow(random: near.Random) -> near.Drawn:
    """Gradient flow: phi = (1 - exp(-t s)) / s."""
    time, n_layers = float(random.uniform(0.8, 1.5)), near.depth(random)
    return filtered(lambda s, n: -torch.expm1(-time * (n + 1) * s) / s, n_layers), dense(random)


def root_filter(random: near.Random) -> near.Drawn:
    """phi = (s^2 + c)^-1/2, between ridge and least squares."""
    c = float(random.uniform(0.05, 0.3))
    return filtered(lambda s, n: (s.square() + c).rsqrt(), 1), dense(random)


def third_order(random: near.Random) -> near.Drawn:
    """Iteration of third order for the inverse: M (3 - S M (3 - S M))."""

    def phi(s: Tensor, n: int) -> Tensor:
        m = s / s.max() ** 2
        for _ in range(n):
            m = m * (3 - s * m * (3 - s * m))
        return m

    return filtered(phi, 3), dense(random)


NEAR: dict[str, near.Family] = {
    "centred descent": near.centred,
    "descent, scaled read-out": near.scaled,
    "weight decay": near.weight_decay,
    "heavy ball": near.heavy_ball,
    "Nesterov": near.nesterov,
    "conjugate gradients": near.conjugate_gradients,
    "conjugate gradients, last": near.last(near.conjugate_gradients),
    "line search": near.line_search,
    "hard thresholding": near.hard_thresholding,
    "least mean squares": near.lms,
    "forgetting": near.forgetting,
    "free preconditioner": near.free_preconditioner,
    "softmax pairs, small slope": near.pairs_of_heads(0.05, 0.15),
    "softmax pairs, large slope": near.pairs_of_heads(0.4, 0.8),
    "softmax pairs, last": near.last(near.pairs_of_heads(0.05, 0.4)),
    "kernel smoother": smoother,
    "nearest neighbours": neighbours,
    "ridge with intercept": with_intercept,
    "principal components": components,
    "saturated residuals": near.robust,
    "lasso": sparse_lasso,
    "ridge, scaled read-out": scaled_ridge,
    "half pool, half ridge": pool_and_ridge,
    "posterior of half the pool": half_pool,
    "hard thresholding by size": near.magnitude_threshold,
    "uneven ridge": uneven_ridge,
    "a threshold at the end": near.elastic,
    "gradient flow, last": near.last(flow),
    "Chebyshev": near.chebyshev,
    "heavy ball, last": near.last(near.heavy_ball),
    "Nesterov, last": near.last(near.nesterov),
    "weight decay, last": near.last(near.weight_decay),
    "centred descent, last": near.last(near.centred),
    "averaged iterates": near.averaged,
    "step by the largest eigenvalue": near.own_step,
    "line search, last": near.last(near.line_search),
    "least mean squares, last": near.last(near.lms),
    "minibatches": near.minibatches,
    "diagonal preconditioner": near.diagonal_preconditioner,
    "Jacobi": near.jacobi,
    "Gauss-Seidel": near.gauss_seidel,
    "saturated prediction": near.saturated,
    "softmax pairs, middle slope": near.pairs_of_heads(0.15, 0.4),
    "kernel ridge": kernel_ridge,
    "pairs of unit length": near.unit_pairs,
    "sign descent": near.sign_descent,
    "exponentiated gradient": near.exponentiated,
    "posterior at larger noise": warm_pool,
    "root filter": root_filter,
    "iteration of third order": third_order,
    "bounded steps": near.bounded_steps,
    "some of the pairs": near.few_pairs,
    "a third GD++, the rest GD": half_of_each(GD, GDPP, dense, 0.33),
}
