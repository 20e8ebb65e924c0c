"""What breaks when heads are masked: each head by hooks, and every subset of a layer's heads."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.circuits import HasWeights, weights_of
from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.functional import AttentionWeights, head_outputs

if TYPE_CHECKING:
    from mechinterp.models.transformer import ICLTransformer

METHODS = ("zero", "mean")
MAX_SUBSET_HEADS = 12
CHUNK = 1024

Hooks = list[tuple[str | Callable, Callable]]


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(Result):
    """How much the excess risk rises when one head is masked."""

    method: str
    """"zero": the head's output is 0; "mean": its z is the mean over prompts at that position."""
    rise: Float[np.ndarray, "layer head"]
    """Excess risk of the masked minus that of the full model, unit y^2."""
    rise_sem: Float[np.ndarray, "layer head"]
    """Standard error of `rise`, paired: the same prompts for every mask."""
    full_risk: float
    """Excess risk of the full model: mean (y_hat - y_query_clean)^2, unit y^2."""
    full_risk_sem: float

    def __repr__(self) -> str:
        layer, head = np.unravel_index(int(self.rise.argmax()), self.rise.shape)
        return (
            f"HeadAblation({self.method}: L{layer}H{head} +{self.rise.max():.3g} ± "
            f"{self.rise_sem[layer, head]:.2g} on {self.full_risk:.3g})"
        )

    @property
    def head_names(self) -> list[str]:
        """L0H0, L0H1, ... in the order of the raveled arrays."""
        return [f"L{layer}H{head}" for layer, head in np.ndindex(self.rise.shape)]

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        layer, head = np.divmod(np.arange(self.rise.size), self.rise.shape[1])
        columns = {
            "layer": layer,
            "head": head,
            "rise": self.rise.ravel(),
            "rise_sem": self.rise_sem.ravel(),
        }
        return pd.DataFrame({"method": self.method, **columns})

    def plot(self) -> go.Figure:
        """Rise of the excess risk, a bar per head."""
        return figures.bars(
            self.head_names,
            {f"{self.method} ablation": self.rise.ravel()},
            errors={f"{self.method} ablation": self.rise_sem.ravel()},
            title=f"Rise of the excess risk when a head is masked ({self.method} ablation)",
            y_title="rise of excess risk (y²)",
        )


@dataclass(frozen=True, eq=False, repr=False)
class SubsetAblation(Result):
    """Excess risk with every subset of a layer's heads kept, and the Shapley value of each head."""

    method: str
    """"zero": an absent head adds 0; "mean": it adds the mean over prompts of its output."""
    kept: Bool[np.ndarray, "subset head"]
    """Which heads are kept; first none, last all."""
    risk: Float[np.ndarray, " subset"]
    """Excess risk, mean (y_hat - y_query_clean)^2, unit y^2."""
    risk_sem: Float[np.ndarray, " subset"]
    rise: Float[np.ndarray, " subset"]
    """Risk minus that of the full model."""
    rise_sem: Float[np.ndarray, " subset"]
    """Standard error of `rise`, paired over prompts."""
    shapley: Float[np.ndarray, " head"]
    """Fall of the excess risk a head brings, averaged over all orders of adding heads; unit y^2.

    They sum to the risk with no head minus the risk with all."""
    shapley_sem: Float[np.ndarray, " head"]

    def __repr__(self) -> str:
        values = " ".join(f"H{head} {value:.3g}" for head, value in enumerate(self.shapley))
        return f"SubsetAblation({self.method}: risk {self.risk[-1]:.3g}; Shapley {values})"

    def to_frame(self) -> pd.DataFrame:
        """One row per subset."""
        names = [
            " ".join(f"H{head}" for head in np.flatnonzero(kept)) or "none" for kept in self.kept
        ]
        columns = {
            "kept": names,
            "n_kept": self.kept.sum(1),
            "risk": self.risk,
            "risk_sem": self.risk_sem,
        }
        columns |= {"rise": self.rise, "rise_sem": self.rise_sem}
        return pd.DataFrame(columns)

    def shapley_frame(self) -> pd.DataFrame:
        """One row per head."""
        columns = {
            "head": np.arange(len(self.shapley)),
            "shapley": self.shapley,
            "shapley_sem": self.shapley_sem,
        }
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Shapley value of each head."""
        return figures.bars(
            [f"L0H{head}" for head in range(len(self.shapley))],
            {"Shapley value": self.shapley},
            errors={"Shapley value": self.shapley_sem},
            title=f"Shapley value: fall of the excess risk a head brings ({self.method} ablation)",
            y_title="fall of excess risk (y²)",
        )


def mask_heads(heads: Sequence[tuple[int, int]], *, values: Tensor | None = None) -> Hooks:
    """Forward hooks that mask heads at hook_z, for `model.run_with_hooks` or `model.hooks`.

    Args:
        heads: (layer, head) pairs, counted from 0.
        values: Replaces z of the masked heads, [layer, pos, head, d_head]; None: zeros.
    Example:
        >>> [name for name, hook in mask_heads([(0, 1)])]
        ['blocks.0.attn.hook_z']
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    return [
        (
            f"blocks.{layer}.attn.hook_z",
            partial(_mask, heads=masked, value=None if values is None else values[layer]),
        )
        for layer, masked in by_layer.items()
    ]


