"""Steps that are close to gradient descent but are no algorithm of the list: functions from the
path so far and the family's numbers to the next w."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from analyses.algorithms import families as make
from analyses.algorithms.families import Descent, Drawn, Family, Random, correlated, dense, sparse
from mechinterp import Prompts


def scaled(prompts: Prompts, etas: Sequence[float], factor: float) -> Tensor:
    return factor * make.walk(make.plain, prompts, etas)


def centred_x(prompts: Prompts) -> Prompts:
    x = prompts.x.double()
    return replace(prompts, x=x - x.mean(1, keepdim=True))


def unit_length(prompts: Prompts) -> Prompts:
    """Prompts whose pairs are divided by the length of x."""
    size = prompts.x.norm(dim=2, keepdim=True) / prompts.x.shape[2] ** 0.5
    return replace(prompts, x=prompts.x / size, y=prompts.y / size)


def heavy_ball(c: Descent, beta: float) -> Tensor:
    return c.w + c.etas[0] * c.gradient() + beta * c.inertia()


def nesterov(c: Descent, beta: float) -> Tensor:
    ahead = c.w + beta * c.inertia()
    return ahead + c.etas[0] * c.gradient(ahead)


def chebyshev(c: Descent) -> Tensor:
    low, high = 0.3, 1.9
    middle, half = (high + low) / 2, (high - low) / 2
    ratio, known = middle / half, [1.0, middle / half]
    while len(known) < c.n + 3:
        known.append(2 * ratio * known[-1] - known[-2])
    if c.n == 0:
        return c.w + c.gradient() / middle
    omega = 2 * ratio * known[c.n] / known[c.n + 1]
    return omega * (c.w - c.path[-2] + c.gradient() / middle) + c.path[-2]


def conjugate_gradients(random: Random) -> Drawn:
    n_layers = int(random.integers(2, 4))

    def learner(prompts: Prompts) -> Tensor:
        c = Descent(prompts)
        w, r, path = c.w, c.b, []
        p = r
        for _ in range(n_layers):
            alpha = make.inner(r, r) / make.inner(p, c.S @ p)
            w, new = w + alpha * p, r - alpha * (c.S @ p)
            p, r = new + make.inner(new, new) / make.inner(r, r) * p, new
            path.append(c.read(w))
        return torch.stack(path)

    return learner, dense(random)


def line_search(c: Descent) -> Tensor:
    g = c.gradient()
    return c.w + make.inner(g, g) / make.inner(g, c.S @ g) * g


def own_step(c: Descent, factor: float) -> Tensor:
    return c.w + factor * c.gradient() / torch.linalg.eigvalsh(c.S)[:, -1:, None]


def hard_thresholding(random: Random) -> Drawn:
    task, etas = sparse(random), make.steps(random, 0.5, 0.9)

    def step(c: Descent) -> Tensor:
        return c.moved * (c.moved.abs() >= least(c.moved, task.sparsity or 1))

    return lambda prompts: make.walk(step, prompts, etas), task


def least(w: Tensor, count: int) -> Tensor:
    """Size of the smallest of the `count` largest entries."""
    return w.abs().topk(count, dim=1).values[:, -1:]


def lms(random: Random) -> Drawn:
    """Passes of least mean squares over the pairs."""
    task, n_layers = dense(random), make.depth(random)
    eta = float(random.uniform(0.5, 1.2)) / task.context_length

    def step(c: Descent) -> Tensor:
        w = c.w
        for k in range(c.x.shape[1]):
            error = c.y[:, k] - (c.x[:, k, None] @ w)[:, 0]
            w = w + eta * c.x[:, k, :, None] * error[:, None]
        return w

    return lambda prompts: make.walk(step, prompts, [eta] * n_layers), task


def minibatches(c: Descent) -> Tensor:
    x, y = c.x[:, c.n % 2 :: 2], c.y[:, c.n % 2 :: 2]
    return c.w + c.eta * (x.mT @ (y - x @ c.w)) / x.shape[1]


def free_preconditioner(random: Random) -> Drawn:
    task, etas = dense(random), make.steps(random, 0.2, 0.4)
    noise = random.normal(size=(task.d_x, task.d_x))
    A = torch.from_numpy(np.eye(task.d_x) + 0.4 * (noise + noise.T) / (2 * task.d_x) ** 0.5)
    return lambda p: make.walk(lambda c: c.w + c.eta * A @ c.gradient(), p, etas), task


def diagonal_preconditioner(random: Random) -> Drawn:
    task, etas = dense(random), make.steps(random, 0.2, 0.4)
    d = torch.from_numpy(random.uniform(0.6, 1.4, (task.d_x, 1)))
    return lambda p: make.walk(lambda c: c.w + c.eta * d * c.gradient(), p, etas), task


def other_axes_in_each_layer(random: Random) -> Drawn:
    """Steps whose sizes differ by coordinate, with different sizes in every layer."""
    task, etas = dense(random), make.steps(random, 0.25, 0.45)
    d = torch.from_numpy(random.uniform(0.6, 1.4, (len(etas), task.d_x, 1)))
    return lambda p: make.walk(lambda c: c.w + c.eta * d[c.n] * c.gradient(), p, etas), task


def jacobi(c: Descent, factor: float) -> Tensor:
    return c.w + factor * c.gradient() / c.S.diagonal(dim1=1, dim2=2)[..., None]


def gauss_seidel(random: Random) -> Drawn:
    def step(c: Descent) -> Tensor:
        return c.w + torch.linalg.solve_triangular(c.S.tril(), c.gradient(), upper=False)

    n_layers = int(random.integers(2, 4))
    return lambda prompts: make.walk(step, prompts, [0.0] * n_layers), dense(random)


def robust(c: Descent, size: float) -> Tensor:
    return c.along(size * torch.tanh(c.rest / size))


def averaged(path: Tensor) -> Tensor:
    return path.cumsum(0) / torch.arange(1, len(path) + 1)[:, None, None]


def extrapolated(prompts: Prompts, etas: Sequence[float], more: float) -> Tensor:
    """Predictions extrapolated from the last two iterates of descent."""
    path = make.walk(make.plain, prompts, etas)
    return path + more * (path - torch.cat([torch.zeros_like(path[:1]), path[:-1]]))


def pairs_of_heads(low: float, high: float) -> Family:
    """Layers of softmax attention on residuals, with two heads of opposite scales each."""

    def learner(prompts: Prompts, etas: Sequence[float], omega: float) -> Tensor:
        x, query, y = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
        scores = (omega * side @ x.mT for side in (x, query))
        K, k = ((one.softmax(-1) - (-one).softmax(-1)) / (2 * omega) for one in scores)
        path, f = [], torch.zeros_like(y[:, :1])
        for eta in etas:
            f, y = f + eta * k @ y, y - eta * K @ y
            path.append(f[:, 0])
        return torch.stack(path)

    return make.layers(learner, (low, high))


def quadratic_features(prompts: Prompts, etas: Sequence[float], c: float) -> Tensor:
    """Descent in function space with the kernel k + c k^2, k = x x'."""
    x, q, rest = prompts.x.double(), prompts.x_query.double()[:, None], prompts.y.double()
    K, k = (side @ x.mT + c * (side @ x.mT).square() for side in (x, q))
    path, f = [], torch.zeros_like(rest[:, :1])
    for eta in etas:
        f, rest = f + eta * k @ rest / x.shape[1], rest - eta * K @ rest / x.shape[1]
        path.append(f[:, 0])
    return torch.stack(path)


