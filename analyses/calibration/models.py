"""Models whose right label is known, for analyses/calibration/errors.py: built, disturbed by a
known amount, random or trained."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from mechinterp import ExperimentConfig, ModelConfig, TaskConfig, compare_learners
from mechinterp.config import CovarianceConfig
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.models.constructions.one_layer import diagonal_heads, from_circuits
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import initial_weights

ONE = TaskConfig()
TWO = TaskConfig(d_x=6, d_y=2, context_length=48, beta_var=1.0, noise_var=0.4, query_noise=False)
SUPPORTS = ((0, 1, 2, 3), (2, 3, 4, 5))
NOISE = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
LEAKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
NONE = "no pattern"
SEED = 20_261_126
TRAINED = Path(__file__).with_name("trained.safetensors")


@dataclass(frozen=True, eq=False)
class Case:
    """A model and the label it should get."""

    source: str
    truth: str
    weights: Weights
    task: TaskConfig
    size: float
    """Relative size of the disturbance; NaN if there is none."""
    demand: str
    """"must": has to get its label; "may": can get it; "none": must get no label. Undetermined is
    never wrong, but it is a miss if the label is a must."""


def split(total: float, parts: int, random: np.random.Generator) -> np.ndarray:
    """A total in random positive parts, none below a tenth of the even part."""
    shares = random.dirichlet(np.full(parts, 2.0)) + 0.1 / parts
    return total * shares / shares.sum()


def kernel(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    heads, sign = int(random.integers(1, 4)), random.choice([-1.0, 1.0])
    omega = sign * random.uniform(0.3, 0.6) * random.uniform(0.9, 1.1, heads)
    return diagonal_heads(omega.tolist(), (sign * split(1.5, heads, random)).tolist(), d_x=5), ONE


def debiased(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    sizes = [int(n) for n in random.integers(1, 4, 2)]
    gamma = random.uniform(0.03, 0.16)
    up, down = (split(0.44 / gamma, n, random) for n in sizes)
    mu = [*up, *-down]
    omega = [gamma] * sizes[0] + [-gamma] * sizes[1]
    return diagonal_heads(omega, mu, d_x=5), ONE


def preconditioned(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    covariance = CovarianceConfig(kind="kms", rho=float(random.choice([0.3, 0.5, 0.8])))
    sigma = covariance_matrix(covariance, 5)
    gamma = torch.from_numpy(np.linalg.inv(sigma + 5.5 / 40 * np.eye(5)))
    omega = random.uniform(0.03, 0.12)
    blocks = torch.stack([omega * gamma, -omega * gamma])
    return with_blocks(blocks, [0.5 / omega, -0.5 / omega]), replace(ONE, covariance=covariance)


def weighted(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    row = np.full(6, random.uniform(0.1, 0.2))
    row[2:4] *= random.uniform(1.1, 1.3)
    mu = 0.9 / (2 * row.mean())
    omega = [row.tolist(), (-row).tolist()]
    return diagonal_heads(omega, [[mu, mu], [-mu, -mu]], d_x=6, d_y=2), TWO


def task_heads(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    omega, mu = [], []
    for response, support in enumerate(SUPPORTS):
        gamma = random.uniform(0.08, 0.15)
        for sign in (1.0, -1.0):
            row, read = np.zeros(6), np.zeros(2)
            row[list(support)], read[response] = sign * gamma, sign * 0.45 / gamma
            omega.append(row.tolist())
            mu.append(read.tolist())
    return diagonal_heads(omega, mu, d_x=6, d_y=2), TWO


def superposition(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    """Three heads with sum mu = 0 and theta_n = 0.91 on the supports, otherwise random."""
    theta = np.zeros((2, 6))
    for response, support in enumerate(SUPPORTS):
        theta[response, list(support)] = 0.91
    while True:
        basis, _ = np.linalg.qr(np.column_stack([np.ones(3), random.normal(size=(3, 2))]))
        mu = basis[:, 1:] @ random.uniform(-7, 7, (2, 2))
        leaks = np.sort(np.abs(mu), axis=1)
        if np.linalg.cond(mu) < 3 and (leaks[:, 0] / leaks[:, 1]).max() > 0.35 and np.ptp(mu) > 6:
            omega = np.linalg.pinv(mu.T) @ theta
            return diagonal_heads(omega.tolist(), mu.tolist(), d_x=6, d_y=2), TWO


def linear(random: np.random.Generator) -> tuple[Weights, TaskConfig]:
    heads = int(random.integers(1, 5))
    blocks = torch.from_numpy(random.normal(size=(heads, 5, 5)) * 0.3 + np.eye(5))
    weights = with_blocks(blocks, split(0.9, heads, random).tolist())
    return weights.with_model(score="linear", score_slope=1 / 40), ONE


BUILDERS: dict[str, Callable[[np.random.Generator], tuple[Weights, TaskConfig]]] = {
    "kernel_regression": kernel,
    "debiased_gd": debiased,
    "preconditioned_gd": preconditioned,
    "weighted_preconditioned_gd": weighted,
    "task_heads": task_heads,
    "superposition": superposition,
    "linear_gd": linear,
}


def with_blocks(blocks: Tensor, mu: list[float]) -> Weights:
    """One-response heads with these QK x blocks."""
    d_x = blocks.shape[-1]
    OV = torch.nn.functional.pad(torch.tensor(mu, dtype=torch.float64)[:, None], (d_x, 0))
    return from_circuits(torch.nn.functional.pad(blocks, (0, 1, 0, 1)), OV[:, :, None])


def disturbed(weights: Weights, size: float, random: np.random.Generator) -> Weights:
    """QK and OV with Gaussian noise of this size, relative to the norm of each head's circuit."""

    def noisy(circuit: Tensor) -> Tensor:
        noise = torch.from_numpy(random.normal(size=tuple(circuit.shape)))
        norms = [tensor.flatten(1).norm(dim=1)[:, None, None] for tensor in (circuit, noise)]
        return circuit + size * noise * norms[0] / norms[1]

    laws = {
        name: getattr(weights.model, name) for name in ("score", "score_slope", "attend_to_self")
    }
    return from_circuits(noisy(weights.QK), noisy(weights.OV), **laws)


