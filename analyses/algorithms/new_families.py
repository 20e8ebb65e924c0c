"""Families that no rule was set on: near misses, and algorithms in guises that the package does not have.

They were written after the last change of a rule and of a limit, and are counted as they came out. Each draws its
numbers at random and gives a function of prompts or weights.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from analyses.algorithms.later_misses import noisy
from analyses.algorithms.learners import GD, ISTA, correlated, dense, law_of, pooled, sparse
from analyses.algorithms.near_descents import (
    Context,
    Drawn,
    Family,
    Random,
    depth,
    inner,
    steps,
    walk,
)
from mechinterp.config import TaskConfig
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import nearest_neighbours, ridge
from mechinterp.icl.prompts import Prompts, covariance_matrix, task_pool
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.run.predictor import predictor_of


def solved(c: Context, penalty: Tensor | float) -> Tensor:
    """(S + penalty / L)^-1 b."""
    scaled = torch.as_tensor(penalty).double() / c.x.shape[1]
    return torch.linalg.solve(c.S + scaled * torch.eye(c.S.shape[1]).double(), c.b)


def adaptive(random: Random) -> Drawn:
    """Steps over the root of the running mean square of the gradient, entry by entry."""
    eta, n_layers = float(random.uniform(0.15, 0.25)), depth(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        squares = torch.stack([c.gradient(each).square() for each in w]).mean(0)
        return w[-1] + eta * c.gradient(w[-1]) / (squares.sqrt() + 0.3)

    return walk(step, n_layers), dense(random)


def extrapolated(random: Random) -> Drawn:
    """Predictions that go on from the last two iterates of descent."""
    (etas, n_layers), more = steps(random), float(random.uniform(0.15, 0.35))

    def learner(prompts: Prompts) -> Tensor:
        path = walk(lambda c, n, w: w[-1] + etas[n] * c.gradient(w[-1]), n_layers)(prompts)
        before = torch.cat([torch.zeros_like(path[:1]), path[:-1]])
        return path + more * (path - before)

    return learner, dense(random)


def secant(random: Random) -> Drawn:
    """Anderson's acceleration from the last two iterates."""
    eta, n_layers = float(random.uniform(0.3, 0.5)), depth(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        if n == 0:
            return w[-1] + eta * g
        before = c.gradient(w[-2])
        share = inner(g, g - before) / inner(g - before, g - before).clamp(min=1e-12)
        return (1 - share) * (w[-1] + eta * g) + share * (w[-2] + eta * before)

    return walk(step, n_layers), dense(random)


def clipped_y(random: Random) -> Drawn:
    (etas, n_layers), limit = steps(random), float(random.uniform(1.8, 2.6))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        y = c.y.clamp(-limit, limit)
        return w[-1] + etas[n] * (c.x.mT @ y / c.x.shape[1] - c.S @ w[-1])

    return walk(step, n_layers), dense(random)


def in_a_ball(random: Random) -> Drawn:
    """Descent that projects w on a ball."""
    (etas, n_layers), radius = steps(random), float(random.uniform(0.9, 1.2))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        moved = w[-1] + etas[n] * c.gradient(w[-1])
        return moved / (moved.norm(dim=1, keepdim=True) / radius).clamp(min=1)

    return walk(step, n_layers), dense(random)


def stops_early(random: Random) -> Drawn:
    """Descent that stops in the prompts whose residuals are small."""
    (etas, n_layers), level = steps(random), float(random.uniform(0.2, 0.4))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        left = (c.y - c.x @ w[-1]).square().mean(1, keepdim=True)
        return w[-1] + etas[n] * c.gradient(w[-1]) * (
            left > level * c.y.square().mean(1, keepdim=True)
        )

    return walk(step, n_layers), dense(random)


def median_of_blocks(random: Random) -> Drawn:
    """The median of the gradients of three blocks of pairs."""
    etas, n_layers = steps(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        rest = c.y - c.x @ w[-1]
        pairs = zip(c.x.chunk(3, 1), rest.chunk(3, 1), strict=True)
        blocks = torch.stack([x.mT @ r / x.shape[1] for x, r in pairs])
        return w[-1] + etas[n] * blocks.median(0).values

    return walk(step, n_layers), dense(random)


def restarted_inertia(random: Random) -> Drawn:
    """Inertia that grows with the layer, dropped where it points against the gradient."""
    eta, n_layers = float(random.uniform(0.3, 0.5)), depth(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        moved = w[-1] - w[-2] if n else torch.zeros_like(g)
        return w[-1] + eta * g + n / (n + 3) * moved * (inner(moved, g) > 0)

    return walk(step, n_layers), dense(random)


def coarse_weights(random: Random) -> Drawn:
    """Descent whose w is rounded after every layer."""
    (etas, n_layers), grid = steps(random), float(random.uniform(0.05, 0.1))
    return walk(
        lambda c, n, w: grid * ((w[-1] + etas[n] * c.gradient(w[-1])) / grid).round(), n_layers
    ), dense(random)


def message_passing(random: Random) -> Drawn:
    """Approximate message passing: soft thresholds, and residuals with Onsager's term."""
    share, n_layers = float(random.uniform(0.8, 1.2)), depth(random)

    def learner(prompts: Prompts) -> Tensor:
        c, path = Context(prompts), []
        L = c.x.shape[1]
        w, rest = torch.zeros_like(c.b), c.y
        for _ in range(n_layers):
            limit = share * rest.square().mean(1, keepdim=True).sqrt() / L**0.5
            moved = w + c.x.mT @ rest / L
            w = moved.sign() * torch.relu(moved.abs() - limit)
            rest = c.y - c.x @ w + rest * (w != 0).double().sum(1, keepdim=True) / L
            path.append(c.read(w))
        return torch.stack(path)

    return learner, sparse(random)


def denoised_steps(random: Random) -> Drawn:
    """Steps whose small entries a smooth curve takes back, in place of a soft threshold."""
    (etas, n_layers), width = steps(random, 0.5, 0.9), float(random.uniform(0.04, 0.1))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        moved = w[-1] + etas[n] * c.gradient(w[-1])
        return moved * moved.square() / (moved.square() + width**2)

    return walk(step, n_layers), sparse(random)


def thresholds_by_noise(random: Random) -> Drawn:
    """ISTA with thresholds by the residuals of each prompt."""
    (etas, n_layers), share = steps(random, 0.5, 0.9), float(random.uniform(0.05, 0.1))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        moved = w[-1] + etas[n] * c.gradient(w[-1])
        limit = share * (c.y - c.x @ w[-1]).square().mean(1, keepdim=True).sqrt()
        return moved.sign() * torch.relu(moved.abs() - limit)

    return walk(step, n_layers), sparse(random)


def left_out(random: Random) -> Drawn:
    """Ridge with the penalty that predicts pairs left out best, prompt by prompt."""
    penalties = [float(p) * random.uniform(0.8, 1.2) for p in (0.3, 1, 3, 10)]

    def learner(prompts: Prompts) -> Tensor:
        c, L = Context(prompts), prompts.x.shape[1]
        errors, predictions = [], []
        for penalty in penalties:
            A = c.S + penalty / L * torch.eye(c.S.shape[1]).double()
            hat = (c.x @ torch.linalg.solve(A, c.x.mT)).diagonal(dim1=1, dim2=2)[..., None] / L
            rest = (c.y - c.x @ solved(c, penalty)) / (1 - hat)
            errors.append(rest.square().mean((1, 2)))
            predictions.append(c.read(solved(c, penalty)))
        best = torch.stack(errors).argmin(0)
        return torch.stack(predictions)[best, torch.arange(len(best))]

    return learner, noisy(random)


def likely_penalties(random: Random) -> Drawn:
    """Ridge over several penalties, weighed by the evidence."""
    variances, noise = [0.2 * random.uniform(0.8, 1.2), 1.0, 5.0], float(random.uniform(0.1, 0.4))

    def learner(prompts: Prompts) -> Tensor:
        c, (L, d) = Context(prompts), prompts.x.shape[1:]
        logs, predictions = [], []
        for variance in variances:
            K = variance / d * c.x @ c.x.mT + noise * torch.eye(L).double()
            logs.append(-0.5 * (torch.logdet(K) + (c.y.mT @ torch.linalg.solve(K, c.y))[:, 0, 0]))
            predictions.append(c.read(solved(c, noise * d / variance)))
        weights = torch.stack(logs).softmax(0)[..., None]
        return (weights * torch.stack(predictions)).sum(0)

    return learner, noisy(random)


def total_least_squares(random: Random) -> Drawn:
    """x has noise, too: ridge with a negative penalty, the least eigenvalue of the moments of (x, y)."""
    share = float(random.uniform(0.3, 0.6))

    def learner(prompts: Prompts) -> Tensor:
        c = Context(prompts)
        z = torch.cat([c.x, c.y], 2)
        least = torch.linalg.eigvalsh(z.mT @ z)[:, 0, None, None]
        return c.read(solved(c, 1.0 - share * least))

    return learner, noisy(random)


def bagged(random: Random) -> Drawn:
    """The mean of two ridge regressions, on one half of the pairs and the other."""
    penalty = float(random.uniform(0.5, 2))

    def learner(prompts: Prompts) -> Tensor:
        halves = zip(prompts.x.chunk(2, 1), prompts.y.chunk(2, 1), strict=True)
        each = [ridge(replace(prompts, x=x, y=y), penalty=penalty) for x, y in halves]
        return torch.stack(each).mean(0)

    task = noisy(random)
    return learner, replace(task, context_length=2 * (task.context_length // 2))


def with_neighbours(random: Random) -> Drawn:
    """Ridge, and a little of the three nearest pairs."""
    share, penalty = float(random.uniform(0.03, 0.08)), float(random.uniform(0.5, 2))
    return (
        lambda p: (1 - share) * ridge(p, penalty=penalty) + share * nearest_neighbours(p, count=3),
        noisy(random),
    )


def curved_kernel(random: Random) -> Drawn:
    """Kernel ridge with the kernel k + c k^3 / d."""
    c, penalty = float(random.uniform(0.005, 0.02)), float(random.uniform(0.5, 2))

    def learner(prompts: Prompts) -> Tensor:
        x, q = prompts.x.double(), prompts.x_query.double()[:, None]
        K, k = (side @ x.mT + c * (side @ x.mT) ** 3 / x.shape[2] for side in (x, q))
        return (
            k @ torch.linalg.solve(K + penalty * torch.eye(x.shape[1]).double(), prompts.y.double())
        )[:, 0]

    return learner, noisy(random)


def penalty_along_the_chain(random: Random) -> Drawn:
    """Ridge with a penalty on Sigma^-1 of correlated x."""
    task, penalty = correlated(random), float(random.uniform(0.3, 1))
    inverse = torch.linalg.inv(torch.from_numpy(covariance_matrix(task.covariance, task.d_x)))

    def learner(prompts: Prompts) -> Tensor:
        c = Context(prompts)
        return c.read(torch.linalg.solve(c.S + penalty / c.x.shape[1] * inverse, c.b))

    return learner, task


def heavy_tails(random: Random) -> Drawn:
    """The posterior of the pool under Student's noise."""
    task, freedom = pooled(random), float(random.uniform(6, 12))
    pool = task_pool(task).double()

    def learner(prompts: Prompts) -> Tensor:
        rest = (prompts.y[:, None].double() - prompts.x[:, None].double() @ pool).square()
        logs = -(freedom + 1) / 2 * torch.log1p(rest / (freedom * task.noise_var))
        w = (logs.sum((2, 3)).softmax(1)[..., None, None] * pool).sum(1)
        return (prompts.x_query[:, None].double() @ w)[:, 0]

    return learner, task


def pool_or_none(random: Random) -> Drawn:
    """The posterior mean of the pool, and a little of ridge."""
    task, odds = pooled(random), float(random.uniform(0.02, 0.1))

    def learner(prompts: Prompts) -> Tensor:
        memory = dmmse(prompts, pool=task_pool(task), noise_var=task.noise_var)
        return (1 - odds) * memory + odds * ridge(prompts, penalty=1.0)

    return learner, task


NEW_MISSES: dict[str, Family] = {
    "adaptive steps": adaptive,
    "extrapolated iterates": extrapolated,
    "Anderson's acceleration": secant,
    "clipped y": clipped_y,
    "descent in a ball": in_a_ball,
    "descent that stops early": stops_early,
    "median of gradients": median_of_blocks,
    "inertia with restarts": restarted_inertia,
    "rounded w": coarse_weights,
    "approximate message passing": message_passing,
    "smooth shrinkage": denoised_steps,
    "thresholds by the residuals": thresholds_by_noise,
    "penalty by pairs left out": left_out,
    "penalties by their evidence": likely_penalties,
    "total least squares": total_least_squares,
    "mean of two halves": bagged,
    "ridge and neighbours": with_neighbours,
    "cubic kernel": curved_kernel,
    "penalty on the inverse covariance": penalty_along_the_chain,
    "pool with heavy tails": heavy_tails,
    "pool or ridge": pool_or_none,
}

Built = tuple[object, TaskConfig]


def by_residuals(random: Random) -> Built:
    """Gradient descent on the residuals of the pairs: no w anywhere."""
    etas, _ = steps(random)

    def learner(prompts: Prompts) -> Tensor:
        x, q, rest = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
        f, path = torch.zeros_like(rest[:, :1]), []
        for eta in etas:
            f, rest = (
                f + eta * q @ x.mT @ rest / x.shape[1],
                rest - eta * x @ (x.mT @ rest) / x.shape[1],
            )
            path.append(f[:, 0])
        return torch.stack(path)

    return learner, dense(random)


def in_single_precision(random: Random) -> Built:
    etas, _ = steps(random)

    def learner(prompts: Prompts) -> Tensor:
        x, y, q = prompts.x.float(), prompts.y.float(), prompts.x_query.float()
        w, path = torch.zeros_like(x.mT @ y), []
        for eta in etas:
            w = w + eta * x.mT @ (y - x @ w) / x.shape[1]
            path.append((q[:, None] @ w)[:, 0])
        return torch.stack(path)

    return learner, dense(random)


def dual_ridge(random: Random) -> Built:
    penalty = float(random.uniform(0.2, 2))

    def learner(prompts: Prompts) -> Tensor:
        K = prompts.x @ prompts.x.mT + penalty * torch.eye(prompts.x.shape[1]).to(prompts.x)
        return (prompts.x_query[:, None] @ prompts.x.mT @ torch.linalg.solve(K, prompts.y))[:, 0]

    return learner, dense(random)


def recursive_ridge(random: Random) -> Built:
    """Ridge by recursive least squares, one pair after another."""
    penalty = float(random.uniform(0.3, 2))

    def learner(prompts: Prompts) -> Tensor:
        x, y = prompts.x.double(), prompts.y.double()
        P = torch.eye(x.shape[2]).double().expand(len(x), -1, -1) / penalty
        w = torch.zeros(len(x), x.shape[2], 1).double()
        for n in range(x.shape[1]):
            v = P @ x[:, n, :, None]
            gain = v / (1 + x[:, n, None] @ v)
            w, P = w + gain * (y[:, n, None] - x[:, n, None] @ w), P - gain @ v.mT
        return (prompts.x_query[:, None].double() @ w)[:, 0]

    return learner, dense(random)


def pair_by_pair(random: Random) -> Built:
    """The posterior mean of the pool, updated one pair after another."""
    task = pooled(random)
    pool = task_pool(task).double()

    def learner(prompts: Prompts) -> Tensor:
        p = torch.full((len(prompts), len(pool)), 1 / len(pool)).double()
        for x, y in zip(prompts.x.unbind(1), prompts.y.unbind(1), strict=True):
            rest = y[:, None, None].double() - x[:, None, None].double() @ pool
            p = p * (-rest.square().sum((2, 3)) / (2 * task.noise_var)).exp()
            p = p / p.sum(1, keepdim=True)
        w = (p[..., None, None] * pool).sum(1)
        return (prompts.x_query[:, None].double() @ w)[:, 0]

    return learner, task


def whitened(random: Random) -> Built:
    """Preconditioned descent as plain descent on x times a root of the preconditioner."""
    task, n_layers = correlated(random), depth(random)
    c, eta = float(random.uniform(0.15, 0.4)), float(random.uniform(0.3, 0.5))
    values, V = torch.linalg.eigh(torch.from_numpy(covariance_matrix(task.covariance, task.d_x)))
    root = (V * (values + c).rsqrt()) @ V.mT
    plain = walk(lambda c, n, w: w[-1] + eta * c.gradient(w[-1]), n_layers)
    return lambda p: plain(replace(p, x=p.x @ root, x_query=p.x_query @ root)), task


def explicit_shrinkage(random: Random) -> Built:
    """ISTA whose every step is the least of its quadratic bound, found among -, 0 and +."""
    (etas, n_layers), task = steps(random, 0.5, 0.9), sparse(random)
    weight = float(random.uniform(0.05, 0.15))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        u = w[-1] + etas[n] * c.gradient(w[-1])
        tried = torch.stack(
            [
                torch.zeros_like(u),
                (u - etas[n] * weight).clamp(min=0),
                (u + etas[n] * weight).clamp(max=0),
            ]
        )
        bound = (tried - u).square() / 2 + etas[n] * weight * tried.abs()
        return tried.gather(0, bound.argmin(0, keepdim=True))[0]

    return walk(step, n_layers), task


def inverse_by_newton(random: Random) -> Built:
    """Newton's iteration on matrices."""
    alpha, n_layers = float(random.uniform(0.15, 0.3)), depth(random)

    def learner(prompts: Prompts) -> Tensor:
        c, path = Context(prompts), []
        M = alpha * c.S
        for _ in range(n_layers):
            path.append(c.read(M @ c.b))
            M = 2 * M - M @ c.S @ M
        return torch.stack(path)

    return learner, dense(random)


def wrapped(random: Random) -> Built:
    """A model of descent with noise on its weights, as a function."""
    task = dense(random)
    etas, seed = random.uniform(0.3, 0.6, 3).tolist(), int(random.integers(1000))
    size = float(random.choice([0.01, 0.02, 0.05]))
    model = predictor_of(
        with_noise(rotated(gradient_descent_model(etas, d_x=task.d_x), seed=seed), size, seed=seed)
    )
    return model.predict, task


def noisy_steps(
    name: str, draw: Callable[[Random], TaskConfig], size: float
) -> Callable[[Random], Built]:
    def build(random: Random) -> Built:
        task = draw(random)
        return law_of(name, task, depth(random), random, size), task

    return build


def split_heads(random: Random) -> Built:
    """Weights of descent with three heads for one, a part of its output each, and the last dropped in one layer."""
    task, n_layers = dense(random), depth(random)
    plain = gradient_descent_model(random.uniform(0.25, 0.45, n_layers).tolist(), d_x=task.d_x)
    parts = random.dirichlet([4, 4, 2])
    W_Q, W_K, W_V = (torch.cat([w] * 3, dim=1) for w in (plain.W_Q, plain.W_K, plain.W_V))
    W_O = torch.cat([part * plain.W_O for part in parts], dim=1)
    W_O[int(random.integers(n_layers)), -plain.W_O.shape[1] :] = 0
    reading, score = plain.reading, plain.model.score
    weights = stack_of_layers(
        W_Q, W_K, W_V, W_O, d_y=1, scale=plain.scale, reading=reading, score=score
    )
    return rotated(weights, seed=int(random.integers(1000))), task


def more_noise(random: Random) -> Built:
    """Weights of GD++ with 2% noise."""
    task, n_layers, seed = dense(random), depth(random), int(random.integers(1000))
    gammas = [*random.uniform(0.15, 0.25, n_layers - 1).tolist(), 0.0]
    plain = gd_plus_plus_model(random.uniform(0.4, 0.6, n_layers).tolist(), gammas, d_x=task.d_x)
    return with_noise(rotated(plain, seed=seed), 0.02, seed=seed), task


NEW_GUISES: dict[str, tuple[str, str, Callable[[Random], Built]]] = {
    "guise: descent by residuals": ("gradient_descent", "must", by_residuals),
    "guise: descent in single precision": ("gradient_descent", "must", in_single_precision),
    "guise: dual ridge": ("ridge_like", "must", dual_ridge),
    "guise: recursive ridge": ("ridge_like", "must", recursive_ridge),
    "guise: posterior pair by pair": ("posterior_mean", "must", pair_by_pair),
    "guise: descent on whitened x": ("preconditioned_descent", "must", whitened),
    "guise: explicit shrinkage": ("sparse_shrinkage", "must", explicit_shrinkage),
    "guise: Newton on matrices": ("newton", "must", inverse_by_newton),
    "guise: noisy weights as a function": ("gradient_descent", "may", wrapped),
    "guise: descent with noisy steps": ("gradient_descent", "may", noisy_steps(GD, dense, 0.02)),
    "guise: ISTA with noisy steps": ("sparse_shrinkage", "may", noisy_steps(ISTA, sparse, 0.02)),
    "guise: weights with a head dropped": ("gradient_descent", "must", split_heads),
    "guise: weights of GD++ with noise": ("gd_plus_plus", "must", more_noise),
}
