"""More near misses, as functions of prompts."""

from dataclasses import replace

import torch
from torch import Tensor

from analyses.algorithms import near_descents as near
from analyses.algorithms.learners import GD, NEWTON, correlated, dense, law_of, pooled, sparse
from analyses.algorithms.near_misses import filtered
from mechinterp.config import TaskConfig
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, task_pool


def noisy(random: near.Random) -> TaskConfig:
    """Noise of at least .1, without which these learners are least squares."""
    task = dense(random)
    return replace(task, noise_var=max(task.noise_var, 0.1))


def blocks(random: near.Random) -> near.Drawn:
    """Steps on half of the coordinates in turn."""
    etas, n_layers = near.steps(random, 0.5, 0.8)

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        own = (torch.arange(w[-1].shape[1]) % 2 == n % 2).to(w[-1])[:, None]
        return w[-1] + etas[n] * own * c.gradient(w[-1])

    return near.walk(step, n_layers), dense(random)


def of_unit_length(random: near.Random) -> near.Drawn:
    """Steps along the gradient, of lengths that fall with the layer."""
    size = float(random.uniform(0.4, 0.7))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        return w[-1] + size / (n + 1) * g / g.norm(dim=1, keepdim=True)

    return near.walk(step, near.depth(random)), dense(random)


def two_point_steps(random: near.Random) -> near.Drawn:
    """Steps of Barzilai and Borwein."""
    first = float(random.uniform(0.4, 0.7))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        if n == 0:
            return w[-1] + first * g
        moved, turned = w[-1] - w[-2], c.gradient(w[-2]) - g
        return w[-1] + near.inner(moved, moved) / near.inner(moved, turned) * g

    return near.walk(step, near.depth(random)), dense(random)


def halves_in_turn(random: near.Random) -> near.Drawn:
    """A step on the first half of the pairs, then one on the second, in every layer."""
    etas, n_layers = near.steps(random, 0.2, 0.35)

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        for x, y in zip(c.x.chunk(2, 1), c.y.chunk(2, 1), strict=True):
            w = [*w, w[-1] + etas[n] * x.mT @ (y - x @ w[-1]) / x.shape[1]]
        return w[-1]

    return near.walk(step, n_layers), dense(random)


def shrunk_moments(random: near.Random) -> near.Drawn:
    """Descent on S drawn towards its mean eigenvalue."""
    (etas, n_layers), share = near.steps(random), float(random.uniform(0.15, 0.4))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        mean = c.S.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        return w[-1] + etas[n] * (c.b - (1 - share) * c.S @ w[-1] - share * mean * w[-1])

    return near.walk(step, n_layers), dense(random)


def from_elsewhere(random: near.Random) -> near.Drawn:
    """Descent from a fixed w that is not 0."""
    task, (etas, n_layers) = dense(random), near.steps(random)
    start = torch.from_numpy(random.normal(size=(task.d_x, 1))) * 0.3 / task.d_x**0.5

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        before = w[-1] + (start if n == 0 else 0)
        return before + etas[n] * c.gradient(before)

    return near.walk(step, n_layers), task


def step_by_noise(random: near.Random) -> near.Drawn:
    """Steps that are shorter where the responses are larger."""
    etas, n_layers = near.steps(random, 0.6, 0.9)

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        size = c.y.square().mean(1, keepdim=True)
        return w[-1] + etas[n] / (1 + 0.5 * size) * c.gradient(w[-1])

    return near.walk(step, n_layers), dense(random)


def leverage(random: near.Random) -> near.Drawn:
    """Descent on pairs that weigh the less the longer x is."""
    (etas, n_layers), power = near.steps(random), float(random.uniform(0.3, 0.7))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        weight = c.x.square().mean(2, keepdim=True) ** -power
        rest = weight * (c.y - c.x @ w[-1])
        return w[-1] + etas[n] * c.x.mT @ rest / c.x.shape[1]

    return near.walk(step, n_layers), dense(random)


def quadratic_features(random: near.Random) -> near.Drawn:
    """Descent in function space with the kernel k + c k^2, k = x x'."""
    (etas, _), c = near.steps(random, 0.25, 0.45), float(random.uniform(0.02, 0.06))

    def learner(prompts: Prompts) -> Tensor:
        x, q, rest = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
        K, k = (side @ x.mT + c * (side @ x.mT).square() for side in (x, q))
        path, f = [], torch.zeros_like(rest[:, :1])
        for eta in etas:
            f, rest = f + eta * k @ rest / x.shape[1], rest - eta * K @ rest / x.shape[1]
            path.append(f[:, 0])
        return torch.stack(path)

    return learner, dense(random)


def newton_then_descent(random: near.Random) -> near.Drawn:
    """Two layers of Newton's iteration, then steps of gradient descent."""
    alpha, eta = float(random.uniform(0.2, 0.35)), float(random.uniform(0.3, 0.5))

    def phi(s: Tensor, n: int) -> Tensor:
        m = alpha * s
        for layer in range(1, n + 1):
            m = 2 * m - m.square() * s if layer < 2 else m + eta * (1 - s * m)
        return m

    return filtered(phi, 4), dense(random)


