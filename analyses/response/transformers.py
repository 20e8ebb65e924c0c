"""Trained transformers and models of pools for the calibration of the readings, and the readings that are right for them.

A right reading follows from predictions and from their derivatives by y, with least squares on terms of a filter, on
functions of similarity, and on the posterior mean of the pool. Nothing here calls the response."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from analyses.response.families import BATCH, KERNEL, NOT_LINEAR, POSTERIOR, RLS, STILL, Learner
from mechinterp import sample_prompts
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.predictors import dmmse
from mechinterp.icl.prompts import Prompts
from mechinterp.training.train import train

STEPS = 4000
TASKS = ((2, 8, 0.1), (3, 12, 0.05), (3, 15, 0.3), (4, 16, 0.1))
"""d_x, number of pairs and noise."""
LAYERS = (2, 3)
POOLS = (4, 16, 64)
N_PROMPTS = 4096
POWERS = 9
"""Number of powers of S in a filter of powers: up to eight steps of descent."""
CS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Penalties over L of the ridge regressions."""
NOT_LINEAR_FROM, NO_FILTER, FALL = (0.15, 0.01), (0.05, 0.01), (0.1, 0.05)
"""Limits of docs/response.md, each with the distance below which both sides are right."""
BY_SIMILARITY, BY_POSTERIOR = (0.15, 0.05), (0.5, 0.1)
"""Shares of what the filter leaves, in the same way."""


@dataclass(frozen=True)
class Checked:
    """Parts of the squared predictions, and the fall of the weights with age."""

    not_linear: float
    """Mismatch of f under sums of two y, or the part that is even in y; on pools, where neither y has a meaning, what all
    columns leave."""
    by_filter: float
    """Part that a filter and the mean of x leave."""
    by_similarity: float
    by_posterior: float
    """The same with a function of similarity, and with the posterior mean of the pool; NaN without a pool."""
    fall: float
    """1 - weight of the oldest pair / weight of the newest."""


def config_of(kind: str, task: TaskConfig, n_layers: int, seed: int) -> ExperimentConfig:
    """A small GPT-2 whose tokens are x and y in turn, or linear attention over pairs."""
    if kind == "GPT-2":
        model = ModelConfig(
            n_layers=n_layers,
            n_heads=2,
            d_head=16,
            d_model=32,
            d_mlp=128,
            score="softmax",
            attend_to_self=True,
            biases=True,
            norm="before",
            final_norm=True,
            activation="gelu_new",
            layout="in_turn",
            n_positions=2 * task.context_length + 2,
        )
    else:
        model = ModelConfig(
            n_layers=n_layers, n_heads=2, d_head=8, d_model=32, score="linear/L", context_only=True
        )
    training = TrainConfig(
        steps=STEPS,
        batch_size=64,
        learning_rate=0.002,
        data_seed=seed,
        log_every=STEPS,
        n_eval_prompts=1024,
        schedule="cosine",
        warm_up=200,
        clip_norm=1.0,
        loss="every" if kind == "GPT-2" else "query",
    )
    return ExperimentConfig(task=task, model=model, train=training, seed=seed)


def configs(seeds: range, *, pools_alone: bool) -> Iterator[tuple[str, int, ExperimentConfig]]:
    """Name, seed and settings of each model; all of one seed, then all of the next."""
    for seed in seeds:
        for kind, n_tasks in product(("linear", "GPT-2"), POOLS):
            task = TaskConfig(
                d_x=4, context_length=16, noise_var=0.1, n_tasks=n_tasks, task_seed=seed
            )
            yield f"{kind}, pool of {n_tasks}", seed, config_of(kind, task, 2, seed)
        for (d_x, length, noise), n_layers in product(() if pools_alone else TASKS, LAYERS):
            task = TaskConfig(d_x=d_x, context_length=length, noise_var=noise)
            name = f"GPT-2 of {n_layers} layers, d_x {d_x}, {length} pairs"
            yield name, seed, config_of("GPT-2", task, n_layers, seed)


