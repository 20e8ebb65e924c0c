"""Models of several layers whose right label is known, for analyses/algorithms/calibration.py.

There are weights built by hand in rotated streams, with noise on every matrix, and algorithms as
functions of prompts that predict after every layer, with noise on each step. Near misses follow no
algorithm of the list: averages of two algorithms, steps that average two algorithms, one algorithm
followed by another, and the learners of near_misses.py and new_families.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from analyses.algorithms.after_families import AFTER_GUISES, AFTER_MISSES
from analyses.algorithms.families import Family, Random, Tasks, correlated, dense, pooled, sparse
from analyses.algorithms.later_families import LATER_GUISES, LATER_MISSES
from analyses.algorithms.learners import ALG1, GD, GDPP, ISTA, NEWTON, PRE, RIDGE, law_of, natural
from analyses.algorithms.near_misses import NEAR
from analyses.algorithms.new_families import NEW_GUISES, NEW_MISSES
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.predictors import dmmse, ridge
from mechinterp.icl.prompts import Prompts, covariance_matrix
from mechinterp.models.constructions import descent
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import initial_deep_weights

NOISE = (0.0, 0.01, 0.03)
NONE = "no algorithm"
LABELLED_SINCE = {
    "forgetting": ("recursive_least_squares", "must"),
    "after: Bayes over two noise levels": ("adaptive_ridge", "may"),
}
"""Near misses that are algorithms of a later list, with their label; stored rows of earlier rules call them none."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model and the label it should get."""

    family: str
    seed: int
    truth: str
    demand: str
    """"must": has to get its label; "may": can get it; "none": must get no label."""
    source: object
    task: TaskConfig
    size: float
    """Size of the noise, relative to the weights or to a step."""


Update = Callable[[PromptMoments, int, Tensor], Tensor]


def update_of(name: str, task: TaskConfig, n_layers: int, random: Random) -> Update:
    """One layer of an algorithm that computes each step from w alone."""
    scalars, descent = natural(name, task, n_layers, random), name == "gradient descent"

    def update(moments: PromptMoments, layer: int, w: Tensor) -> Tensor:
        gradient = moments.b - moments.S @ w
        if name == "preprocess then optimise":
            return w + (scalars[layer - 1] * moments.b.square() * gradient if layer else 0 * w)
        if name == "preconditioned gradient descent":
            values, vectors = moments.covariance
            A = (vectors * (scalars[layer] / (values + scalars[n_layers + layer]))) @ vectors.mT
            return w + A @ gradient
        stepped = w + scalars[layer] * gradient
        threshold = 0.0 if descent else scalars[n_layers + layer]
        return stepped.sign() * torch.relu(stepped.abs() - threshold)

    return update


def iterated(updates: Sequence[Sequence[Update]], task: TaskConfig) -> Callable[[Prompts], Tensor]:
    """Function whose layers move to the mean of their updates."""

    def law(prompts: Prompts) -> Tensor:
        moments = PromptMoments(prompts, task)
        w, path = torch.zeros_like(moments.b), []
        for layer, each in enumerate(updates):
            w = torch.stack([update(moments, layer, w) for update in each]).mean(0)
            path.append((prompts.x_query[:, None] @ w)[:, 0])
        return torch.stack(path)

    return law


Built = tuple[object, TaskConfig, float]
Build = Callable[[Random], Built]


def disturbed(weights: Weights, random: Random) -> tuple[Weights, float]:
    size, seed = float(random.choice(NOISE)), int(random.integers(1000))
    return descent.with_noise(descent.rotated(weights, seed=seed), size, seed=seed), size


def noisy(
    make: Callable[[TaskConfig, int, Random], Weights],
    *,
    task: Tasks = dense,
    layers: tuple[int, int] = (2, 5),
) -> Build:
    """Weights for a random task and number of layers, rotated and with noise."""

    def build(random: Random) -> Built:
        own, n_layers = task(random), int(random.integers(*layers))
        weights, size = disturbed(make(own, n_layers, random), random)
        return weights, own, size

    return build


def steps(low: float, high: float) -> Callable[[TaskConfig, int, Random], Weights]:
    """Gradient descent with step sizes from this interval."""
    return lambda task, n, random: descent.gradient_descent_model(
        random.uniform(low, high, n).tolist(), d_x=task.d_x
    )


