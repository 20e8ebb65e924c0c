"""Families written after the rules on read-outs, on other noise and on fits from one step; each model was labelled once.
Three families with another covariance of x were written after the rule on directions.

Near misses are close to gradient descent, GD++ and ridge regression, the labels that most models get. Guises are the
listed algorithms, computed in ways that the package does not have. Tasks are small, so that many models can be labelled.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from analyses.algorithms import families as make
from analyses.algorithms.families import Descent, Drawn, Family, Random
from analyses.algorithms.later_families import on_tokens
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix
from mechinterp.models.constructions import descent


def small(random: Random) -> TaskConfig:
    d_x = int(random.integers(3, 6))
    return TaskConfig(
        d_x=d_x,
        context_length=d_x * int(random.integers(4, 8)),
        noise_var=float(random.choice([0.05, 0.1, 0.3])),
    )


def by_residuals(prompts: Prompts, etas: list[float]) -> Tensor:
    """Gradient descent that never forms w: the residuals of pairs and query change by kernels of x."""
    x, rest = prompts.x.double(), prompts.y.double()
    kernel, seen = x @ x.mT / x.shape[1], prompts.x_query.double()[:, None] @ x.mT / x.shape[1]
    f, path = torch.zeros_like(rest[:, :1]), []
    for eta in etas:
        f, rest = f + eta * seen @ rest, rest - eta * kernel @ rest
        path.append(f[:, 0])
    return torch.stack(path)


def dual(prompts: Prompts, penalty: float) -> Tensor:
    """Ridge regression by the kernel matrix of the pairs."""
    x, y = prompts.x.double(), prompts.y.double()
    K = x @ x.mT + penalty * torch.eye(x.shape[1], dtype=torch.float64)
    return (prompts.x_query.double()[:, None] @ x.mT @ torch.linalg.solve(K, y))[:, 0]


def with_pairs_of_zeros(prompts: Prompts, penalty: float) -> Tensor:
    """Ridge regression as least squares with one more pair (root of the penalty, 0) per coordinate."""
    x, y = prompts.x.double(), prompts.y.double()
    eye = penalty**0.5 * torch.eye(x.shape[2], dtype=torch.float64).expand(len(x), -1, -1)
    rows = torch.cat([x, eye], 1), torch.cat([y, torch.zeros_like(eye[..., :1])], 1)
    return Descent(prompts).read(torch.linalg.lstsq(*rows, driver="gelsd").solution)


def noisy_weights(random: Random) -> Drawn:
    task, seed = small(random), int(random.integers(1000))
    etas = random.uniform(0.25, 0.65, int(random.integers(2, 4))).tolist()
    plain = descent.gradient_descent_model(etas, d_x=task.d_x)
    noise = float(random.choice([0.0, 0.01, 0.02]))
    return descent.with_noise(descent.rotated(plain, seed=seed), noise, seed=seed), task


def noisy_plus_plus(random: Random) -> Drawn:
    task, seed, n = small(random), int(random.integers(1000)), int(random.integers(2, 4))
    etas, gammas = random.uniform(0.3, 0.6, n), random.uniform(0.12, 0.22, n - 1)
    plain = descent.gd_plus_plus_model(etas.tolist(), [*gammas.tolist(), 0.0], d_x=task.d_x)
    noise = float(random.choice([0.0, 0.01]))
    return descent.with_noise(descent.rotated(plain, seed=seed), noise, seed=seed), task


def two_noises(prompts: Prompts, low: float, ratio: float) -> Tensor:
    """Posterior mean under two noise variances that are equally likely; task vectors of variance 1 / d_x."""
    x, y, d_x = prompts.x.double(), prompts.y.double(), prompts.x.shape[2]
    logs, means = [], []
    for level in (low, low * ratio):
        K = x @ x.mT / d_x + level * torch.eye(x.shape[1], dtype=torch.float64)
        logs.append(-(y.mT @ torch.linalg.solve(K, y))[:, 0, 0] / 2 - torch.logdet(K) / 2)
        means.append(dual(prompts, level * d_x))
    return (torch.stack(logs).softmax(0)[..., None] * torch.stack(means)).sum(0)


def upwards(prompts: Prompts, etas: list[float], size: float) -> Tensor:
    """Gradient descent whose second step ascends."""
    return by_residuals(prompts, [etas[0], -size, *etas[2:]])


def scaled_descent(prompts: Prompts, etas: list[float], factor: float) -> Tensor:
    return factor * by_residuals(prompts, etas)


def scaled_plus_plus(prompts: Prompts, etas: list[float], gamma: float, factor: float) -> Tensor:
    return factor * on_tokens(prompts, etas, gamma)


def query_alone(prompts: Prompts, etas: list[float], gamma: float) -> Tensor:
    """GD++ that rescales the x of the query, not those of the pairs."""
    x, y = prompts.x.double(), prompts.y.double()
    query, path = prompts.x_query.double()[:, None], []
    f, S = torch.zeros_like(y[:, :1]), x.mT @ x / x.shape[1]
    for eta in etas:
        step = eta * x.mT @ y / x.shape[1]
        f, y, query = f + query @ step, y - x @ step, query - gamma * query @ S
        path.append(f[:, 0])
    return torch.stack(path)


def long_pairs(prompts: Prompts, penalty: float, power: float) -> Tensor:
    """Ridge regression that trusts pairs of long x more."""
    length = prompts.x.double().square().mean(2, keepdim=True) ** (power / 2)
    return dual(replace(prompts, x=prompts.x * length, y=prompts.y * length), penalty)


def penalty_by_length(prompts: Prompts, penalty: float, power: float) -> Tensor:
    """Ridge regression whose penalty depends on the mean square of y."""
    size = prompts.y.double().square().mean((1, 2)) ** power
    return Descent(prompts).read(Descent(prompts).solved(penalty * size[:, None, None]))


def uneven(random: Random) -> TaskConfig:
    """Task in which x varies much less in some directions than in others, along the coordinates or not."""
    task = small(random)
    if random.random() < 0.5:
        rho = float(random.uniform(0.6, 0.8))
        return replace(task, covariance=CovarianceConfig(kind="kms", rho=rho, scale=0.6))
    weak = float(random.uniform(0.01, 0.05))
    values = (1.0,) * (task.d_x - 2) + (2 * weak, weak)
    return replace(task, covariance=CovarianceConfig(kind="eigenvalues", eigenvalues=values))


def by_matrix(prompts: Prompts, etas: list[float], gamma: float, M: Tensor) -> Tensor:
    """GD++ (descent if gamma is 0) whose read-out is multiplied by a matrix."""
    return on_tokens(replace(prompts, x_query=prompts.x_query.double() @ M), etas, gamma)


def turned(factors: list[float], gammas: list[float], noise: list[float]) -> Family:
    """Family of descents and GD++ that go by another factor along the direction in which x varies least."""

    def build(random: Random) -> Drawn:
        task, etas = uneven(random), random.uniform(0.3, 0.6, int(random.integers(2, 4))).tolist()
        gamma, factor = float(random.choice(gammas)), float(random.choice(factors))
        Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
        u = torch.linalg.eigh(Sigma)[1][:, 0]
        E = torch.from_numpy(random.normal(size=(task.d_x, task.d_x)))
        M = torch.eye(task.d_x).double() + (factor - 1) * torch.outer(u, u)
        M = M + float(random.choice(noise)) * E
        return lambda prompts: by_matrix(prompts, etas, gamma, M), task

    return build


def two_weak(random: Random) -> Drawn:
    """Ridge regression that ascends along a mixture of the two directions in which x varies least."""
    task, penalty = uneven(random), float(random.uniform(0.2, 3))
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    angle = float(random.uniform(0.3, 1.2))
    u = torch.linalg.eigh(Sigma)[1][:, :2] @ torch.tensor([np.cos(angle), np.sin(angle)])
    M = torch.eye(task.d_x).double() - float(random.uniform(1, 2)) * torch.outer(u, u)
    M = M + float(random.choice([0.0, 0.01])) * torch.from_numpy(random.normal(size=M.shape))
    return lambda p: dual(replace(p, x_query=p.x_query.double() @ M), penalty), task


AFTER_GUISES: dict[str, tuple[str, str, Family]] = {
    "after: descent by residuals": (
        "gradient_descent",
        "must",
        make.layers(by_residuals, task=small),
    ),
    "after: weights of descent": ("gradient_descent", "must", noisy_weights),
    "after: GD++ on tokens, small": (
        "gd_plus_plus",
        "must",
        make.layers(on_tokens, (0.1, 0.2), task=small),
    ),
    "after: weights of GD++": ("gd_plus_plus", "must", noisy_plus_plus),
    "after: descent on uneven x": ("gradient_descent", "must", turned([1.0], [0.0], [0.0, 0.01])),
    "after: ridge by kernels": ("ridge_like", "must", make.alone(dual, (0.2, 3), task=small)),
    # A near miss of ridge until adaptive ridge became a label.
    "after: Bayes over two noise levels": (
        "adaptive_ridge",
        "may",
        make.alone(two_noises, (0.01, 0.1), (8.0, 40.0), task=small),
    ),
    "after: ridge by more pairs": (
        "ridge_like",
        "must",
        make.alone(with_pairs_of_zeros, (0.2, 3), task=small),
    ),
}


AFTER_MISSES: dict[str, Family] = {
    "after: one step upwards": make.layers(upwards, (0.1, 0.3), task=small),
    "after: read-out of descent": make.layers(
        scaled_descent, [0.8, 0.88, 0.92, 1.1, 1.2], task=small
    ),
    "after: read-out of GD++": make.layers(
        scaled_plus_plus, (0.1, 0.2), [0.8, 0.88, 0.92, 1.1, 1.2], task=small
    ),
    "after: GD++ of the query alone": make.layers(query_alone, (0.1, 0.25), task=small),
    "after: ascends where x varies least": turned(
        [-1.0, -0.5, -0.2, 0.0], [0.0, 0.15], [0.0, 0.01]
    ),
    "after: ridge that ascends where x varies little": two_weak,
    "after: pairs of long x": make.alone(long_pairs, (0.3, 2), (0.5, 1.0), task=small),
    "after: penalty by the size of y": make.alone(
        penalty_by_length, (0.5, 3), (0.5, 1.5), task=small
    ),
}
