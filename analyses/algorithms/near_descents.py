"""Iterations that are no algorithm of the list but come near to gradient descent, as functions of prompts."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from analyses.algorithms.learners import dense, sparse
from mechinterp import Prompts, TaskConfig
from mechinterp.icl.predictors import ridge

Random = np.random.Generator
Learner = Callable[[Prompts], Tensor]
Drawn = tuple[Learner, TaskConfig]
Family = Callable[[Random], Drawn]
Step = Callable[["Context", int, list[Tensor]], Tensor]


class Context:
    """Pairs of prompts with their second moments."""

    def __init__(self, prompts: Prompts):
        self.x, self.y, self.query = (
            prompts.x.double(),
            prompts.y.double(),
            prompts.x_query.double(),
        )
        self.S = self.x.mT @ self.x / self.x.shape[1]
        self.b = self.x.mT @ self.y / self.x.shape[1]

    def gradient(self, w: Tensor) -> Tensor:
        return self.b - self.S @ w

    def read(self, w: Tensor) -> Tensor:
        return (self.query[:, None] @ w)[:, 0]


def walk(step: Step, n_layers: int, *, centred: bool = False) -> Learner:
    """The path of w_{l+1} = step(context, l, [w_0, ..., w_l]) from w_0 = 0."""

    def learner(prompts: Prompts) -> Tensor:
        context = Context(prompts)
        if centred:
            x = context.x - context.x.mean(1, keepdim=True)
            context.S, context.b = x.mT @ x / x.shape[1], x.mT @ context.y / x.shape[1]
        w = [torch.zeros_like(context.b)]
        for layer in range(n_layers):
            w.append(step(context, layer, w))
        return torch.stack([context.read(each) for each in w[1:]])

    return learner


def last(family: Family) -> Family:
    """The same with the last prediction alone."""

    def build(random: Random) -> Drawn:
        learner, task = family(random)
        return lambda prompts: learner(prompts)[-1], task

    return build


def depth(random: Random) -> int:
    return int(random.integers(3, 5))


def steps(random: Random, low: float = 0.3, high: float = 0.6) -> tuple[list[float], int]:
    n_layers = depth(random)
    return random.uniform(low, high, n_layers).tolist(), n_layers


def centred(random: Random) -> Drawn:
    etas, n_layers = steps(random)
    return walk(lambda c, n, w: w[-1] + etas[n] * c.gradient(w[-1]), n_layers, centred=True), dense(
        random
    )


def scaled(random: Random) -> Drawn:
    (etas, n_layers), factor = steps(random), float(random.choice([0.75, 0.85, 1.2]))
    learner = walk(lambda c, n, w: w[-1] + etas[n] * c.gradient(w[-1]), n_layers)
    return lambda prompts: factor * learner(prompts), dense(random)


def weight_decay(random: Random) -> Drawn:
    (etas, n_layers), decay = steps(random), float(random.uniform(0.1, 0.3))
    return walk(lambda c, n, w: (1 - decay) * w[-1] + etas[n] * c.gradient(w[-1]), n_layers), dense(
        random
    )


def heavy_ball(random: Random) -> Drawn:
    (etas, n_layers), beta = steps(random), float(random.uniform(0.3, 0.6))
    return walk(
        lambda c, n, w: w[-1] + etas[0] * c.gradient(w[-1]) + (beta * (w[-1] - w[-2]) if n else 0),
        n_layers,
    ), dense(random)


def nesterov(random: Random) -> Drawn:
    (etas, n_layers), beta = steps(random), float(random.uniform(0.3, 0.6))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        ahead = w[-1] + (beta * (w[-1] - w[-2]) if n else 0)
        return ahead + etas[0] * c.gradient(ahead)

    return walk(step, n_layers), dense(random)


def chebyshev(random: Random) -> Drawn:
    n_layers, (low, high) = depth(random), (0.3, 1.9)
    middle, half = (high + low) / 2, (high - low) / 2

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        ratio, known = middle / half, [1.0, middle / half]
        while len(known) < n + 3:
            known.append(2 * ratio * known[-1] - known[-2])
        if n == 0:
            return w[-1] + c.gradient(w[-1]) / middle
        omega = 2 * ratio * known[n] / known[n + 1]
        return omega * (w[-1] - w[-2] + c.gradient(w[-1]) / middle) + w[-2]

    return walk(step, n_layers), dense(random)


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def conjugate_gradients(random: Random) -> Drawn:
    n_layers = int(random.integers(2, 4))

    def learner(prompts: Prompts) -> Tensor:
        c = Context(prompts)
        w, r, path = torch.zeros_like(c.b), c.b, []
        p = r
        for _ in range(n_layers):
            alpha = inner(r, r) / inner(p, c.S @ p)
            w, new = w + alpha * p, r - alpha * (c.S @ p)
            p, r = new + inner(new, new) / inner(r, r) * p, new
            path.append(c.read(w))
        return torch.stack(path)

    return learner, dense(random)


def line_search(random: Random) -> Drawn:
    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        g = c.gradient(w[-1])
        return w[-1] + inner(g, g) / inner(g, c.S @ g) * g

    return walk(step, depth(random)), dense(random)


def own_step(random: Random) -> Drawn:
    factor = float(random.uniform(0.9, 1.3))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        return w[-1] + factor * c.gradient(w[-1]) / torch.linalg.eigvalsh(c.S)[:, -1:, None]

    return walk(step, depth(random)), dense(random)


def hard_thresholding(random: Random) -> Drawn:
    task, (etas, n_layers) = sparse(random), steps(random, 0.5, 0.9)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        new = w[-1] + etas[n] * c.gradient(w[-1])
        least = new.abs().topk(task.sparsity or 1, dim=1).values[:, -1:]
        return new * (new.abs() >= least)

    return walk(step, n_layers), task


def magnitude_threshold(random: Random) -> Drawn:
    (etas, n_layers), limit = steps(random, 0.5, 0.9), float(random.uniform(0.1, 0.2))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        new = w[-1] + etas[n] * c.gradient(w[-1])
        return new * (new.abs() >= limit)

    return walk(step, n_layers), sparse(random)


def tokens(x: Tensor, y: Tensor, w: Tensor, eta: float) -> Tensor:
    """One pass of least mean squares over the pairs."""
    for k in range(x.shape[1]):
        error = y[:, k] - (x[:, k, None] @ w)[:, 0]
        w = w + eta * x[:, k, :, None] * error[:, None]
    return w


def lms(random: Random) -> Drawn:
    task, n_layers = dense(random), depth(random)
    eta = float(random.uniform(0.5, 1.2)) / task.context_length
    return walk(lambda c, n, w: tokens(c.x, c.y, w[-1], eta), n_layers), task


def forgetting(random: Random) -> Drawn:
    keep, penalty = float(random.uniform(0.85, 0.96)), float(random.uniform(0.2, 1))

    def learner(prompts: Prompts) -> Tensor:
        age = torch.arange(prompts.x.shape[1] - 1, -1, -1).double()
        root = (keep**age).sqrt()[:, None]
        weighted = Prompts(**{**vars(prompts), "x": prompts.x * root, "y": prompts.y * root})
        return ridge(weighted, penalty=penalty)

    return learner, dense(random)


def minibatches(random: Random) -> Drawn:
    etas, n_layers = steps(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        x, y = c.x[:, n % 2 :: 2], c.y[:, n % 2 :: 2]
        return w[-1] + etas[n] * (x.mT @ (y - x @ w[-1])) / x.shape[1]

    return walk(step, n_layers), dense(random)


def free_preconditioner(random: Random) -> Drawn:
    task, (etas, n_layers) = dense(random), steps(random, 0.2, 0.4)
    noise = random.normal(size=(task.d_x, task.d_x))
    A = torch.from_numpy(np.eye(task.d_x) + 0.4 * (noise + noise.T) / (2 * task.d_x) ** 0.5)
    return walk(lambda c, n, w: w[-1] + etas[n] * A @ c.gradient(w[-1]), n_layers), task


def diagonal_preconditioner(random: Random) -> Drawn:
    task, (etas, n_layers) = dense(random), steps(random, 0.2, 0.4)
    d = torch.from_numpy(random.uniform(0.6, 1.4, (task.d_x, 1)))
    return walk(lambda c, n, w: w[-1] + etas[n] * d * c.gradient(w[-1]), n_layers), task


def jacobi(random: Random) -> Drawn:
    factor = float(random.uniform(0.4, 0.7))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        return w[-1] + factor * c.gradient(w[-1]) / c.S.diagonal(dim1=1, dim2=2)[..., None]

    return walk(step, depth(random)), dense(random)


def gauss_seidel(random: Random) -> Drawn:
    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        return w[-1] + torch.linalg.solve_triangular(c.S.tril(), c.gradient(w[-1]), upper=False)

    return walk(step, int(random.integers(2, 4))), dense(random)


def robust(random: Random) -> Drawn:
    (etas, n_layers), size = steps(random), float(random.uniform(0.6, 1.2))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        rest = size * torch.tanh((c.y - c.x @ w[-1]) / size)
        return w[-1] + etas[n] * c.x.mT @ rest / c.x.shape[1]

    return walk(step, n_layers), dense(random)


def saturated(random: Random) -> Drawn:
    learner, task = gd(random)
    size = float(random.uniform(1.5, 2.5))
    return lambda prompts: size * torch.tanh(learner(prompts) / size), task


def gd(random: Random) -> Drawn:
    etas, n_layers = steps(random)
    return walk(lambda c, n, w: w[-1] + etas[n] * c.gradient(w[-1]), n_layers), dense(random)


def averaged(random: Random) -> Drawn:
    learner, task = gd(random)

    def mean_so_far(prompts: Prompts) -> Tensor:
        path = learner(prompts)
        return path.cumsum(0) / torch.arange(1, len(path) + 1)[:, None, None]

    return mean_so_far, task


def pairs_of_heads(low: float, high: float) -> Family:
    """Layers of softmax attention with two heads each of opposite scales, on residuals."""

    def build(random: Random) -> Drawn:
        (etas, _), omega = steps(random), float(random.uniform(low, high))

        def learner(prompts: Prompts) -> Tensor:
            x, query, y = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
            patterns = []
            for side in (x, query):
                scores = omega * side @ x.mT
                patterns.append((scores.softmax(-1) - (-scores).softmax(-1)) / (2 * omega))
            path, f = [], torch.zeros_like(y[:, :1])
            for eta in etas:
                f = f + eta * patterns[1] @ y
                y = y - eta * patterns[0] @ y
                path.append(f[:, 0])
            return torch.stack(path)

        return learner, dense(random)

    return build


def unit_pairs(random: Random) -> Drawn:
    """Gradient descent on pairs that are divided by the length of x."""
    etas, n_layers = steps(random)

    def learner(prompts: Prompts) -> Tensor:
        size = prompts.x.norm(dim=2, keepdim=True) / prompts.x.shape[2] ** 0.5
        moved = Prompts(**{**vars(prompts), "x": prompts.x / size, "y": prompts.y / size})
        return walk(lambda c, n, w: w[-1] + etas[n] * c.gradient(w[-1]), n_layers)(moved)

    return learner, dense(random)


def sign_descent(random: Random) -> Drawn:
    sizes = (0.3 / np.arange(1, 5)).tolist()
    return walk(lambda c, n, w: w[-1] + sizes[n] * c.gradient(w[-1]).sign(), depth(random)), dense(
        random
    )


def exponentiated(random: Random) -> Drawn:
    """Multiplicative steps on positive and negative parts of w."""
    (etas, n_layers), scale = steps(random, 0.6, 1.0), 0.3

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        dual = torch.asinh(w[-1] / scale) + etas[n] * c.gradient(w[-1]) / scale
        return scale * torch.sinh(dual.clamp(-4, 4))

    return walk(step, n_layers), sparse(random)


def bounded_steps(random: Random) -> Drawn:
    """Steps no longer than a limit."""
    (etas, n_layers), limit = steps(random), float(random.uniform(0.15, 0.3))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        move = etas[n] * c.gradient(w[-1])
        return w[-1] + move * (limit / move.norm(dim=1, keepdim=True)).clamp(max=1)

    return walk(step, n_layers), dense(random)


def few_pairs(random: Random) -> Drawn:
    """Gradient descent on all but the last quarter of the pairs."""
    etas, n_layers = steps(random)

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        kept = 3 * c.x.shape[1] // 4
        x, y = c.x[:, :kept], c.y[:, :kept]
        return w[-1] + etas[n] * x.mT @ (y - x @ w[-1]) / kept

    return walk(step, n_layers), dense(random)


def elastic(random: Random) -> Drawn:
    """Soft thresholds of the coordinates of w after the last step alone."""
    (etas, n_layers), limit = steps(random, 0.5, 0.8), float(random.uniform(0.08, 0.2))

    def step(c: Context, n: int, w: list[Tensor]) -> Tensor:
        new = w[-1] + etas[n] * c.gradient(w[-1])
        return (
            new.sign() * torch.relu(new.abs() - limit) / (1 + limit) if n == n_layers - 1 else new
        )

    return walk(step, n_layers), sparse(random)
