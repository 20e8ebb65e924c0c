"""Families that were not used to set a rule: near misses, and algorithms in forms that the package
does not have.

They were written after the last change of a rule or a limit, and are counted without selection."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from analyses.algorithms import families as make
from analyses.algorithms.families import (
    Descent,
    Drawn,
    Family,
    Random,
    correlated,
    dense,
    noisy,
    sparse,
)
from analyses.algorithms.learners import GD, ISTA, law_of
from analyses.algorithms.near_descents import ANY, SPARSE, extrapolated
from analyses.algorithms.near_misses import neighbours, posterior
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, covariance_matrix
from mechinterp.models.constructions import descent
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.run.predictor import predictor_of


def adaptive(c: Descent, eta: float) -> Tensor:
    """Steps divided by the root of the running mean square of the gradient, entry by entry."""
    squares = torch.stack([c.gradient(each).square() for each in c.path]).mean(0)
    return c.w + eta * c.gradient() / (squares.sqrt() + 0.3)


def secant(c: Descent, eta: float) -> Tensor:
    """Anderson acceleration from the last two iterates."""
    g = c.gradient()
    if c.n == 0:
        return c.w + eta * g
    before = c.gradient(c.path[-2])
    share = make.inner(g, g - before) / make.inner(g - before, g - before).clamp(min=1e-12)
    return (1 - share) * (c.w + eta * g) + share * (c.path[-2] + eta * before)


def clipped_y(c: Descent, limit: float) -> Tensor:
    return c.w + c.eta * (c.x.mT @ c.y.clamp(-limit, limit) / c.x.shape[1] - c.S @ c.w)


def in_a_ball(c: Descent, radius: float) -> Tensor:
    """Descent that projects w onto a ball."""
    return c.moved / (c.moved.norm(dim=1, keepdim=True) / radius).clamp(min=1)


def stops_early(c: Descent, level: float) -> Tensor:
    """Descent that stops on prompts with small residuals."""
    left, size = (one.square().mean(1, keepdim=True) for one in (c.rest, c.y))
    return c.w + c.eta * c.gradient() * (left > level * size)


def median_of_blocks(c: Descent) -> Tensor:
    """Steps along the median of the gradients of three blocks of pairs."""
    pairs = zip(c.x.chunk(3, 1), c.rest.chunk(3, 1), strict=True)
    blocks = torch.stack([x.mT @ rest / x.shape[1] for x, rest in pairs])
    return c.w + c.eta * blocks.median(0).values


def restarted_inertia(c: Descent, eta: float) -> Tensor:
    """Inertia that grows with the layer and is dropped when it points against the gradient."""
    g, moved = c.gradient(), c.inertia()
    return c.w + eta * g + c.n / (c.n + 3) * moved * (make.inner(moved, g) > 0)


def message_passing(prompts: Prompts, etas: Sequence[float], share: float) -> Tensor:
    """Approximate message passing: soft thresholds, and residuals with the Onsager term."""
    c, path = Descent(prompts), []
    L, w, rest = c.x.shape[1], c.w, c.y
    for _ in etas:
        limit = share * rest.square().mean(1, keepdim=True).sqrt() / L**0.5
        w = make.soft(w + c.x.mT @ rest / L, limit)
        rest = c.y - c.x @ w + rest * (w != 0).double().sum(1, keepdim=True) / L
        path.append(c.read(w))
    return torch.stack(path)


def denoised_steps(c: Descent, width: float) -> Tensor:
    """Smooth shrinkage of small entries, instead of a soft threshold."""
    return c.moved * c.moved.square() / (c.moved.square() + width**2)


def thresholds_by_noise(c: Descent, share: float) -> Tensor:
    """ISTA with thresholds proportional to the residuals of each prompt."""
    return make.soft(c.moved, share * c.rest.square().mean(1, keepdim=True).sqrt())


def left_out(prompts: Prompts, *factors: float) -> Tensor:
    """Ridge with the penalty that is best on left-out pairs, chosen for each prompt."""
    c, L = Descent(prompts), prompts.x.shape[1]
    errors, predictions = [], []
    for penalty in (p * factor for p, factor in zip((0.3, 1.0, 3.0, 10.0), factors, strict=True)):
        A = c.S + penalty / L * torch.eye(c.S.shape[1]).double()
        hat = (c.x @ torch.linalg.solve(A, c.x.mT)).diagonal(dim1=1, dim2=2)[..., None] / L
        rest = (c.y - c.x @ c.solved(penalty)) / (1 - hat)
        errors.append(rest.square().mean((1, 2)))
        predictions.append(c.read(c.solved(penalty)))
    best = torch.stack(errors).argmin(0)
    return torch.stack(predictions)[best, torch.arange(len(best))]


def likely_penalties(prompts: Prompts, factor: float, noise: float) -> Tensor:
    """Mean of ridge regressions with several penalties, weighted by their evidence."""
    c, (L, d) = Descent(prompts), prompts.x.shape[1:]
    logs, predictions = [], []
    for variance in (0.2 * factor, 1.0, 5.0):
        K = variance / d * c.x @ c.x.mT + noise * torch.eye(L).double()
        logs.append(-0.5 * (torch.logdet(K) + (c.y.mT @ torch.linalg.solve(K, c.y))[:, 0, 0]))
        predictions.append(c.read(c.solved(noise * d / variance)))
    return (torch.stack(logs).softmax(0)[..., None] * torch.stack(predictions)).sum(0)


def total_least_squares(prompts: Prompts, share: float) -> Tensor:
    """Total least squares (x has noise too): ridge with a negative penalty, the least eigenvalue of
    the moments of (x, y)."""
    c = Descent(prompts)
    z = torch.cat([c.x, c.y], 2)
    return c.read(c.solved(1.0 - share * torch.linalg.eigvalsh(z.mT @ z)[:, 0, None, None]))


def even_noisy(random: Random) -> TaskConfig:
    """Tasks with an even number of pairs."""
    task = noisy(random)
    return replace(task, context_length=2 * (task.context_length // 2))


def bagged(prompts: Prompts, penalty: float) -> Tensor:
    """Mean of two ridge regressions, one on each half of the pairs."""
    halves = zip(prompts.x.chunk(2, 1), prompts.y.chunk(2, 1), strict=True)
    each = [ridge(replace(prompts, x=x, y=y), penalty=penalty) for x, y in halves]
    return torch.stack(each).mean(0)


def with_neighbours(prompts: Prompts, share: float, penalty: float) -> Tensor:
    """Ridge with a small part of the three nearest neighbours."""
    return (1 - share) * ridge(prompts, penalty=penalty) + share * neighbours(prompts)


def curved_kernel(prompts: Prompts, c: float, penalty: float) -> Tensor:
    """Kernel ridge with the kernel k + c k^3 / d."""
    x, q, y = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
    K, k = (side @ x.mT + c * (side @ x.mT) ** 3 / x.shape[2] for side in (x, q))
    return (k @ torch.linalg.solve(K + penalty * torch.eye(x.shape[1]).double(), y))[:, 0]


def penalty_along_the_chain(prompts: Prompts, task: TaskConfig, penalty: float) -> Tensor:
    """Ridge with the penalty matrix Sigma^-1 for correlated x."""
    inverse = torch.linalg.inv(torch.from_numpy(covariance_matrix(task.covariance, task.d_x)))
    c = Descent(prompts)
    return c.read(torch.linalg.solve(c.S + penalty / c.x.shape[1] * inverse, c.b))


def heavy_tails(prompts: Prompts, task: TaskConfig, freedom: float) -> Tensor:
    """Posterior mean under the pool for Student's noise."""
    pool = task.pool().double()
    rest = (prompts.y[:, None].double() - prompts.x[:, None].double() @ pool).square()
    logs = -(freedom + 1) / 2 * torch.log1p(rest / (freedom * task.noise_var))
    return Descent(prompts).read((logs.sum((2, 3)).softmax(1)[..., None, None] * pool).sum(1))


