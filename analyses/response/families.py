"""Learners whose class is known, for the calibration of the readings of `response`.

A family draws a task, numbers and a function of prompts, and says which readings are right. The class follows from the
formula; nothing here calls the response. Learners are written out in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix

Random = np.random.Generator
Learner = Callable[[Prompts], Tensor]
BATCH, STILL = "batch", "no interaction"
FORGETS, ONLINE, RLS = "no interaction with forgetting", "online", "recursive least squares"
KERNEL, POSTERIOR, NOT_LINEAR = "kernel", "posterior", "no linear map"


@dataclass(frozen=True)
class Drawn:
    """A learner, its task, and the readings that are right for it."""

    learner: Learner
    task: TaskConfig
    right: frozenset[str]


def dense(random: Random) -> TaskConfig:
    d_x = int(random.integers(3, 7))
    length = d_x * int(random.integers(4, 8))
    return TaskConfig(
        d_x=d_x, context_length=length, noise_var=float(random.choice([0.05, 0.1, 0.3]))
    )


def correlated(random: Random) -> TaskConfig:
    rho = float(random.uniform(0.4, 0.7))
    return replace(dense(random), covariance=CovarianceConfig(kind="kms", rho=rho, scale=0.6))


def read(prompts: Prompts, w: Tensor) -> Tensor:
    return (prompts.x_query[:, None] @ w)[:, 0]


def moments(prompts: Prompts) -> tuple[Tensor, Tensor]:
    n = prompts.x.shape[1]
    return prompts.x.mT @ prompts.x / n, prompts.x.mT @ prompts.y / n


def sizes(random: Random, low: int, high: int) -> list[float]:
    return random.uniform(0.3, 0.7, int(random.integers(low, high))).tolist()


def stepped(etas: list[float], P: Tensor | None = None) -> Learner:
    """Gradient descent from 0, with a preconditioner."""

    def predict(prompts: Prompts) -> Tensor:
        S, b = moments(prompts)
        w = torch.zeros_like(b)
        for eta in etas:
            step = eta * (b - S @ w)
            w = w + (step if P is None else P.to(b) @ step)
        return read(prompts, w)

    return predict


def filtered(phi: Callable[[Tensor], Tensor]) -> Learner:
    """Learner with a filter over the eigenvalues of S."""

    def predict(prompts: Prompts) -> Tensor:
        S, b = moments(prompts)
        s, vectors = torch.linalg.eigh(S)
        return read(prompts, vectors @ (phi(s)[..., None] * (vectors.mT @ b)))

    return predict


def along(update: Callable[[Tensor, Tensor, Tensor], Tensor], averaged: bool = False) -> Learner:
    """One pass over the pairs: w, x [batch, d_x] and y [batch, d_y] give the next w."""

    def predict(prompts: Prompts) -> Tensor:
        w = torch.zeros_like(prompts.x[:, 0, :, None] * prompts.y[:, 0, None])
        path = []
        for x, y in zip(prompts.x.unbind(1), prompts.y.unbind(1), strict=True):
            w = update(w, x, y)
            path.append(w)
        return read(prompts, torch.stack(path).mean(0) if averaged else w)

    return predict


def delta(eta: float, gate: float, c: float | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Delta rule, gated; normed by c + |x|^2 unless c is None."""

    def update(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        w = gate * w
        size = eta if c is None else eta / (c + x.square().sum(1, keepdim=True))[..., None]
        return w + size * x[..., None] * (y - (x[:, None] @ w)[:, 0])[:, None]

    return update


def ages(prompts: Prompts, alpha: float) -> Tensor:
    n = prompts.x.shape[1]
    return (alpha ** torch.arange(n - 1, -1, -1, dtype=prompts.y.dtype))[:, None]


def forgetting(eta: float, alpha: float) -> Learner:
    def predict(prompts: Prompts) -> Tensor:
        kept = ages(prompts, alpha) * prompts.y
        return read(prompts, eta * prompts.x.mT @ kept / prompts.x.shape[1])

    return predict


def recursive(alpha: float, penalty: float) -> Learner:
    def predict(prompts: Prompts) -> Tensor:
        kept = ages(prompts, alpha)
        S = prompts.x.mT @ (kept * prompts.x)
        S = S + penalty * torch.eye(S.shape[1], dtype=S.dtype)
        return read(prompts, torch.linalg.solve(S, prompts.x.mT @ (kept * prompts.y)))

    return predict


def smoother(kernel: Callable[[Tensor, Tensor], Tensor], size: float) -> Learner:
    """Weighted mean of y; the kernel takes the pairs' x and the query's."""

    def predict(prompts: Prompts) -> Tensor:
        weights = kernel(prompts.x, prompts.x_query[:, None]).softmax(1)
        return size * (weights[:, None] @ prompts.y)[:, 0]

    return predict


def posterior(task: TaskConfig) -> Learner:
    """Posterior mean over the pool."""

    def predict(prompts: Prompts) -> Tensor:
        pool = task.pool().to(prompts.y)[..., 0]
        missed = prompts.y - prompts.x @ pool.mT
        p = (-missed.square().sum(1) / (2 * task.noise_var)).softmax(1)
        return read(prompts, (p @ pool)[..., None])

    return predict


def by_entries(change: Callable[[Tensor], Tensor]) -> Learner:
    """A step on responses that are changed one by one."""

    def predict(prompts: Prompts) -> Tensor:
        return read(prompts, prompts.x.mT @ change(prompts.y) / prompts.x.shape[1])

    return predict


def by_coordinates(change: Callable[[Tensor], Tensor]) -> Learner:
    """A step whose entries are changed one by one."""

    def predict(prompts: Prompts) -> Tensor:
        return read(prompts, change(moments(prompts)[1]))

    return predict


def is_batch(learner: Callable[[Random, TaskConfig], Learner], law=dense, right: str = BATCH):
    """Family with one right reading."""

    def build(random: Random) -> Drawn:
        task = law(random)
        return Drawn(learner(random, task), task, frozenset({right}))

    return build


def inverse(c: float) -> Callable[[Tensor], Tensor]:
    return lambda s: 1 / (s + c)


def saturated(slope: float) -> Callable[[Tensor], Tensor]:
    return lambda b: (slope * b).tanh()


def newton(alpha: float, n: int) -> Callable[[Tensor], Tensor]:
    def phi(s: Tensor) -> Tensor:
        m = alpha * s
        for _ in range(n):
            m = 2 * m - m.square() * s
        return m

    return phi


def shrinking(etas: list[float], gamma: float) -> Callable[[Tensor], Tensor]:
    """GD++ on modes."""

    def phi(s: Tensor) -> Tensor:
        a, total = torch.ones_like(s), torch.zeros_like(s)
        for eta in etas:
            total = total + eta * a.square() * (1 - s * total)
            a = a * (1 - gamma * a.square() * s)
        return total

    return phi


def whitening(task: TaskConfig, c: float) -> Tensor:
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    return torch.linalg.inv(Sigma + c * torch.eye(task.d_x).double())


def forgets(random: Random) -> Drawn:
    task = dense(random)
    alpha = float(random.uniform(0.8, 0.97))
    return Drawn(forgetting(float(random.uniform(0.5, 3)), alpha), task, frozenset({FORGETS}))


def least_squares_along(random: Random) -> Drawn:
    """Ages must change a weight by a fifth over the context, else it may be called a batch learner."""
    task = dense(random)
    alpha = float(random.uniform(0.85, 0.99))
    right = {RLS} if alpha ** (task.context_length - 1) < 0.8 else {RLS, BATCH}
    return Drawn(recursive(alpha, float(random.uniform(0.1, 1))), task, frozenset(right))


def pool(random: Random) -> Drawn:
    task = replace(
        dense(random),
        n_tasks=int(random.choice([4, 8, 16])),
        task_seed=int(random.integers(100)),
        noise_var=0.25,
    )
    return Drawn(posterior(task), task, frozenset({POSTERIOR}))


def softmax_kernel(random: Random, task: TaskConfig) -> Learner:
    omega = float(random.uniform(1.2, 2.0)) / task.d_x**0.25
    return smoother(lambda x, q: omega * (x @ q.mT)[..., 0], float(random.uniform(0.8, 2)))


def gaussian_kernel(random: Random, task: TaskConfig) -> Learner:
    width = float(random.uniform(0.6, 1.2)) * task.d_x**0.25
    return smoother(
        lambda x, q: -(x - q).square().sum(2) / (2 * width**2), float(random.uniform(0.8, 1.5))
    )


def two_heads(random: Random, task: TaskConfig) -> Learner:
    """Difference of two softmax heads with weak scores: one step on centred x."""
    omega = float(random.uniform(0.03, 0.12))
    size = float(random.uniform(0.3, 0.6)) / omega

    def predict(prompts: Prompts) -> Tensor:
        heads = [smoother(lambda x, q, s=s: s * omega * (x @ q.mT)[..., 0], size) for s in (1, -1)]
        return heads[0](prompts) - heads[1](prompts)

    return predict


Family = Callable[[Random], Drawn]
FAMILIES: dict[str, Family] = {
    "ridge": is_batch(lambda r, t: filtered(inverse(float(r.uniform(0.2, 4)) / t.context_length))),
    "descent": is_batch(lambda r, t: stepped(sizes(r, 2, 5))),
    "one step": is_batch(lambda r, t: stepped([float(r.uniform(0.3, 1.2))]), right=STILL),
    "GD++": is_batch(lambda r, t: filtered(shrinking(sizes(r, 2, 4), float(r.uniform(0.1, 0.25))))),
    "Newton": is_batch(
        lambda r, t: filtered(newton(float(r.uniform(0.05, 0.15)), int(r.integers(2, 5))))
    ),
    "preconditioned descent": is_batch(
        lambda r, t: stepped(sizes(r, 2, 4), whitening(t, float(r.uniform(0.2, 0.6)))), correlated
    ),
    "one preconditioned step": is_batch(
        lambda r, t: stepped([float(r.uniform(0.3, 0.8))], whitening(t, 0.3)), correlated, STILL
    ),
    "weak softmax pair": is_batch(two_heads),
    "forgetting": forgets,
    "delta rule": is_batch(
        lambda r, t: along(delta(float(r.uniform(0.02, 0.12)), 1.0, None)), right=ONLINE
    ),
    "gated delta rule": is_batch(
        lambda r, t: along(delta(float(r.uniform(0.03, 0.12)), float(r.uniform(0.85, 0.99)), None)),
        right=ONLINE,
    ),
    "normed delta rule": is_batch(
        lambda r, t: along(delta(float(r.uniform(0.3, 0.9)), 1.0, float(r.uniform(0.5, 4)))),
        right=ONLINE,
    ),
    "averaged delta rule": is_batch(
        lambda r, t: along(delta(float(r.uniform(0.05, 0.15)), 1.0, None), averaged=True),
        right=ONLINE,
    ),
    "recursive least squares": least_squares_along,
    "softmax kernel": is_batch(softmax_kernel, right=KERNEL),
    "Gaussian kernel": is_batch(gaussian_kernel, right=KERNEL),
    "posterior of a pool": pool,
    "negative y counts double": is_batch(
        lambda r, t: by_entries(lambda y: y.clamp(max=0) - y.abs()), right=NOT_LINEAR
    ),
    "sizes of y": is_batch(lambda r, t: by_entries(torch.abs), right=NOT_LINEAR),
    "saturated step": is_batch(
        lambda r, t: by_coordinates(saturated(float(r.uniform(8, 20)))), right=NOT_LINEAR
    ),
}