def ablate_heads(
    model: "ICLTransformer", prompts: Prompts, *, method: str = "zero"
) -> HeadAblation:
    """Rise of the excess risk when each head of a hooked model is masked, one at a time.

    Args:
        method: "zero", or "mean" over the given prompts at each position.
    Raises:
        ValueError: If the method is unknown.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_heads(load("checkpoints/softmax-h2-s0").model, prompts).rise.shape
        (1, 2)
    """
    _require_method(method)
    values = _mean_z(model, prompts) if method == "mean" else None
    full = _squared_errors(model, prompts, [])
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    rise, rise_sem = np.zeros((n_layers, n_heads)), np.zeros((n_layers, n_heads))
    for layer, head in np.ndindex(n_layers, n_heads):
        masked = _squared_errors(model, prompts, mask_heads([(layer, head)], values=values))
        rise[layer, head], rise_sem[layer, head] = mean_and_sem(masked - full)
    full_risk, full_risk_sem = mean_and_sem(full)
    return HeadAblation(method, rise, rise_sem, float(full_risk), float(full_risk_sem))


def ablate_subsets(
    source: AttentionWeights | HasWeights, prompts: Prompts, *, method: str = "zero"
) -> SubsetAblation:
    """Excess risk of all 2^H subsets of a one-layer model's heads, from one forward pass.

    In one layer the heads' outputs o_h add up, so a subset's prediction is a partial sum. With
    v(S) = -(sum_S o - y)^2, a head's Shapley value is o_h (2 y - sum of all o): v is quadratic, and each
    pair's interaction is shared equally.

    Args:
        method: "zero", or "mean": an absent head adds the mean over the given prompts of its output.
    Raises:
        ValueError: If the method is unknown or there are more than 12 heads.
    Source:
        Shapley value of a quadratic game; derived here.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_subsets(load("checkpoints/softmax-h2-s0"), prompts).to_frame()["kept"].tolist()
        ['none', 'H0', 'H1', 'H0 H1']
    """
    _require_method(method)
    weights = weights_of(source)
    if weights.n_heads > MAX_SUBSET_HEADS:
        raise ValueError(
            f"n_heads must be <= {MAX_SUBSET_HEADS} for all subsets, got {weights.n_heads}."
        )
    prompts = prompts.to("cpu").to(torch.float64)
    chunks = [prompts[i : i + 8 * CHUNK] for i in range(0, len(prompts), 8 * CHUNK)]
    outputs = torch.cat(
        [head_outputs(weights, chunk) for chunk in chunks]
    ).numpy()  # [prompt, head, d_y]
    target = prompts.y_query_clean.numpy()
    if method == "mean":
        # Absent heads add their mean: move those means to the target and count deviations.
        means = outputs.mean(0)
        outputs, target = outputs - means, target - means.sum(0)
    kept = np.array(
        sorted(
            itertools.product([False, True], repeat=weights.n_heads),
            key=lambda s: (sum(s), [not k for k in s]),
        )
    )
    full = np.square(outputs.sum(1) - target).mean(1)
    risks = np.array([_risk_and_rise(outputs, target, subset, full) for subset in kept])
    contributions = (outputs * (2 * target - outputs.sum(1))[:, None]).mean(2)
    shapley, shapley_sem = mean_and_sem(contributions)
    risk, risk_sem, rise, rise_sem = risks.T
    return SubsetAblation(method, kept, risk, risk_sem, rise, rise_sem, shapley, shapley_sem)


def _risk_and_rise(outputs: np.ndarray, target: np.ndarray, subset: np.ndarray, full: np.ndarray):
    squares = np.square(outputs[:, subset].sum(1) - target).mean(1)
    return *mean_and_sem(squares), *mean_and_sem(squares - full)


def _mask(z: Tensor, hook: object, *, heads: list[int], value: Tensor | None) -> Tensor:
    z = z.clone()
    z[:, :, heads] = 0 if value is None else value[:, heads].to(z)
    return z


def _squared_errors(model: "ICLTransformer", prompts: Prompts, hooks: Hooks) -> np.ndarray:
    """Squared error of each prompt against the clean target, mean over responses."""
    squares = []
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        for start in range(0, len(prompts), CHUNK):
            part = prompts[start : start + CHUNK]
            squares.append((model.predict(part) - part.y_query_clean).square().mean(1))
    return torch.cat(squares).double().numpy(force=True)


def _mean_z(model: "ICLTransformer", prompts: Prompts) -> Float[Tensor, "layer pos head d_head"]:
    total = torch.zeros(())
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        for start in range(0, len(prompts), CHUNK):
            _, cache = model.run_with_cache(
                prompts[start : start + CHUNK].tokens, names_filter=names
            )
            total = total + torch.stack([cache[name].double().sum(0) for name in names])
    return total / len(prompts)


def _require_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
