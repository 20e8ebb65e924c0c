"""Null distribution of each statistic of the classifier under random initialisation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from mechinterp.analysis.learners.nearest import evaluation
from mechinterp.analysis.one_layer.qk_form import QKForm, common_matrix
from mechinterp.analysis.one_layer.scales import spread_over_heads
from mechinterp.analysis.one_layer.substitution import idealised
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import SCORES, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.memory import CHUNK_BYTES, chunks
from mechinterp.models.heads import head_outputs, share_of, stack
from mechinterp.models.layers import is_normalised
from mechinterp.models.run.n_prompts import LEAST
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import initial_weights

SMALL_IS_STRUCTURE = ("omega_spread", "zero_sum")
MIDDLE = (0.05, 0.95)
ABSENT_PART = 1e-6
"""A part of a circuit counts as absent if its norm is below this fraction of the circuit's
(rounding of float32)."""
N_NULL_PROMPTS, HEADS_AT_ONCE = 512, 128
NULL_PAIRS = 2**18
"""Number of pairs in the prompts of random models: prompts of more than 512 pairs are fewer, at least 8."""
MODELS, MODEL_HEADS = (100, 400), 6400  # at least 100, so that a p-value can be below 0.01


@dataclass(frozen=True, eq=False)
class Null:
    """Sorted statistics of models with random initial weights, by name."""

    n_models: int
    values: dict[str, np.ndarray]

    def p_value(self, name: str, value: float) -> float:
        """Fraction of random models (or heads) at least as structured as this value; the value
        itself counts as one."""
        values = self.values[name]
        below = np.searchsorted(values, value, side="right")
        above = len(values) - np.searchsorted(values, value, side="left")
        extreme = below if name in SMALL_IS_STRUCTURE else above
        return float("nan") if np.isnan(value) else float((extreme + 1) / (len(values) + 1))

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """5% and 95% quantiles over the random models (or heads), by the name of the number."""
        ranges = {}
        for name, values in self.values.items():
            known = values[~np.isnan(values)] if not np.isnan(values).all() else values
            low, high = np.quantile(known, MIDDLE, method="nearest")
            ranges[name] = float(low), float(high)
        return ranges


@lru_cache(maxsize=64)
def null_of(task: TaskConfig, model: ModelConfig, *, form: str, bare: bool = False) -> Null:
    """Null distribution of models of this shape, initialised as for training.

    Args:
        form: How heads are idealised: "scalar", "common", "diagonal" or "matrix".
        bare: True: all weights are 0 except those that compare x with x and read y.
    """
    config = ExperimentConfig(task=task, model=replace(model, attend_to_self=False, biases=False))
    n_heads = model.n_heads
    n_models = int(np.clip(MODEL_HEADS // n_heads, *MODELS))
    # W_Q, W_K, W_V, the QK circuit and what is made of it, in float64.
    per_model = 8 * n_heads * (4 * config.d_model * config.d_head + 4 * config.d_model**2)
    groups = chunks(n_models, max(1, CHUNK_BYTES // per_model))
    parts = [_statistics(config, range(n_models)[rows], model, form, bare) for rows in groups]
    values = {name: torch.cat([part[name].flatten() for part in parts]) for name in parts[0]}
    return Null(n_models, {name: np.sort(v.numpy()) for name, v in values.items()})


def _statistics(
    config: ExperimentConfig, seeds: Sequence[int], model: ModelConfig, form: str, bare: bool
) -> dict[str, Tensor]:
    """Unsorted statistics of the models with these seeds."""
    task, n_heads, n_models = config.task, model.n_heads, len(seeds)
    models = [initial_weights(replace(config, seed=seed)) for seed in seeds]
    weights = stack(models).to(torch.float64).with_model(attend_to_self=model.attend_to_self)
    if bare:
        weights = stripped(weights)
    blocks = weights.QK[:, : task.d_x, : task.d_x].unflatten(0, (n_models, n_heads))
    matrix = torch.eye(task.d_x, dtype=torch.float64, device="cpu")
    if form == "common":
        matrix = common_matrix(blocks, torch.ones_like(blocks[:, :, 0, 0]))[:, None]
    ideal = QKForm(form, matrix)
    omega = ideal.omega(blocks)
    sizes = omega.norm(dim=2) if form == "diagonal" else omega.mean(2).abs()
    mu = weights.mu.view(n_models, n_heads, task.d_y)
    diagonal = weights.qk_diagonal.view(n_models, n_heads)
    last_entry = weights.ov_last_entry.view(n_models, n_heads)
    substitutes = idealised(weights, ideal.fitted(blocks).flatten(0, 1), weights.mu)
    r2, task_r2, share = _outputs(weights, substitutes, task, n_heads)
    return {
        "share": share,
        "omega_mean": weights.omega.mean(1),
        "mu": mu,
        "qk_diagonal": diagonal,
        "ov_last_entry": last_entry,
        "qk_diagonal_best": diagonal.amax(1),
        "ov_last_entry_best": last_entry.amax(1),
        "omega_spread": spread_over_heads(sizes, mu, serving=Thresholds().leak),
        "zero_sum": (mu.sum(1).abs() / mu.abs().sum(1)).amax(1),
        "substitution_r2": r2,
        "task_r2": task_r2,
    }


@lru_cache(maxsize=64)
def random_shape(
    n_heads: int, d_head: int, score: str, score_slope: float, attend_to_self: bool
) -> ModelConfig:
    """Architecture of the random models that the heads are compared with: separate heads without biases."""
    return ModelConfig(
        n_heads=n_heads,
        d_head=d_head,
        score=score,
        score_slope=score_slope,
        attend_to_self=attend_to_self,
        context_only=score not in SCORES,
    )


def is_bare(weights: Weights) -> bool:
    """True if linear heads only compare x with x and only read y, as models trained on moments do."""
    if is_normalised(weights.model.score):
        return False
    d_x = weights.d_x
    others = (weights.OV[:, :d_x], weights.OV), (weights.QK[:, :d_x, d_x:], weights.QK)
    return all(bool(other.norm() <= ABSENT_PART * circuit.norm()) for other, circuit in others)


def stripped(weights: Weights) -> Weights:
    """Heads without the weights that compare the query with y or read x."""
    d_x, tensors = weights.d_x, {}
    rows = {"W_Q": slice(d_x, None), "W_K": slice(d_x, None), "W_V": slice(d_x)}
    for name, unused in rows.items():
        tensors[f"attn.{name}"] = getattr(weights, name).clone()
        tensors[f"attn.{name}"][:, :, unused] = 0
    return weights.with_tensors(tensors)


def _outputs(
    weights: Weights, ideal: Weights, task: TaskConfig, n_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """R^2 of the idealised models, R^2 on the task, and shares of the heads; a few models at a
    time, in float32."""
    n_prompts = min(N_NULL_PROMPTS, max(LEAST, NULL_PAIRS // task.context_length))
    prompts = evaluation(task, n_prompts, 0, weights.model.attend_to_self).prompts.to(torch.float32)
    weights, ideal = weights.to(torch.float32), ideal.to(torch.float32)
    size = max(HEADS_AT_ONCE // n_heads, 1) * n_heads
    target = prompts.y_query[:, None]
    kept, solved, shares = [], [], []
    for start in range(0, weights.n_heads, size):
        heads, substitutes = (
            head_outputs(w[slice(start, start + size)], prompts).unflatten(1, (-1, n_heads))
            for w in (weights, ideal)
        )
        whole, substitute = heads.sum(2), substitutes.sum(2)
        gap = (whole - substitute).square().mean((0, 2))
        kept.append(1 - gap / whole.square().mean((0, 2)))
        missed = (whole - target).square().mean((0, 2))
        solved.append(1 - missed / target.square().mean())
        shares.append(share_of(heads))
    r2, task_r2, share = (torch.cat(parts).to(torch.float64) for parts in (kept, solved, shares))
    return r2, task_r2, share
