"""Twenty families written after the rules of `naming.py`, run once and counted as they came out.

Near misses are functions and models of noisy weights that follow no listed algorithm; guises are listed algorithms
computed in ways that the package does not have.
"""

from collections.abc import Callable
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
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix
from mechinterp.models.constructions import descent
from mechinterp.models.weights import Weights


def polyak(c: Descent, factor: float) -> Tensor:
    """Steps of Polyak's size, for a least loss of 0, prompt by prompt."""
    g, loss = c.gradient(), c.rest.square().mean(1, keepdim=True)
    return c.w + factor * loss / make.inner(g, g).clamp(min=1e-6) * g


def without_largest(c: Descent) -> Tensor:
    """Gradients without the quarter of the pairs with the largest residuals."""
    size = c.rest.abs()
    kept = size <= size.quantile(0.75, dim=1, keepdim=True)
    return c.w + c.eta * c.x.mT @ (kept * c.rest) / c.x.shape[1]


def own_gamma(prompts: Prompts, etas: list[float], gamma: float) -> Tensor:
    """GD++ whose gamma is divided by the largest eigenvalue of each prompt."""
    x, y = prompts.x.double(), prompts.y.double()
    query, path = prompts.x_query.double()[:, None], []
    f = torch.zeros_like(y[:, :1])
    for eta in etas:
        S = x.mT @ x / x.shape[1]
        size = gamma / torch.linalg.eigvalsh(S)[:, -1, None, None]
        step = eta * x.mT @ y / x.shape[1]
        f, y = f + query @ step, y - x @ step
        query, x = query - size * query @ S, x - size * x @ S
        path.append(f[:, 0])
    return torch.stack(path)


def penalty_by_b(prompts: Prompts, penalty: float, least: float) -> Tensor:
    """Ridge that penalises coordinates of small b more (adaptive ridge)."""
    c = Descent(prompts)
    weights = penalty / (c.b.abs() + least) / c.x.shape[1]
    w = torch.linalg.solve(c.S + torch.diag_embed(weights[..., 0]), c.b)
    return c.read(w)


def thirds(prompts: Prompts, penalty: float) -> Tensor:
    """Median of ridge regressions on three parts of the pairs."""
    parts = zip(prompts.x.chunk(3, 1), prompts.y.chunk(3, 1), strict=True)
    each = [Descent(replace(prompts, x=x, y=y)) for x, y in parts]
    return torch.stack([c.read(c.solved(penalty)) for c in each]).median(0).values


def likeliest(prompts: Prompts, task: TaskConfig, sharp: float) -> Tensor:
    """Task of the pool of the largest likelihood, and a part of the posterior mean."""
    pool, c = task.pool().double(), Descent(prompts)
    rest = (prompts.y[:, None].double() - prompts.x[:, None].double() @ pool).square()
    logs = -rest.sum((2, 3)) / (2 * task.noise_var)
    p = sharp * torch.nn.functional.one_hot(logs.argmax(1), len(pool)) + (1 - sharp) * logs.softmax(
        1
    )
    return c.read((p[..., None, None] * pool).sum(1))


def damped_inverse(prompts: Prompts, etas: list[float], alpha: float, damping: float) -> Tensor:
    """Newton's iteration for the inverse of S + damping."""
    c, path = Descent(prompts), []
    A = c.S + damping * torch.eye(c.S.shape[1]).double()
    M = alpha * A
    for _ in etas:
        path.append(c.read(M @ c.b))
        M = 2 * M - M @ A @ M
    return torch.stack(path)


def kaczmarz(c: Descent, share: float) -> Tensor:
    """A pass over the pairs, each fitted in part."""
    w = c.w
    for k in range(c.x.shape[1]):
        x = c.x[:, k, :, None]
        w = w + share * x * (c.y[:, k, None] - x.mT @ w) / make.inner(x, x).clamp(min=0.1)
    return w


def built(change: Callable[[Weights, Random], Weights], noise: float = 0.01) -> Family:
    """Weights of gradient descent, changed, in a rotated stream, with noise."""

    def build(random: Random) -> Drawn:
        task, n_layers, seed = dense(random), make.depth(random), int(random.integers(1000))
        etas = random.uniform(0.25, 0.5, n_layers).tolist()
        plain = change(descent.gradient_descent_model(etas, d_x=task.d_x), random)
        return descent.with_noise(descent.rotated(plain, seed=seed), noise, seed=seed), task

    return build


def scaled_reading(weights: Weights, random: Random) -> Weights:
    factor = float(random.uniform(0.8, 0.88))
    return weights.with_tensors({"unembed.W_U": factor * weights.reading[1]})


def one_layer_of_its_own(weights: Weights, random: Random) -> Weights:
    """A random preconditioner in one layer."""
    d_x, layer = weights.d_x, int(random.integers(weights.n_layers))
    noise = torch.from_numpy(random.normal(size=(d_x, d_x)))
    W_Q = weights.W_Q.clone()
    W_Q[layer, 0, :d_x, :d_x] @= 0.6 * noise @ noise.mT / d_x + 0.4 * torch.eye(d_x).double()
    return weights.with_tensors({"attn.W_Q": W_Q})


def uneven_axes(weights: Weights, random: Random) -> Weights:
    """A fixed diagonal preconditioner in all layers."""
    W_Q, sizes = weights.W_Q.clone(), torch.from_numpy(random.uniform(0.5, 1.5, weights.d_x))
    W_Q[..., : weights.d_x, : weights.d_x] *= sizes[:, None]
    return weights.with_tensors({"attn.W_Q": W_Q})