def pool_or_none(prompts: Prompts, task: TaskConfig, odds: float) -> Tensor:
    """Posterior mean under the pool with a small part of ridge."""
    return (1 - odds) * posterior(prompts, task) + odds * ridge(prompts, penalty=1.0)


NEW_MISSES: dict[str, Family] = {
    "adaptive steps": make.descent(adaptive, (0.15, 0.25), **ANY),
    "extrapolated iterates": make.layers(extrapolated, (0.15, 0.35)),
    "Anderson's acceleration": make.descent(secant, (0.3, 0.5), **ANY),
    "clipped y": make.descent(clipped_y, (1.8, 2.6)),
    "descent in a ball": make.descent(in_a_ball, (0.9, 1.2)),
    "descent that stops early": make.descent(stops_early, (0.2, 0.4)),
    "median of gradients": make.descent(median_of_blocks),
    "inertia with restarts": make.descent(restarted_inertia, (0.3, 0.5), **ANY),
    "rounded w": make.descent(lambda c, grid: grid * (c.moved / grid).round(), (0.05, 0.1)),
    "approximate message passing": make.layers(
        message_passing, (0.8, 1.2), sizes=None, task=sparse
    ),
    "smooth shrinkage": make.descent(denoised_steps, (0.04, 0.1), **SPARSE),
    "thresholds by the residuals": make.descent(thresholds_by_noise, (0.05, 0.1), **SPARSE),
    "penalty by pairs left out": make.alone(left_out, *[(0.8, 1.2)] * 4, task=noisy),
    "penalties by their evidence": make.alone(likely_penalties, (0.8, 1.2), (0.1, 0.4), task=noisy),
    "total least squares": make.alone(total_least_squares, (0.3, 0.6), task=noisy),
    "mean of two halves": make.alone(bagged, (0.5, 2), task=even_noisy),
    "ridge and neighbours": make.alone(with_neighbours, (0.03, 0.08), (0.5, 2), task=noisy),
    "cubic kernel": make.alone(curved_kernel, (0.005, 0.02), (0.5, 2), task=noisy),
    "penalty on the inverse covariance": make.given(
        penalty_along_the_chain, (0.3, 1), task=correlated
    ),
    "pool with heavy tails": make.given(heavy_tails, (6, 12)),
    "pool or ridge": make.given(pool_or_none, (0.02, 0.1)),
}