def wrong_covariance(random: near.Random) -> near.Drawn:
    """Descent with the inverse covariance of a chain of another correlation."""
    task, n_layers = correlated(random), near.depth(random)
    rho, eta = -task.covariance.rho / 2, float(random.uniform(0.1, 0.2))
    lag = torch.arange(task.d_x)[:, None] - torch.arange(task.d_x)
    A = torch.linalg.inv(rho ** lag.abs().double() + 0.3 * torch.eye(task.d_x))
    return near.walk(lambda c, n, w: w[-1] + eta * A @ c.gradient(w[-1]), n_layers), task


def largest_entries(random: near.Random) -> near.Drawn:
    """Steps on the coordinates of the largest gradients, twice the nonzero entries."""
    task, (etas, n_layers) = sparse(random), near.steps(random, 0.5, 0.9)

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        least = g.abs().topk(min(2 * (task.sparsity or 1), task.d_x), dim=1).values[:, -1:]
        return w[-1] + etas[n] * g * (g.abs() >= least)

    return near.walk(step, n_layers), task


def rounded_steps(random: near.Random) -> near.Drawn:
    """Shrinkage of the step and not of w."""
    (etas, n_layers), limit = near.steps(random, 0.5, 0.9), float(random.uniform(0.05, 0.12))

    def step(c: near.Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        return w[-1] + etas[n] * g.sign() * torch.relu(g.abs() - limit)

    return near.walk(step, n_layers), sparse(random)


def powers_of_b(random: near.Random) -> near.Drawn:
    """Algorithm 1 with the size of b in place of its square."""
    (etas, n_layers), task = near.steps(random, 0.8, 1.5), sparse(random)
    step: near.Step = lambda c, n, w: w[-1] + (etas[n] * c.b.abs() * c.gradient(w[-1]) if n else 0)  # noqa: E731
    return near.walk(step, n_layers), task


def estimated_penalty(random: near.Random) -> near.Drawn:
    """Ridge whose penalty follows from the residuals of each prompt."""
    factor = float(random.uniform(2, 6))

    def learner(prompts: Prompts) -> Tensor:
        c = near.Context(prompts)
        identity = torch.eye(c.S.shape[1]).to(c.S)
        rest = c.y - c.x @ torch.linalg.solve(c.S + 0.01 * identity, c.b)
        penalty = factor * rest.square().mean((1, 2))[:, None, None]
        return c.read(torch.linalg.solve(c.S + penalty / c.x.shape[1] * identity, c.b))

    return learner, noisy(random)


def shrunk_least_squares(random: near.Random) -> near.Drawn:
    """Least squares times what James and Stein take of it."""

    def learner(prompts: Prompts) -> Tensor:
        c = near.Context(prompts)
        L, d = c.x.shape[1:]
        w = torch.linalg.solve(c.S, c.b)
        noise = (c.y - c.x @ w).square().sum(1, keepdim=True) / (L - d)
        kept = 1 - (d - 2) * noise / (L * near.inner(w, c.S @ w)).clamp(min=1e-12)
        return c.read(kept.clamp(min=0) * w)

    return learner, noisy(random)


def standardised_ridge(random: near.Random) -> near.Drawn:
    """Ridge on coordinates of unit variance in the prompt."""
    penalty = float(random.uniform(2, 6))

    def learner(prompts: Prompts) -> Tensor:
        size = prompts.x.std(1, keepdim=True)
        moved = {"x": prompts.x / size, "x_query": prompts.x_query / size[:, 0]}
        return ridge(Prompts(**{**vars(prompts), **moved}), penalty=penalty)

    return learner, dense(random)


def most_likely_task(random: near.Random) -> near.Drawn:
    """The posterior of the pool to a power, between its mean and its mode."""
    task, power = pooled(random), float(random.uniform(0.15, 0.3))
    return lambda p: dmmse(p, pool=task_pool(task), noise_var=power * task.noise_var), task


def half_newton_alone(random: near.Random) -> near.Drawn:
    """Half of Newton's and half of descent's last prediction."""
    task, n_layers = dense(random), near.depth(random)
    a, b = (law_of(name, task, n_layers, random) for name in (GD, NEWTON))
    return lambda prompts: 0.5 * (a(prompts) + b(prompts))[-1], task


LATER: dict[str, near.Family] = {
    "coordinates in turn": blocks,
    "steps of unit length": of_unit_length,
    "Barzilai and Borwein": two_point_steps,
    "halves of the pairs in turn": halves_in_turn,
    "shrunk moments": shrunk_moments,
    "descent from elsewhere": from_elsewhere,
    "steps by the size of y": step_by_noise,
    "pairs by the length of x": leverage,
    "quadratic features": quadratic_features,
    "Newton, then GD": newton_then_descent,
    "wrong covariance": wrong_covariance,
    "largest gradients": largest_entries,
    "shrunk gradients": rounded_steps,
    "Algorithm 1 with the size of b": powers_of_b,
    "ridge with an estimated penalty": estimated_penalty,
    "James and Stein": shrunk_least_squares,
    "standardised ridge": standardised_ridge,
    "posterior to a power": most_likely_task,
    "half GD, half Newton, last": half_newton_alone,
}