def exponentiated(c: Descent) -> Tensor:
    """Multiplicative steps on positive and negative parts of w."""
    dual = torch.asinh(c.w / 0.3) + c.eta * c.gradient() / 0.3
    return 0.3 * torch.sinh(dual.clamp(-4, 4))


def bounded_steps(c: Descent, limit: float) -> Tensor:
    """Steps with a largest length."""
    move = c.eta * c.gradient()
    return c.w + move * (limit / move.norm(dim=1, keepdim=True)).clamp(max=1)


def few_pairs(c: Descent) -> Tensor:
    """Gradient descent on all but the last quarter of the pairs."""
    kept = 3 * c.x.shape[1] // 4
    return c.along(c.rest[:, :kept], c.x[:, :kept])


def elastic(c: Descent, limit: float) -> Tensor:
    """Soft thresholds of the coordinates of w, after the last step only."""
    return make.soft(c.moved, limit) / (1 + limit) if c.n == len(c.etas) - 1 else c.moved


def blocks(c: Descent) -> Tensor:
    """Steps on half of the coordinates, alternating."""
    own = (torch.arange(c.w.shape[1]) % 2 == c.n % 2).to(c.w)[:, None]
    return c.w + c.eta * own * c.gradient()


def of_unit_length(c: Descent, size: float) -> Tensor:
    """Steps along the gradient with lengths that decrease with the layer."""
    g = c.gradient()
    return c.w + size / (c.n + 1) * g / g.norm(dim=1, keepdim=True)


def two_point_steps(c: Descent, first: float) -> Tensor:
    """Barzilai-Borwein steps."""
    g = c.gradient()
    if c.n == 0:
        return c.w + first * g
    moved, turned = c.inertia(), c.gradient(c.path[-2]) - g
    return c.w + make.inner(moved, moved) / make.inner(moved, turned) * g