def built(per_cell: int, random: np.random.Generator) -> Iterator[Case]:
    """Every pattern with noise on its circuits. Up to 10% noise the label is a must; above 100%
    there is no pattern."""
    for truth, builder in BUILDERS.items():
        for size in NOISE:
            demand = "must" if size <= 0.1 else "none" if size > 1 else "may"
            for _ in range(per_cell):
                weights, task = builder(random)
                weights = disturbed(weights, size, random)
                yield Case("built + noise", truth, weights, task, size, demand)


def leaking(per_cell: int, random: np.random.Generator) -> Iterator[Case]:
    """Debiased pairs with one fault of known size."""
    for size in LEAKS:
        demand = "must" if size <= 0.02 else "none" if size >= 0.5 else "may"
        for _ in range(per_cell):
            gamma = random.uniform(0.05, 0.15)
            omega, mu = np.array([gamma, -gamma]), np.array([0.44, -0.44]) / gamma
            pair = diagonal_heads(omega.tolist(), mu.tolist(), d_x=5)
            reads_x, reads_y = pair.OV.clone(), pair.QK.clone()
            reads_x[0, :5, 0] = torch.from_numpy(random.normal(size=5))
            reads_x[0, :5] *= size * abs(mu[0]) / reads_x[0, :5].norm()
            off = torch.from_numpy(random.normal(size=(5, 5)) * (1 - np.eye(5)))
            reads_y[0, :5, :5] += size * gamma * 5**0.5 * off / off.norm()
            faults = {
                "x read": from_circuits(pair.QK, reads_x),
                "off-diagonal QK": from_circuits(reads_y, pair.OV),
            }
            scales = {
                "sum of mu": (omega, mu * [1, 1 - 2 * size / (1 + size)]),
                "unequal omega": (omega * [1, 1 + size], mu),
                "mismatched head": ([*omega, 1.5 * gamma], [*mu, -mu[0] * size]),
            }
            for fault, (o, m) in scales.items():
                faults[fault] = diagonal_heads(list(map(float, o)), list(map(float, m)), d_x=5)
            for fault, weights in faults.items():
                yield Case(f"fault: {fault}", "debiased_gd", weights, ONE, size, demand)


def untrained(count: int, random: np.random.Generator, *, first: int) -> Iterator[Case]:
    """Random initial weights of many shapes, from the default law and a normal law, with seeds from
    `first` on."""
    for seed in range(count):
        d_y = int(random.choice([1, 1, 2]))
        task = TaskConfig(d_x=int(random.choice([2, 5, 10])) if d_y == 1 else 6, d_y=d_y)
        score = str(random.choice(["softmax", "softmax", "linear/L"]))
        model = ModelConfig(n_heads=int(random.choice([1, 2, 4, 8])), score=score)
        config = ExperimentConfig(task=task, model=model, seed=first + seed)
        weights = initial_weights(config).to(torch.float64)
        if seed % 2:
            wide = tuple(weights.W_V.shape)
            shapes = (*[wide] * 3, (*wide[:2], weights.d_head, d_y))
            *drawn, W_O = (torch.from_numpy(random.normal(size=s) * 0.3) for s in shapes)
            drawn.append(torch.nn.functional.pad(W_O, (weights.d_x, 0)))
            weights = weights.with_tensors(dict(zip(weights.tensors, drawn, strict=True)))
        yield Case("random weights", NONE, weights, task, float("nan"), "none")