def trained(config: ExperimentConfig) -> Learner:
    """Predictions of the model at the end of its training."""
    with TemporaryDirectory() as folder:
        predictor = train(config, out=Path(folder) / "model").predictor
    return predictor.with_gradients


def right_of(learner: Learner, task: TaskConfig, n_layers: int, *, bounded: bool) -> frozenset[str]:
    """Right readings; two where a number is near a limit. `bounded` is that of `checked`."""
    return readings_of(checked(learner, task, bounded=bounded), n_layers)


def readings_of(found: Checked, n_layers: int) -> frozenset[str]:
    """Readings that the numbers allow.

    Example:
        >>> sorted(readings_of(Checked(0.0, 0.01, 0.01, float("nan"), 0.0), 2))
        ['batch']
        >>> sorted(readings_of(Checked(0.155, 0.2, 0.2, 0.05, 0.0), 2))
        ['no linear map', 'posterior']
    """
    right: set[str] = set()
    limit, near = NOT_LINEAR_FROM
    if found.not_linear > limit - near:
        right.add(NOT_LINEAR)
    if found.not_linear > limit + near:
        return frozenset(right)
    limit, near = NO_FILTER
    share, close = BY_SIMILARITY
    similar = 1 - found.by_similarity / found.by_filter
    kernel = found.by_filter > limit - near and similar > share - close
    if kernel:
        right.add(KERNEL)
    if kernel and found.by_filter > limit + near and similar > share + close:
        return frozenset(right)
    share, close = BY_POSTERIOR
    after = 1 - found.by_posterior / found.by_filter
    if after > share - close:
        right.add(POSTERIOR)
    if after > share + close:
        return frozenset(right)
    limit, near = FALL
    if found.fall > limit - near:
        right.add(RLS)
    if found.fall < limit + near:
        right |= {BATCH, STILL} if n_layers == 1 else {BATCH}
    return frozenset(right)


def checked(learner: Learner, task: TaskConfig, *, bounded: bool) -> Checked:
    """Numbers of a learner on prompts of its own; each part is that of half the prompts after a fit to the other half.

    Args:
        bounded: False: the filter's columns are powers of S. True: ridges in x and in the coordinates of the pool, with four
            times the prompts. Powers have heavy tails: a fit of them may leave more with a column than without.
    """
    prompts = sample_prompts(task, N_PROMPTS * (4 if bounded else 1), seed=1).to(torch.float64)
    f, weights = _derivatives(learner, prompts)
    columns = powers(prompts)
    if bounded:
        columns = torch.cat([ridges(each) for each in (prompts, *_in_pool(prompts, task))], 1)
    similar = torch.cat([columns, similarities(prompts)], 1)
    posterior = float("nan")
    if task.n_tasks:
        mean = dmmse(prompts, pool=task.pool(), noise_var=task.noise_var)
        posterior = left(f, torch.cat([similar, mean], 1))
    by_filter, by_similarity = left(f, columns), left(f, similar)
    return Checked(
        not_linear=min(by_filter, by_similarity, posterior)
        if task.n_tasks
        else _mismatch(learner, prompts),
        by_filter=by_filter,
        by_similarity=by_similarity,
        by_posterior=posterior,
        fall=_fall(weights, prompts),
    )


@torch.no_grad()
def _mismatch(learner: Learner, prompts: Prompts) -> float:
    """E (f(y + y') - f(y) - f(y'))^2 / (2 E (f(y) + f(y'))^2), or the part that is even in y if that is larger; y' has other task vectors and noise."""

    def run(y: Tensor) -> Tensor:
        return learner(Prompts(**vars(prompts) | {"y": y}))[:, 0].double()

    order = torch.roll(torch.arange(len(prompts)), 1)
    noise = (prompts.y - prompts.x @ prompts.beta)[order]
    other = prompts.x @ prompts.beta[order] + noise
    f, half = run(prompts.y), 0.5**0.5
    apart = (f + run(other)) * half
    mismatch = (run((prompts.y + other) * half) - apart).square().mean() / f.square().mean() / 2
    even = (f + run(-prompts.y)).square().mean() / 4 / f.square().mean()
    return max(float(mismatch), float(even))


