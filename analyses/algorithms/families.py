"""Families of learners: a random task, random numbers, and a function of prompts that uses them.

A function gives the prediction after every layer, [layer, batch, d_y], or only the last one,
[batch, d_y]. A number is drawn from an interval or from a list."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mechinterp import Prompts, TaskConfig
from mechinterp.config import CovarianceConfig

Random = np.random.Generator
Learner = Callable[[Prompts], Tensor]
Drawn = tuple[Learner, TaskConfig]
Family = Callable[[Random], Drawn]
Tasks = Callable[[Random], TaskConfig]
Range = tuple[float, float] | list[float]


def dense(random: Random) -> TaskConfig:
    d_x = int(random.choice([4, 6, 8]))
    return TaskConfig(
        d_x=d_x,
        context_length=d_x * int(random.integers(4, 7)),
        noise_var=float(random.choice([0.0, 0.1, 0.25])),
    )


def correlated(random: Random) -> TaskConfig:
    d_x, rho = int(random.choice([5, 8])), float(random.uniform(0.4, 0.7))
    covariance = CovarianceConfig(kind="kms", rho=rho)
    return TaskConfig(d_x=d_x, context_length=5 * d_x, covariance=covariance)


def sparse(random: Random) -> TaskConfig:
    return TaskConfig(
        d_x=int(random.choice([8, 12])),
        sparsity=int(random.integers(2, 5)),
        nonzeros="signs",
        noise_var=float(random.choice([0.1, 0.25])),
    )


def pooled(random: Random) -> TaskConfig:
    return TaskConfig(
        d_x=4,
        context_length=int(random.integers(8, 17)),
        noise_var=0.25,
        n_tasks=int(random.choice([4, 16])),
        task_seed=int(random.integers(100)),
    )


def noisy(random: Random) -> TaskConfig:
    """Dense task with noise variance of at least 0.1; without noise these learners would be least
    squares."""
    task = dense(random)
    return replace(task, noise_var=max(task.noise_var, 0.1))


class Descent:
    """State of a descent on prompts: their moments S and b, and the path w_0 = 0, w_1, ... so far."""

    def __init__(self, prompts: Prompts, etas: Sequence[float] = ()):
        self.x, self.y = prompts.x.double(), prompts.y.double()
        self.query, self.etas = prompts.x_query.double(), etas
        self.S = self.x.mT @ self.x / self.x.shape[1]
        self.b = self.x.mT @ self.y / self.x.shape[1]
        self.path = [torch.zeros_like(self.b)]

    @property
    def w(self) -> Tensor:
        return self.path[-1]

    @property
    def n(self) -> int:
        """Number of the current layer, from 0."""
        return len(self.path) - 1

    @property
    def eta(self) -> float:
        """Step size of the current layer."""
        return self.etas[self.n]

    @property
    def rest(self) -> Tensor:
        """Residuals of the pairs."""
        return self.y - self.x @ self.w

    @property
    def moved(self) -> Tensor:
        """w after one step of gradient descent."""
        return self.w + self.eta * self.gradient()

    def gradient(self, w: Tensor | None = None) -> Tensor:
        return self.b - self.S @ (self.w if w is None else w)

    def inertia(self) -> Tensor:
        """The previous step."""
        return self.w - self.path[-2] if self.n else torch.zeros_like(self.w)

    def along(self, rest: Tensor, x: Tensor | None = None) -> Tensor:
        """w after a step with other residuals, or with other x."""
        x = self.x if x is None else x
        return self.w + self.eta * x.mT @ rest / x.shape[1]

    def read(self, w: Tensor) -> Tensor:
        return (self.query[:, None] @ w)[:, 0]

    def solved(self, penalty: Tensor | float) -> Tensor:
        """(S + penalty / L)^-1 b; a matrix as penalty multiplies w."""
        scaled = torch.as_tensor(penalty).double() / self.x.shape[1]
        return torch.linalg.solve(self.S + scaled * torch.eye(self.S.shape[1]).double(), self.b)


Step = Callable[..., Tensor]
"""Function from a Descent and the family's numbers to the next w."""


def walk(step: Step, prompts: Prompts, etas: Sequence[float], *numbers: float) -> Tensor:
    """Predictions along the path."""
    c = Descent(prompts, etas)
    for _ in etas:
        c.path.append(step(c, *numbers))
    return torch.stack([c.read(w) for w in c.path[1:]])


def plain(c: Descent) -> Tensor:
    return c.moved


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def soft(w: Tensor, limit: Tensor | float) -> Tensor:
    return w.sign() * torch.relu(w.abs() - limit)


def depth(random: Random) -> int:
    return int(random.integers(3, 5))


def steps(random: Random, low: float = 0.3, high: float = 0.6) -> list[float]:
    return random.uniform(low, high, depth(random)).tolist()


def draw(random: Random, ranges: Sequence[Range]) -> list[float]:
    return [float(random.choice(r) if isinstance(r, list) else random.uniform(*r)) for r in ranges]


def alone(learner: Callable[..., Tensor], *ranges: Range, task: Tasks = dense) -> Family:
    """Family of functions of prompts and numbers."""

    def build(random: Random) -> Drawn:
        numbers = draw(random, ranges)
        return lambda prompts: learner(prompts, *numbers), task(random)

    return build


def layers(
    learner: Callable[..., Tensor],
    *ranges: Range,
    sizes: tuple[float, float] | None = (0.3, 0.6),
    task: Tasks = dense,
) -> Family:
    """Family of functions of prompts, step sizes and numbers.

    Args:
        sizes: Interval of the step sizes; None if the learner needs none.
    """

    def build(random: Random) -> Drawn:
        etas = steps(random, *sizes) if sizes else []
        numbers = draw(random, ranges)
        etas = etas or [0.0] * depth(random)
        return lambda prompts: learner(prompts, etas, *numbers), task(random)

    return build


def descent(step: Step, *ranges: Range, **about) -> Family:
    """Family of descents with a given step; `about` as in `layers`."""

    def learner(prompts: Prompts, etas: Sequence[float], *numbers: float) -> Tensor:
        return walk(step, prompts, etas, *numbers)

    return layers(learner, *ranges, **about)


def given(learner: Callable[..., Tensor], *ranges: Range, task: Tasks = pooled) -> Family:
    """Family of functions of prompts, their task and numbers."""

    def build(random: Random) -> Drawn:
        own = task(random)
        numbers = draw(random, ranges)
        return lambda prompts: learner(prompts, own, *numbers), own

    return build


def then(family: Family, change: Callable[..., Tensor], *ranges: Range) -> Family:
    """Family with changed predictions."""

    def build(random: Random) -> Drawn:
        learner, task = family(random)
        numbers = draw(random, ranges)
        return lambda prompts: change(learner(prompts), *numbers), task

    return build


def last(family: Family) -> Family:
    """Family that shows only the last prediction."""
    return then(family, lambda path: path[-1])


def on(family: Family, change: Callable[[Prompts], Prompts]) -> Family:
    """Family on changed prompts."""

    def build(random: Random) -> Drawn:
        learner, task = family(random)
        return lambda prompts: learner(change(prompts)), task

    return build


GD = descent(plain)