def pair_of(ratio: float, second_mu: float) -> Callable[[np.random.Generator], Weights]:
    """A pair with omega_2 = -ratio omega_1; the first mu is 3.4."""

    def draw(random: np.random.Generator) -> Weights:
        gamma = random.uniform(0.08, 0.15)
        return diagonal_heads([gamma, -ratio * gamma], [3.4, second_mu], d_x=5)

    return draw


def mixed_signs(random: np.random.Generator) -> Weights:
    gamma, signs = random.uniform(0.08, 0.15), random.permutation([1, 1, 1, -1, -1])
    return diagonal_heads([(gamma * signs).tolist(), [-gamma] * 5], [3.4, -3.4], d_x=5)


def turned_apart(random: np.random.Generator) -> Weights:
    turns, _ = np.linalg.qr(random.normal(size=(2, 5, 5)))
    blocks = random.uniform(0.08, 0.15) * torch.from_numpy(turns)
    return with_blocks(blocks * torch.tensor([1.0, -1.0])[:, None, None], [3.4, -3.4])


# One sign of mu, unbalanced mu, unequal omega, and two more.
MISSES = (pair_of(1, 3.4), pair_of(1, -0.4 * 3.4), pair_of(2.5, -3.4), mixed_signs, turned_apart)


def near_misses(count: int, random: np.random.Generator) -> Iterator[Case]:
    """Structured circuits that have none of the patterns."""
    for number in range(count):
        weights = MISSES[number % len(MISSES)](random)
        yield Case("near miss", NONE, weights, ONE, float("nan"), "none")


def random_steps(count: int, random: np.random.Generator) -> Iterator[Case]:
    """Steps of linear attention by random matrices orthogonal to I: on average they descend in no
    direction."""
    for _ in range(count):
        M = random.uniform(0.05, 0.6) * random.normal(size=(5, 5))
        M -= np.trace(M) / 5 * np.eye(5)
        weights = with_blocks(torch.from_numpy(M)[None], [1.0])
        weights = weights.with_model(score="linear", score_slope=1 / 40)
        yield Case("random steps", NONE, weights, ONE, float("nan"), "none")


def snapshots(weights: Iterable[Weights], steps: Iterable[int]) -> Iterator[Case]:
    """Snapshots of training, whose truth is decided by their predictions: a fit with R^2 of at
    least 0.98."""
    learners = {"debiased_gd": "debiased_gd", "kernel_head": "kernel_regression"}
    for heads, step in zip(weights, steps, strict=True):
        fits = compare_learners(heads, task=ONE, learners=tuple(learners), n_prompts=2000)
        r2 = {label: fits.at_trained.r2[name] for name, label in learners.items()}
        best = max(r2, key=lambda label: r2[label])
        truth, demand = (best, "may") if r2[best] >= 0.98 else (NONE, "none")
        yield Case("snapshot", truth, heads, ONE, float(step), demand)


def earlier() -> list[Case]:
    """Every eighth of the built and drawn models on which thresholds were set or compared, until
    November 2026."""
    random = np.random.default_rng(0)
    drawn = built(20, random), leaking(20, random), untrained(400, random, first=100_000)
    return [*chain(*drawn, near_misses(200, random))][::8]


def confirming() -> list[Case]:
    """Models that were drawn after all rules and thresholds; README.md says when to draw new ones."""
    random = np.random.default_rng(SEED)
    drawn = built(20, random), leaking(20, random), untrained(400, random, first=200_000)
    others = near_misses(200, random), random_steps(60, random)
    return [*chain(*drawn, *others), *snapshots(*trained())]


def trained() -> tuple[list[Weights], list[int]]:
    """Heads and step of every snapshot of the eight softmax models of
    analyses/calibration/train.py."""
    tensors = load_file(TRAINED)
    names = sorted({name.rpartition("/")[0] for name in tensors})
    weights = [from_circuits(tensors[f"{n}/QK"], tensors[f"{n}/OV"]) for n in names]
    return weights, [int(name.rpartition("/")[2]) for name in names]