def by_residuals(prompts: Prompts, etas: Sequence[float]) -> Tensor:
    """Gradient descent on the residuals of the pairs, without any w."""
    x, q, rest = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
    f, path, L = torch.zeros_like(rest[:, :1]), [], x.shape[1]
    for eta in etas:
        f, rest = f + eta * q @ x.mT @ rest / L, rest - eta * x @ (x.mT @ rest) / L
        path.append(f[:, 0])
    return torch.stack(path)


def in_single_precision(prompts: Prompts, etas: Sequence[float]) -> Tensor:
    x, y, q = prompts.x.float(), prompts.y.float(), prompts.x_query.float()
    w, path = torch.zeros_like(x.mT @ y), []
    for eta in etas:
        w = w + eta * x.mT @ (y - x @ w) / x.shape[1]
        path.append((q[:, None] @ w)[:, 0])
    return torch.stack(path)


def dual_ridge(prompts: Prompts, penalty: float) -> Tensor:
    K = prompts.x @ prompts.x.mT + penalty * torch.eye(prompts.x.shape[1]).to(prompts.x)
    return (prompts.x_query[:, None] @ prompts.x.mT @ torch.linalg.solve(K, prompts.y))[:, 0]


def recursive_ridge(prompts: Prompts, penalty: float) -> Tensor:
    """Ridge by recursive least squares, pair by pair."""
    c = Descent(prompts)
    P, w = torch.eye(c.x.shape[2]).double().expand(len(c.x), -1, -1) / penalty, c.w
    for n in range(c.x.shape[1]):
        v = P @ c.x[:, n, :, None]
        gain = v / (1 + c.x[:, n, None] @ v)
        w, P = w + gain * (c.y[:, n, None] - c.x[:, n, None] @ w), P - gain @ v.mT
    return c.read(w)


def pair_by_pair(prompts: Prompts, task: TaskConfig) -> Tensor:
    """Posterior mean under the pool, updated pair by pair."""
    pool = task.pool().double()
    p = torch.full((len(prompts), len(pool)), 1 / len(pool)).double()
    for x, y in zip(prompts.x.unbind(1), prompts.y.unbind(1), strict=True):
        rest = y[:, None, None].double() - x[:, None, None].double() @ pool
        p = p * (-rest.square().sum((2, 3)) / (2 * task.noise_var)).exp()
        p = p / p.sum(1, keepdim=True)
    return Descent(prompts).read((p[..., None, None] * pool).sum(1))


def whitened(random: Random) -> Drawn:
    """Preconditioned descent, written as plain descent on x times a root of the preconditioner."""
    task, n_layers = correlated(random), make.depth(random)
    c, eta = float(random.uniform(0.15, 0.4)), float(random.uniform(0.3, 0.5))
    values, V = torch.linalg.eigh(torch.from_numpy(covariance_matrix(task.covariance, task.d_x)))
    root = (V * (values + c).rsqrt()) @ V.mT

    def learner(prompts: Prompts) -> Tensor:
        moved = replace(prompts, x=prompts.x @ root, x_query=prompts.x_query @ root)
        return make.walk(make.plain, moved, [eta] * n_layers)

    return learner, task


