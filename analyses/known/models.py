"""The hand-made models of the suite, by name: weights, task and label."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from analyses.coefficients.sampler import heads_at
from mechinterp.config import CovarianceConfig, ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import generator_for
from mechinterp.models.constructions import descent
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    kernel_head,
    linear_attention,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.theory.learning_coefficient import learning_coefficient
from mechinterp.training.linear_models import task_moments

TASK = TaskConfig(d_x=4, context_length=20, noise_var=0.1)
WIDE = replace(TASK, covariance=CovarianceConfig("eigenvalues", eigenvalues=(2.0, 1.0, 0.5, 0.25)))
ETAS, GAMMAS, CS = (0.7, 0.6, 0.5, 0.4), (0.2, 0.15, 0.1, 0.0), (0.2, 0.3, 0.4)
NOISES = (0.01, 0.05, 0.2)
MINIMA = (1, 2, 3, 5)
"""Numbers of heads of linear attention at a minimum."""


@dataclass(frozen=True, eq=False)
class Made:
    """A model built by hand."""

    weights: Weights
    task: TaskConfig
    label: str | None = None
    components: np.ndarray | None = None
    """Unit vectors of the stream that heads read or write one by one: [component, d_model]."""
    coefficient: float | None = None

    @property
    def config(self) -> ExperimentConfig:
        if self.coefficient is None:
            return ExperimentConfig(task=self.task, model=self.weights.model)
        return replace(preset("linear-separate"), task=self.task, model=self.weights.model)


def made() -> dict[str, Made]:
    """All hand-made models, by name."""
    plain = dict(_plain())
    varied = dict(_varied(plain))
    return plain | varied | dict(_one_layer()) | dict(_minima())


def _plain() -> Iterator[tuple[str, Made]]:
    d_x, y = TASK.d_x, np.eye(TASK.d_x + 1)[-1:]
    for n in (1, 2, 3, 4):
        weights = descent.gradient_descent_model(ETAS[:n], d_x=d_x)
        yield f"gd-{n}", Made(weights, TASK, "gradient_descent", y)
    for n in (2, 3):
        weights = descent.gd_plus_plus_model(ETAS[:n], GAMMAS[:n], d_x=d_x)
        yield f"gd-plus-plus-{n}", Made(weights, TASK, "gd_plus_plus")
    Sigma = torch.tensor(WIDE.covariance.eigenvalues, dtype=torch.float64).diag()
    for n in (2, 3):
        weights = descent.preconditioned_gd_model(ETAS[:n], CS[:n], covariance=Sigma)
        yield f"preconditioned-{n}", Made(weights, WIDE, "preconditioned_descent", np.eye(d_x + 1))
    for n in (1, 2):
        weights = preprocess_then_optimise_model([0.3, 0.2][:n], d_x=d_x)
        yield (
            f"preprocess-{n}",
            Made(weights, TASK, "preprocess_then_optimise", np.eye(2 * d_x + 1)),
        )


def _varied(plain: dict[str, Made]) -> Iterator[tuple[str, Made]]:
    for name in ("gd-2", "gd-3", "gd-plus-plus-2", "preconditioned-3", "preprocess-2"):
        own = plain[name]
        turned, components = descent.rotated(own.weights, seed=1), own.components
        if components is not None:
            components = components @ descent.rotation(own.weights.d_model, seed=1).numpy()
        yield f"{name}-rotated", replace(own, weights=turned, components=components)
    for name in ("gd-2", "gd-3", "gd-plus-plus-2"):
        own = plain[name]
        yield f"{name}-dead-heads", replace(own, weights=with_dead_heads(own.weights, 4, seed=2))
    for name in ("gd-3", "gd-plus-plus-2"):
        for noise in NOISES:
            own = plain[name]
            noisy = descent.with_noise(descent.rotated(own.weights, seed=3), noise, seed=4)
            yield f"{name}-noise-{noise:g}", replace(own, weights=noisy, components=None)


def with_dead_heads(weights: Weights, n_heads: int, *, seed: int) -> Weights:
    """The same function with more heads: the new ones read at random and write nothing, and all change places."""
    generator, tensors = generator_for(seed, "init", 0), {}
    n_layers, n_own = weights.n_layers, weights.n_heads
    orders = [torch.randperm(n_heads, generator=generator) for _ in range(n_layers)]
    for name, own in weights.tensors.items():
        if not name.startswith("attn."):
            tensors[name] = own
            continue
        shape = (n_layers, n_heads - n_own, *own.shape[2:])
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(own)
        more = torch.zeros_like(drawn) if name == "attn.W_O" else drawn * own.square().mean().sqrt()
        every = torch.cat([own, more], dim=1)
        tensors[name] = torch.stack(
            [layer[order] for layer, order in zip(every, orders, strict=True)]
        )
    return replace(weights, model=replace(weights.model, n_heads=n_heads), tensors=tensors)


def _one_layer() -> Iterator[tuple[str, Made]]:
    task = preset("softmax-h2").task
    pair = debiased_gradient_step(1.0, 0.15, d_x=task.d_x)
    yield "debiased-pair", Made(pair.to(torch.float64), task, "debiased_gd")
    four = diagonal_heads([0.15, -0.15, 0.15, -0.15], [2.0, -2.0, 1.0, -1.0], d_x=task.d_x)
    yield "debiased-two-pairs", Made(four.to(torch.float64), task, "debiased_gd")
    kernel = kernel_head(0.6, 1.2, d_x=task.d_x)
    yield "kernel", Made(kernel.to(torch.float64), task, "kernel_regression")


def _minima() -> Iterator[tuple[str, Made]]:
    task = preset("linear-separate").task
    moments = task_moments(task)
    for n_heads in MINIMA:
        heads = heads_at(moments, n_heads)
        weights = linear_attention(heads).to(torch.float64)
        exact = learning_coefficient(moments, n_heads=n_heads, rank=1)
        yield f"minimum-{n_heads}", Made(weights, task, coefficient=exact)
