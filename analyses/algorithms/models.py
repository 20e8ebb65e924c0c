"""Models of several layers whose right label is known, for analyses/algorithms/calibration.py.

Weights built by hand in rotated streams, with noise on every matrix; algorithms without such weights
as functions of prompts whose stream holds the prediction after each layer, with noise on each step;
and near misses that carry out no algorithm of the list: half of one and half of another, steps that
are half of one and half of another, one algorithm after another, momentum, random preconditioners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import CovarianceConfig, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import nearest_neighbours
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts, covariance_matrix, sample_prompts
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    preconditioned_gd_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.run.predictor import Predictor
from mechinterp.models.stacks import DeepWeights
from mechinterp.training.general.trainer import initial_deep_weights

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
NOISE = (0.0, 0.01, 0.03)
NONE = "no algorithm"
GD, NEWTON, ALG1, ISTA = (
    "gradient descent",
    "iterative Newton",
    "preprocess then optimise",
    "ISTA",
)
PRE, RIDGE, GDPP = "preconditioned gradient descent", "ridge", "GD++"
Law = Callable[[Prompts], Tensor]
Random = np.random.Generator


@dataclass(frozen=True, eq=False)
class Case:
    """A model and the label it should get."""

    family: str
    seed: int
    truth: str
    demand: str
    """"must" get its label, "may" get it, or must get "none"."""
    source: object
    task: TaskConfig
    size: float
    """Noise, as a share of the weights or of a step."""


@dataclass(frozen=True, eq=False)
class Computed(Predictor):
    """A model that is given by its predictions after each layer, [layer, batch, d_y]."""

    law: Law | None = None

    def path(self, prompts: Prompts) -> Tensor:
        return cast(Law, self.law)(prompts.to(torch.float64))

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        return self.path(prompts)[-1]

    def streams(
        self,
        prompts: Prompts,
        *,
        heads: Sequence[tuple[int, int]] = (),
        positions: Sequence[int] = (-1,),
    ) -> Float[Tensor, "layer batch pos d_model"]:
        """x_query and the prediction, at the query."""
        path = self.path(prompts)
        path = torch.cat([torch.zeros_like(path[:1]), path])
        x = prompts.x_query.double().expand(len(path), -1, -1)
        return torch.cat([x, path], dim=2)[:, :, None]


def computed(law: Law, n_layers: int, task: TaskConfig) -> Computed:
    def none() -> object:
        raise ValueError("A computed model has no hooks.")

    return Computed(n_layers, 1, none, task=task, law=law)  # type: ignore[arg-type]


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


def natural(name: str, task: TaskConfig, n_layers: int, random: Random) -> list[float]:
    """Scalars that suit the task, each times a random factor."""
    drawn = sample_prompts(task, 128, seed=1, dtype=torch.float64)
    start = BY_NAME[name].start(PromptMoments(drawn, task), n_layers).numpy()
    if name == ALG1 and task.sparsity is None:
        start = 0.4 * start  # Where b has heavy tails, its natural step is too long.
    return (start * random.uniform(0.7, 1.3, len(start))).tolist()


def law_of(name: str, task: TaskConfig, n_layers: int, random: Random, noise: float = 0.0) -> Law:
    """An algorithm whose step in each layer sees x_query through I + noise * G."""
    algorithm, scalars = BY_NAME[name], natural(name, task, n_layers, random)
    G = torch.from_numpy(random.normal(size=(n_layers, task.d_x, task.d_x))) / task.d_x**0.5

    def law(prompts: Prompts) -> Tensor:
        exact = algorithm.predictions(PromptMoments(prompts, task), scalars, n_layers)
        if noise == 0:
            return exact
        rest = []
        for matrix in G:
            seen = Prompts(**{**vars(prompts), "x_query": prompts.x_query @ matrix.mT})
            rest.append(algorithm.predictions(PromptMoments(seen, task), scalars, n_layers))
        return exact + noise * torch.stack([each[layer] for layer, each in enumerate(rest)])

    return law


def half_and_half(first: Law, second: Law) -> Law:
    return lambda prompts: 0.5 * first(prompts) + 0.5 * second(prompts)


Update = Callable[[PromptMoments, int, Tensor], Tensor]


def update_of(name: str, task: TaskConfig, n_layers: int, random: Random) -> Update:
    """One layer of an algorithm that starts each step from w."""
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


def iterated(updates: Sequence[Sequence[Update]], task: TaskConfig) -> Law:
    """Each layer goes to the mean of what its updates say."""

    def law(prompts: Prompts) -> Tensor:
        moments = PromptMoments(prompts, task)
        w, path = torch.zeros_like(moments.b), []
        for layer, each in enumerate(updates):
            w = torch.stack([update(moments, layer, w) for update in each]).mean(0)
            path.append((prompts.x_query[:, None] @ w)[:, 0])
        return torch.stack(path)

    return law


Built = tuple[object, TaskConfig, float]


def disturbed(weights: DeepWeights, random: Random) -> tuple[DeepWeights, float]:
    size, seed = float(random.choice(NOISE)), int(random.integers(1000))
    return with_noise(rotated(weights, seed=seed), size, seed=seed), size


def equal_steps(random: Random) -> Built:
    task, n_layers = dense(random), int(random.integers(2, 5))
    weights = gradient_descent_model([float(random.uniform(0.25, 0.6))] * n_layers, d_x=task.d_x)
    weights, size = disturbed(weights, random)
    return weights, task, size


def falling_steps(random: Random) -> Built:
    task, n_layers = dense(random), int(random.integers(2, 5))
    etas = np.sort(random.uniform(0.15, 0.75, n_layers))[::-1].tolist()
    weights, size = disturbed(gradient_descent_model(etas, d_x=task.d_x), random)
    return weights, task, size


def correlated_steps(random: Random) -> Built:
    task, n_layers = correlated(random), int(random.integers(2, 5))
    etas = random.uniform(0.15, 0.3, n_layers).tolist()
    weights, size = disturbed(gradient_descent_model(etas, d_x=task.d_x), random)
    return weights, task, size


def plus_plus(random: Random) -> Built:
    task, n_layers = dense(random), int(random.integers(3, 5))
    etas = random.uniform(0.35, 0.6, n_layers).tolist()
    gammas = [*random.uniform(0.12, 0.25, n_layers - 1).tolist(), 0.0]
    weights, size = disturbed(gd_plus_plus_model(etas, gammas, d_x=task.d_x), random)
    return weights, task, size


def preconditioned(random: Random) -> Built:
    task, n_layers = correlated(random), int(random.integers(2, 5))
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    etas, cs = random.uniform(0.3, 0.55, n_layers), random.uniform(0.1, 0.4, n_layers)
    weights = preconditioned_gd_model(etas.tolist(), cs.tolist(), covariance=Sigma)
    weights, size = disturbed(weights, random)
    return weights, task, size


def algorithm_1(random: Random) -> Built:
    task, n_steps = sparse(random), int(random.integers(2, 4))
    etas = random.uniform(0.5, 1.0, n_steps).tolist()
    weights, size = disturbed(preprocess_then_optimise_model(etas, d_x=task.d_x), random)
    return weights, task, size


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


def random_preconditioners(random: Random) -> Built:
    task, n_layers = dense(random), int(random.integers(2, 5))
    noise = random.normal(size=(task.d_x, task.d_x))
    Sigma = torch.from_numpy(noise @ noise.T / task.d_x + 0.2 * np.eye(task.d_x))
    etas = random.uniform(0.2, 0.4, n_layers).tolist()
    weights = preconditioned_gd_model(etas, [0.3] * n_layers, covariance=Sigma)
    weights, size = disturbed(weights, random)
    return weights, task, size


def as_function(name: str, draw: Callable[[Random], TaskConfig]) -> Callable[[Random], Built]:
    def build(random: Random) -> Built:
        task, n_layers, size = draw(random), int(random.integers(3, 5)), float(random.choice(NOISE))
        return computed(law_of(name, task, n_layers, random, size), n_layers, task), task, size

    return build


def mixture(
    first: str, second: str, draw: Callable[[Random], TaskConfig]
) -> Callable[[Random], Built]:
    def build(random: Random) -> Built:
        task, n_layers, size = draw(random), int(random.integers(3, 5)), float(random.choice(NOISE))
        laws = [law_of(name, task, n_layers, random, size) for name in (first, second)]
        return computed(half_and_half(*laws), n_layers, task), task, size

    return build


def mixed_steps(
    first: str, second: str, draw: Callable[[Random], TaskConfig]
) -> Callable[[Random], Built]:
    def build(random: Random) -> Built:
        task, n_layers = draw(random), int(random.integers(3, 5))
        both = [update_of(name, task, n_layers, random) for name in (first, second)]
        return computed(iterated([both] * n_layers, task), n_layers, task), task, 0.0

    return build


def one_after_the_other(
    first: str, second: str, draw: Callable[[Random], TaskConfig]
) -> Callable[[Random], Built]:
    def build(random: Random) -> Built:
        task, n_layers = draw(random), 4
        a, b = (update_of(name, task, n_layers, random) for name in (first, second))
        return computed(iterated([[a], [a], [b], [b]], task), n_layers, task), task, 0.0

    return build


def neighbours(random: Random) -> Built:
    task = dense(random)
    law = lambda prompts: nearest_neighbours(prompts, count=3).expand(3, -1, -1)  # noqa: E731
    return computed(law, 3, task), task, 0.0


FAMILIES: dict[str, tuple[str, str, Callable[[Random], Built]]] = {
    "weights: equal steps": ("gradient_descent", "must", equal_steps),
    "weights: falling steps": ("gradient_descent", "must", falling_steps),
    "weights: steps, correlated x": ("gradient_descent", "must", correlated_steps),
    "weights: GD++": ("gd_plus_plus", "must", plus_plus),
    "weights: preconditioned": ("preconditioned_gd", "must", preconditioned),
    "weights: Algorithm 1": ("preprocess_then_optimise", "must", algorithm_1),
    "weights: random": (NONE, "none", random_weights),
    "weights: random preconditioners": (NONE, "none", random_preconditioners),
    "function: Newton": ("newton", "may", as_function(NEWTON, dense)),
    "function: ridge": ("ridge_like", "may", as_function(RIDGE, dense)),
    "function: ISTA": ("sparse_shrinkage", "may", as_function(ISTA, sparse)),
    "function: ISTA, dense": ("sparse_shrinkage", "may", as_function(ISTA, dense)),
    "function: Algorithm 1, dense": ("preprocess_then_optimise", "may", as_function(ALG1, dense)),
    "function: momentum": (NONE, "none", as_function("momentum", dense)),
    "function: neighbours": (NONE, "none", neighbours),
    "half GD, half Newton": (NONE, "none", mixture(GD, NEWTON, dense)),
    "half GD, half ISTA": (NONE, "none", mixture(GD, ISTA, sparse)),
    "half GD, half Algorithm 1": (NONE, "none", mixture(GD, ALG1, sparse)),
    "half GD, half ridge": (NONE, "none", mixture(GD, RIDGE, dense)),
    "half Newton, half Algorithm 1": (NONE, "none", mixture(NEWTON, ALG1, dense)),
    "half ISTA, half Algorithm 1": (NONE, "none", mixture(ISTA, ALG1, sparse)),
    "half Newton, half preconditioned": (NONE, "none", mixture(NEWTON, PRE, correlated)),
    "half Newton, half ISTA": (NONE, "none", mixture(NEWTON, ISTA, sparse)),
    "half GD++, half Algorithm 1": (NONE, "none", mixture(GDPP, ALG1, sparse)),
    "steps half GD, half ISTA": (NONE, "none", mixed_steps(GD, ISTA, sparse)),
    "steps half GD, half Algorithm 1": (NONE, "none", mixed_steps(GD, ALG1, sparse)),
    "steps half preconditioned, half ISTA": (NONE, "none", mixed_steps(PRE, ISTA, correlated)),
    "GD, then Algorithm 1": (NONE, "none", one_after_the_other(GD, ALG1, sparse)),
}
CONFIRMED_ONLY = (
    "half Newton, half ISTA",
    "half GD++, half Algorithm 1",
    "half Newton, half preconditioned",
    "steps half preconditioned, half ISTA",
    "GD, then Algorithm 1",
)
"""Families that no limit was set on."""


def cases(seeds: Sequence[int]) -> list[Case]:
    """One of every family for each seed, seed by seed."""
    found = []
    for seed in seeds:
        for index, (family, (truth, demand, build)) in enumerate(FAMILIES.items()):
            source, task, size = build(np.random.default_rng([index, seed]))
            found.append(Case(family, seed, truth, demand, source, task, size))
    return found