def equal_steps(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    eta = float(random.uniform(0.25, 0.6))
    return descent.gradient_descent_model([eta] * n_layers, d_x=task.d_x)


def falling_steps(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    etas = np.sort(random.uniform(0.15, 0.75, n_layers))[::-1].tolist()
    return descent.gradient_descent_model(etas, d_x=task.d_x)


def plus_plus(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    etas = random.uniform(0.35, 0.6, n_layers).tolist()
    gammas = [*random.uniform(0.12, 0.25, n_layers - 1).tolist(), 0.0]
    return descent.gd_plus_plus_model(etas, gammas, d_x=task.d_x)


def preconditioned(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    etas, cs = random.uniform(0.3, 0.55, n_layers), random.uniform(0.1, 0.4, n_layers)
    return descent.preconditioned_gd_model(etas.tolist(), cs.tolist(), covariance=Sigma)


def algorithm_1(task: TaskConfig, n_steps: int, random: Random) -> Weights:
    return preprocess_then_optimise_model(random.uniform(0.5, 1.0, n_steps).tolist(), d_x=task.d_x)


def random_preconditioners(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    noise = random.normal(size=(task.d_x, task.d_x))
    Sigma = torch.from_numpy(noise @ noise.T / task.d_x + 0.2 * np.eye(task.d_x))
    etas = random.uniform(0.2, 0.4, n_layers).tolist()
    return descent.preconditioned_gd_model(etas, [0.3] * n_layers, covariance=Sigma)


def summed(task: TaskConfig, n_layers: int, random: Random) -> Weights:
    """Linear scores summed over the pairs, with the division of the step size by the length in the
    weights."""
    weights = steps(0.2, 0.6)(task, n_layers, random)
    model = replace(weights.model, score="linear")
    scaled = {"attn.W_O": weights.W_O / task.context_length}
    return replace(weights, model=model).with_tensors(scaled)


def random_weights(random: Random) -> Built:
    score = str(random.choice(["linear/L", "softmax"]))
    task = dense(random) if random.integers(2) else sparse(random)
    model = ModelConfig(
        n_layers=int(random.integers(2, 5)),
        n_heads=4,
        score=score,
        context_only=True,
        d_model=32,
        d_head=8,
    )
    config = ExperimentConfig(task=task, model=model, seed=int(random.integers(1000)))
    return initial_deep_weights(config), task, 0.0


def functions(*names: str, task: Tasks) -> Build:
    """Mean of the predictions of algorithms, with noise on their steps."""

    def build(random: Random) -> Built:
        own, n_layers, size = task(random), int(random.integers(3, 5)), float(random.choice(NOISE))
        laws = [law_of(name, own, n_layers, random, size) for name in names]
        return lambda prompts: sum(law(prompts) for law in laws) / len(laws), own, size

    return build


def mixed_steps(first: str, second: str, task: Tasks, *, in_turn: bool = False) -> Build:
    """Steps that average two algorithms' steps; or two steps of one algorithm, then two of the
    other."""

    def build(random: Random) -> Built:
        own, n_layers = task(random), 4 if in_turn else int(random.integers(3, 5))
        a, b = (update_of(name, own, n_layers, random) for name in (first, second))
        return iterated([[a], [a], [b], [b]] if in_turn else [[a, b]] * n_layers, own), own, 0.0

    return build


def exact_summed_scores(random: Random) -> Built:
    task, n_layers = dense(random), int(random.integers(2, 5))
    weights = summed(task, n_layers, random)
    return descent.rotated(weights, seed=int(random.integers(1000))), task, 0.0


def slightly_scaled(random: Random) -> Built:
    """Gradient descent times 1.05, which other step sizes can absorb."""
    task, n_layers = dense(random), int(random.integers(3, 5))
    exact = law_of(GD, task, n_layers, random)
    return lambda prompts: 1.05 * exact(prompts), task, 0.0


def softmax_pairs(random: Random) -> Built:
    """Two softmax heads with opposite scales in each layer, which read residuals and write into y."""
    task, n_layers, omega = dense(random), 3, float(random.uniform(0.05, 0.6))
    plain = steps(0.3, 0.6)(task, n_layers, random)
    W_Q = torch.cat([plain.W_Q, -plain.W_Q], dim=1) / plain.d_model**0.5 * omega
    W_K, W_V = (torch.cat([w, w], dim=1) for w in (plain.W_K, plain.W_V))
    W_O = torch.cat([plain.W_O, -plain.W_O], dim=1) / (2 * omega)
    weights = stack_of_layers(W_Q, W_K, W_V, W_O, d_y=1, scale=1.0, reading=plain.reading)
    return descent.rotated(weights, seed=int(random.integers(1000))), task, 0.0


def ridge_alone(random: Random) -> Built:
    task, penalty = dense(random), float(random.uniform(0.1, 3))
    return lambda prompts: ridge(prompts, penalty=penalty), task, 0.0


def memory(random: Random) -> Built:
    task = pooled(random)
    return lambda p: dmmse(p, pool=task.pool(), noise_var=task.noise_var), task, 0.0


def near_miss(family: Family) -> Build:
    return lambda random: (*family(random), 0.0)


FAMILIES: dict[str, tuple[str, str, Build]] = {
    "weights: equal steps": ("gradient_descent", "must", noisy(equal_steps)),
    "weights: falling steps": ("gradient_descent", "must", noisy(falling_steps)),
    "weights: steps, correlated x": (
        "gradient_descent",
        "must",
        noisy(steps(0.15, 0.3), task=correlated),
    ),
    "weights: GD++": ("gd_plus_plus", "must", noisy(plus_plus, layers=(3, 5))),
    "weights: preconditioned": (
        "preconditioned_descent",
        "must",
        noisy(preconditioned, task=correlated),
    ),
    "weights: Algorithm 1": (
        "preprocess_then_optimise",
        "must",
        noisy(algorithm_1, task=sparse, layers=(2, 4)),
    ),
    "weights: summed scores": ("gradient_descent", "must", noisy(summed)),
    "weights: summed scores, exact": ("gradient_descent", "must", exact_summed_scores),
    "function: 1.05 times gradient descent": ("gradient_descent", "must", slightly_scaled),
    "weights: softmax pairs": (NONE, "none", softmax_pairs),
    "weights: random": (NONE, "none", random_weights),
    "weights: random preconditioners": (NONE, "none", noisy(random_preconditioners)),
    "function: gradient descent": ("gradient_descent", "may", functions(GD, task=dense)),
    "function: GD++": ("gd_plus_plus", "may", functions(GDPP, task=dense)),
    "function: preconditioned": ("preconditioned_descent", "may", functions(PRE, task=correlated)),
    "function: posterior mean": ("posterior_mean", "may", memory),
    "function: ridge, last": ("ridge_like", "may", ridge_alone),
    "function: Newton": ("newton", "may", functions(NEWTON, task=dense)),
    "function: ridge": ("ridge_like", "may", functions(RIDGE, task=dense)),
    "function: ISTA": ("sparse_shrinkage", "may", functions(ISTA, task=sparse)),
    "function: ISTA, dense": ("sparse_shrinkage", "may", functions(ISTA, task=dense)),
    "function: Algorithm 1, dense": (
        "preprocess_then_optimise",
        "may",
        functions(ALG1, task=dense),
    ),
    "half GD, half Newton": (NONE, "none", functions(GD, NEWTON, task=dense)),
    "half GD, half ISTA": (NONE, "none", functions(GD, ISTA, task=sparse)),
    "half GD, half Algorithm 1": (NONE, "none", functions(GD, ALG1, task=sparse)),
    "half GD, half ridge": (NONE, "none", functions(GD, RIDGE, task=dense)),
    "half Newton, half Algorithm 1": (NONE, "none", functions(NEWTON, ALG1, task=dense)),
    "half ISTA, half Algorithm 1": (NONE, "none", functions(ISTA, ALG1, task=sparse)),
    "half Newton, half preconditioned": (NONE, "none", functions(NEWTON, PRE, task=correlated)),
    "half Newton, half ISTA": (NONE, "none", functions(NEWTON, ISTA, task=sparse)),
    "half GD++, half Algorithm 1": (NONE, "none", functions(GDPP, ALG1, task=sparse)),
    "steps half GD, half ISTA": (NONE, "none", mixed_steps(GD, ISTA, sparse)),
    "steps half GD, half Algorithm 1": (NONE, "none", mixed_steps(GD, ALG1, sparse)),
    "steps half preconditioned, half ISTA": (NONE, "none", mixed_steps(PRE, ISTA, correlated)),
    "GD, then Algorithm 1": (NONE, "none", mixed_steps(GD, ALG1, sparse, in_turn=True)),
    **{
        name: (*LABELLED_SINCE.get(name, (NONE, "none")), near_miss(family))
        for name, family in {**NEAR, **NEW_MISSES, **LATER_MISSES, **AFTER_MISSES}.items()
    },
    **{
        name: (truth, demand, near_miss(build))
        for name, (truth, demand, build) in {**NEW_GUISES, **LATER_GUISES, **AFTER_GUISES}.items()
    },
}
CONFIRMED_ONLY = (*NEW_MISSES, *NEW_GUISES)
"""Families that were not used to set a rule or a limit."""
LATER = (*LATER_MISSES, *LATER_GUISES)
"""Families written after the rules of `naming.py` as they first were."""
AFTER = (*AFTER_MISSES, *AFTER_GUISES)
"""Families written after the rules on read-outs, on other noise and on fits from one step; only these count in sentences."""


def cases(seeds: Sequence[int], families: Sequence[str] | None = None) -> list[Case]:
    """One model of every family, or of those given, for each seed, seed by seed."""
    found = []
    for seed in seeds:
        for family in FAMILIES if families is None else families:
            truth, demand, build = FAMILIES[family]
            random = np.random.default_rng([crc32(family.encode()), seed])
            source, task, size = build(random)
            found.append(Case(family, seed, truth, demand, source, task, size))
    return found