def halves_in_turn(c: Descent) -> Tensor:
    """A step on the first half of the pairs and then one on the second half, in every layer."""
    w = c.w
    for x, y in zip(c.x.chunk(2, 1), c.y.chunk(2, 1), strict=True):
        w = w + c.eta * x.mT @ (y - x @ w) / x.shape[1]
    return w


def shrunk_moments(c: Descent, share: float) -> Tensor:
    """Descent on S shrunk towards its mean eigenvalue."""
    mean = c.S.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return c.w + c.eta * (c.b - (1 - share) * c.S @ c.w - share * mean * c.w)


def from_elsewhere(random: Random) -> Drawn:
    """Descent from a fixed nonzero w."""
    task, etas = dense(random), make.steps(random)
    start = torch.from_numpy(random.normal(size=(task.d_x, 1))) * 0.3 / task.d_x**0.5

    def step(c: Descent) -> Tensor:
        before = c.w + (0 if c.n else start)
        return before + c.eta * c.gradient(before)

    return lambda prompts: make.walk(step, prompts, etas), task


def step_by_noise(c: Descent) -> Tensor:
    """Steps that are shorter for larger responses."""
    size = c.y.square().mean(1, keepdim=True)
    return c.w + c.eta / (1 + 0.5 * size) * c.gradient()


def leverage(c: Descent, power: float) -> Tensor:
    """Descent on pairs that have less weight for longer x."""
    return c.along(c.x.square().mean(2, keepdim=True) ** -power * c.rest)


def wrong_covariance(random: Random) -> Drawn:
    """Descent preconditioned by the inverse covariance of a chain with another correlation."""
    task, n_layers = correlated(random), make.depth(random)
    rho, eta = -task.covariance.rho / 2, float(random.uniform(0.1, 0.2))
    lag = torch.arange(task.d_x)[:, None] - torch.arange(task.d_x)
    A = torch.linalg.inv(rho ** lag.abs().double() + 0.3 * torch.eye(task.d_x))
    return lambda p: make.walk(lambda c: c.w + eta * A @ c.gradient(), p, [eta] * n_layers), task


def largest_entries(random: Random) -> Drawn:
    """Steps on the coordinates with the largest gradients, twice as many as nonzero entries."""
    task, etas = sparse(random), make.steps(random, 0.5, 0.9)

    def step(c: Descent) -> Tensor:
        g = c.gradient()
        return c.w + c.eta * g * (g.abs() >= least(g, min(2 * (task.sparsity or 1), task.d_x)))

    return lambda prompts: make.walk(step, prompts, etas), task


def rounded_steps(c: Descent, limit: float) -> Tensor:
    """Shrinkage of the step instead of w."""
    g = c.gradient()
    return c.w + c.eta * g.sign() * torch.relu(g.abs() - limit)


def powers_of_b(c: Descent) -> Tensor:
    """Algorithm 1 with the size of b instead of its square."""
    return c.w + (c.eta * c.b.abs() * c.gradient() if c.n else 0)


def clipped_x(c: Descent, limit: float) -> Tensor:
    x = c.x.clamp(-limit, limit)
    return c.along(c.y - x @ c.w, x)


def sampled_pairs(c: Descent) -> Tensor:
    """Descent whose layers give half weight to every third pair, in turn."""
    weight = torch.ones(c.x.shape[1], 1).double()
    weight[c.n % 3 :: 3] = 0.5
    return c.along(weight * c.rest)


def fast_shrinkage(c: Descent, limit: float) -> Tensor:
    """ISTA with inertia (FISTA)."""
    ahead = c.w + c.n / (c.n + 3) * c.inertia()
    return make.soft(ahead + c.etas[0] * c.gradient(ahead), limit)


def two_descents(random: Random) -> Drawn:
    """Descent with a longer step if the responses are large, and a shorter one otherwise."""
    n_layers, fast = make.depth(random), float(random.uniform(0.5, 0.7))

    def step(c: Descent) -> Tensor:
        large = c.y.square().mean(1, keepdim=True) > 1
        return c.w + torch.where(large, fast, 0.3) * c.gradient()

    return lambda prompts: make.walk(step, prompts, [fast] * n_layers), dense(random)


ANY, SPARSE = {"sizes": None}, {"sizes": (0.5, 0.9), "task": sparse}
"""Arguments for steps without a drawn size, and for steps on sparse tasks."""
HEAVY, NESTEROV = (make.descent(step, (0.3, 0.6)) for step in (heavy_ball, nesterov))
DECAY = make.descent(lambda c, decay: (1 - decay) * c.w + c.eta * c.gradient(), (0.1, 0.3))
SEARCH = make.descent(line_search, **ANY)