def _derivatives(learner: Learner, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Predictions and their derivatives by y_j."""
    y = prompts.y.clone().requires_grad_(True)
    f = learner(Prompts(**vars(prompts) | {"y": y}))[:, 0]
    (weights,) = torch.autograd.grad(f.sum(), y)
    return f.detach().double(), weights[..., 0].double()


def _fall(weights: Tensor, prompts: Prompts) -> float:
    """1 - w(oldest) / w(newest), w the line in the place of the pair that is nearest to a_j / <x_j, q>."""
    products = torch.einsum("nld,nd->nl", prompts.x.double(), prompts.x_query.double())
    place = torch.linspace(0, 1, products.shape[1], dtype=torch.float64).expand_as(products)
    columns = torch.stack([products, products * place], -1).reshape(-1, 2)
    start, slope = torch.linalg.lstsq(columns, weights.reshape(-1, 1)).solution[:, 0]
    return float(slope / (start + slope))


def powers(prompts: Prompts, number: int = POWERS, *, normed: bool = True) -> Tensor:
    """Terms S^k b of steps of descent for each k below a number, and that of the mean of x, [batch, number + 1].

    Args:
        normed: True: each S^k b is divided by its root mean square. False: as it is, in the first set of the calibration.
    """
    x, y, q = prompts.x.double(), prompts.y.double(), prompts.x_query.double()
    n = x.shape[1]
    S, w = x.mT @ x / n, x.mT @ y / n
    columns = []
    for _ in range(number):
        columns.append((q[:, None] @ w)[:, 0, 0])
        w = S @ w
        w = w / w.square().mean().sqrt() if normed else w
    columns.append(_mean_term(prompts))
    return torch.stack(columns, 1)


def ridges(prompts: Prompts) -> Tensor:
    """Ridge regressions at CS, a step of descent, and the term of the mean of x, [batch, 8]."""
    x, y, q = prompts.x.double(), prompts.y.double(), prompts.x_query.double()
    n = x.shape[1]
    S, b = x.mT @ x / n, x.mT @ y / n
    eye = torch.eye(len(S[0]), dtype=S.dtype)
    read = [torch.linalg.solve(S + c * eye, b) for c in CS]
    columns = [(q[:, None] @ w)[:, 0, 0] for w in (*read, b)]
    return torch.stack([*columns, _mean_term(prompts)], 1)


def _mean_term(prompts: Prompts) -> Tensor:
    return (prompts.x_query * prompts.x.mean(1)).sum(1).double() * prompts.y.double().mean(1)[:, 0]


def _in_pool(prompts: Prompts, task: TaskConfig) -> list[Prompts]:
    """The prompts with x -> root x, root root the second moment of the pool's task vectors; none without a pool."""
    if not task.n_tasks:
        return []
    vectors = task.pool()[..., 0].to(prompts.x)
    scale, axes = torch.linalg.eigh(vectors.mT @ vectors / len(vectors))
    root = axes * scale.clamp(min=0).sqrt() @ axes.mT
    return [Prompts(**vars(prompts) | {"x": prompts.x @ root, "x_query": prompts.x_query @ root})]


def similarities(prompts: Prompts) -> Tensor:
    """sum_j k(x_j, q) y_j / L for powers and exponentials of <x_j, q>, [batch, 5]."""
    x, y, q = prompts.x.double(), prompts.y.double()[..., 0], prompts.x_query.double()
    products = torch.einsum("nld,nd->nl", x, q) / x.shape[2] ** 0.5
    kernels = (products**2, products**3, torch.tanh(products), torch.exp(products.clamp(max=5)))
    normed = torch.softmax(products, 1) * x.shape[1]
    return torch.stack([(kernel * y).mean(1) for kernel in (*kernels, normed)], 1)


def left(f: Tensor, columns: Tensor) -> float:
    """Part of f^2 that a least-squares fit to the first half of the prompts leaves in the second."""
    half = len(f) // 2
    fit = torch.linalg.lstsq(columns[:half], f[:half, None], driver="gelsd").solution[:, 0]
    rest = f[half:] - columns[half:] @ fit
    return float(rest.square().mean() / f[half:].square().mean())