def moved_x(weights: Weights, random: Random) -> Weights:
    """Heads that write a random image of x into x."""
    W_O, d_x = weights.W_O.clone(), weights.d_x
    noise = torch.from_numpy(random.normal(size=(weights.n_layers, 1, d_x, d_x)))
    W_O[..., :d_x, :d_x] = 0.25 * noise / d_x**0.5
    return weights.with_tensors({"attn.W_O": W_O})


def responses_as_keys(weights: Weights, random: Random) -> Weights:
    """Scores that compare responses, too."""
    W_Q, W_K, size = weights.W_Q.clone(), weights.W_K.clone(), float(random.uniform(0.2, 0.4))
    W_Q[..., -1, -1] = size * weights.d_model**0.5
    W_K[..., -1, -1] = 1
    return weights.with_tensors({"attn.W_Q": W_Q, "attn.W_K": W_K})


LATER_MISSES: dict[str, Family] = {
    "Polyak's steps": make.descent(polyak, (0.3, 0.6), sizes=None, task=noisy),
    "largest residuals left out": make.descent(without_largest),
    "GD++ by the prompt's eigenvalue": make.layers(own_gamma, (0.2, 0.4)),
    "penalty by the size of b": make.alone(penalty_by_b, (0.3, 1), (0.1, 0.3), task=sparse),
    "median of three ridges": make.alone(thirds, (0.3, 1), task=noisy),
    "likeliest task of the pool": make.given(likeliest, (0.1, 0.4)),
    "Newton with damping in S": make.layers(damped_inverse, (0.15, 0.3), (0.05, 0.2), sizes=None),
    "passes over the pairs": make.descent(kaczmarz, (0.1, 0.25), sizes=None),
    "weights: read-out of another size": built(scaled_reading),
    "weights: one layer of its own": built(one_layer_of_its_own),
    "weights: uneven axes": built(uneven_axes),
    "weights: moved x": built(moved_x),
    "weights: responses as keys": built(responses_as_keys),
}


def by_singular_values(prompts: Prompts, penalty: float) -> Tensor:
    U, s, Vh = torch.linalg.svd(prompts.x.double(), full_matrices=False)
    w = Vh.mT @ (s[..., None] / (s[..., None].square() + penalty) * (U.mT @ prompts.y.double()))
    return Descent(prompts).read(w)


def on_tokens(prompts: Prompts, etas: list[float], gamma: float) -> Tensor:
    """GD++ as a recursion on tokens (x, y)."""
    tokens, d_x, path = prompts.tokens.double(), prompts.x.shape[2], []
    for eta in etas:
        pairs = tokens[:, :-1]
        scores = tokens[..., :d_x] @ pairs[..., :d_x].mT / pairs.shape[1]
        sizes = torch.tensor([gamma] * d_x + [eta]).double()
        tokens = tokens - scores @ pairs * sizes
        path.append(-tokens[:, -1, d_x:])
    return torch.stack(path)


def by_logs(prompts: Prompts, task: TaskConfig) -> Tensor:
    """The posterior mean of the pool from moments of the pairs."""
    pool, c, L = task.pool().double(), Descent(prompts), prompts.x.shape[1]
    fit = torch.einsum("tdy,bdy->bt", pool, c.b)
    size = torch.einsum("tdy,bde,tey->bt", pool, c.S, pool)
    p = (L * (fit - size / 2) / task.noise_var).softmax(1)
    return c.read((p[..., None, None] * pool).sum(1))


def in_two_moves(c: Descent, limit: float) -> Tensor:
    """ISTA as the difference of two rectified moves."""
    return (c.moved - limit).relu() - (-c.moved - limit).relu()


def zero_heads(weights: Weights, random: Random) -> Weights:
    """Two heads of zeros beside the one of descent."""
    sides = {}
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        tensor = getattr(weights, name)
        sides[f"attn.{name}"] = torch.cat(
            [torch.zeros_like(tensor), tensor, torch.zeros_like(tensor)], 1
        )
    model = replace(weights.model, n_heads=3)
    return replace(weights, model=model, tensors={**weights.tensors, **sides})


def preconditioned(random: Random) -> Drawn:
    """Weights of preconditioned descent with 1% noise."""
    task, n_layers, seed = correlated(random), make.depth(random), int(random.integers(1000))
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    etas, cs = (random.uniform(*ends, n_layers).tolist() for ends in ((0.3, 0.5), (0.1, 0.4)))
    plain = descent.preconditioned_gd_model(etas, cs, covariance=Sigma)
    return descent.with_noise(descent.rotated(plain, seed=seed), 0.01, seed=seed), task


LATER_GUISES: dict[str, tuple[str, str, Family]] = {
    "guise: ridge by singular values": (
        "ridge_like",
        "must",
        make.alone(by_singular_values, (0.3, 2)),
    ),
    "guise: GD++ on tokens": ("gd_plus_plus", "must", make.layers(on_tokens, (0.1, 0.2))),
    "guise: posterior from moments": ("posterior_mean", "must", make.given(by_logs)),
    "guise: ISTA in two moves": (
        "sparse_shrinkage",
        "must",
        make.descent(in_two_moves, (0.03, 0.08), sizes=(0.5, 0.9), task=sparse),
    ),
    "guise: descent beside heads of zeros": ("gradient_descent", "must", built(zero_heads)),
    "guise: preconditioned weights with noise": ("preconditioned_descent", "must", preconditioned),
    "guise: descent of half steps": (
        "gradient_descent",
        "must",
        make.layers(lambda p, etas: make.walk(lambda c: c.w + 0.5 * c.eta * c.gradient(), p, etas)),
    ),
}