def explicit_shrinkage(random: Random) -> Drawn:
    """ISTA whose steps minimise the quadratic bound by comparing three cases: negative, zero and
    positive."""
    etas, task = make.steps(random, 0.5, 0.9), sparse(random)
    weight = float(random.uniform(0.05, 0.15))

    def step(c: Descent) -> Tensor:
        u, limit = c.moved, c.eta * weight
        ends = [torch.zeros_like(u), (u - limit).clamp(min=0), (u + limit).clamp(max=0)]
        tried = torch.stack(ends)
        bound = (tried - u).square() / 2 + limit * tried.abs()
        return tried.gather(0, bound.argmin(0, keepdim=True))[0]

    return lambda prompts: make.walk(step, prompts, etas), task


def inverse_by_newton(prompts: Prompts, etas: Sequence[float], alpha: float) -> Tensor:
    """Newton's iteration on matrices."""
    c, path = Descent(prompts), []
    M = alpha * c.S
    for _ in etas:
        path.append(c.read(M @ c.b))
        M = 2 * M - M @ c.S @ M
    return torch.stack(path)


def wrapped(random: Random) -> Drawn:
    """Function of a descent model with noise on its weights."""
    task = dense(random)
    etas, seed = random.uniform(0.3, 0.6, 3).tolist(), int(random.integers(1000))
    size = float(random.choice([0.01, 0.02, 0.05]))
    model = predictor_of(
        descent.with_noise(
            descent.rotated(descent.gradient_descent_model(etas, d_x=task.d_x), seed=seed),
            size,
            seed=seed,
        )
    )
    return model.predict, task


def noisy_steps(name: str, draw: make.Tasks, size: float) -> Family:
    def build(random: Random) -> Drawn:
        task = draw(random)
        return law_of(name, task, make.depth(random), random, size), task

    return build


def split_heads(random: Random) -> Drawn:
    """Weights of descent with each head split into three; the last part is dropped in one layer."""
    task, n_layers = dense(random), make.depth(random)
    plain = descent.gradient_descent_model(
        random.uniform(0.25, 0.45, n_layers).tolist(), d_x=task.d_x
    )
    parts = random.dirichlet([4, 4, 2])
    W_Q, W_K, W_V = (torch.cat([w] * 3, dim=1) for w in (plain.W_Q, plain.W_K, plain.W_V))
    W_O = torch.cat([part * plain.W_O for part in parts], dim=1)
    W_O[int(random.integers(n_layers)), -plain.W_O.shape[1] :] = 0
    reading, score = plain.reading, plain.model.score
    weights = stack_of_layers(
        W_Q, W_K, W_V, W_O, d_y=1, scale=plain.scale, reading=reading, score=score
    )
    return descent.rotated(weights, seed=int(random.integers(1000))), task


def more_noise(random: Random) -> Drawn:
    """Weights of GD++ with 2% noise."""
    task, n_layers, seed = dense(random), make.depth(random), int(random.integers(1000))
    gammas = [*random.uniform(0.15, 0.25, n_layers - 1).tolist(), 0.0]
    plain = descent.gd_plus_plus_model(
        random.uniform(0.4, 0.6, n_layers).tolist(), gammas, d_x=task.d_x
    )
    return descent.with_noise(descent.rotated(plain, seed=seed), 0.02, seed=seed), task


NEWTON = make.layers(inverse_by_newton, (0.15, 0.3), sizes=None)
NEW_GUISES: dict[str, tuple[str, str, Family]] = {
    "guise: descent by residuals": ("gradient_descent", "must", make.layers(by_residuals)),
    "guise: descent in single precision": (
        "gradient_descent",
        "must",
        make.layers(in_single_precision),
    ),
    "guise: dual ridge": ("ridge_like", "must", make.alone(dual_ridge, (0.2, 2))),
    "guise: recursive ridge": ("ridge_like", "must", make.alone(recursive_ridge, (0.3, 2))),
    "guise: posterior pair by pair": ("posterior_mean", "must", make.given(pair_by_pair)),
    "guise: descent on whitened x": ("preconditioned_descent", "must", whitened),
    "guise: explicit shrinkage": ("sparse_shrinkage", "must", explicit_shrinkage),
    "guise: Newton on matrices": ("newton", "must", NEWTON),
    "guise: noisy weights as a function": ("gradient_descent", "may", wrapped),
    "guise: descent with noisy steps": ("gradient_descent", "may", noisy_steps(GD, dense, 0.02)),
    "guise: ISTA with noisy steps": ("sparse_shrinkage", "may", noisy_steps(ISTA, sparse, 0.02)),
    "guise: weights with a head dropped": ("gradient_descent", "must", split_heads),
    "guise: weights of GD++ with noise": ("gd_plus_plus", "must", more_noise),
}
