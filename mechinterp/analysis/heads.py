"""What breaks when heads are masked: each head of each layer, and every subset of one layer's heads."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float

from mechinterp import figures
from mechinterp.analysis.circuits import HasWeights, weights_of
from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.masking import masked_errors
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.adapter import HookedPredictor, as_predictor
from mechinterp.models.functional import AttentionWeights, head_outputs
from mechinterp.tracking import Track, untracked

if TYPE_CHECKING:
    from mechinterp.models.transformer import ICLTransformer

METHODS = ("zero", "mean")
"""What stands for an absent head where heads just add up; single heads can be resampled, too."""
MAX_SUBSET_HEADS = 12
CHUNK = 8192


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(Result):
    """How much the excess risk rises when one head is masked, and how the layers spread it over their heads."""

    method: str
    """"zero": the head's output is 0; "mean": its z is the mean over prompts at that position;
    "resample": its z is that of another prompt."""
    rise: Float[np.ndarray, "layer head"]
    """Excess risk of the masked minus that of the full model, unit y^2."""
    rise_sem: Float[np.ndarray, "layer head"]
    """Standard error of `rise`, paired: the same prompts for every mask."""
    p_value: Float[np.ndarray, "layer head"]
    """Of no rise or fall, from the normal law of the mean; corrected for all heads by Benjamini and Hochberg: among
    the heads with p_value < q, a share of q at most is expected to be of no effect."""
    effective_heads: Float[np.ndarray, " layer"]
    """exp of the entropy of `importance`: 1 if one head counts, n_heads if all count alike, 0 if none does."""
    effective_heads_sem: Float[np.ndarray, " layer"]
    """Standard error of `effective_heads`, by the delta method."""
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
    def importance(self) -> Float[np.ndarray, "layer head"]:
        """A head's share of its layer's rises, falls taken as 0; all 0 where no head of a layer counts."""
        return _shares(self.rise)

    @property
    def head_names(self) -> list[str]:
        """L0H0, L0H1, ... in the order of the raveled arrays."""
        return [f"L{layer}H{head}" for layer, head in np.ndindex(self.rise.shape)]

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        layer, head = np.divmod(np.arange(self.rise.size), self.rise.shape[1])
        columns = {"layer": layer, "head": head}
        for name in ("rise", "rise_sem", "p_value", "importance"):
            columns[name] = getattr(self, name).ravel()
        return pd.DataFrame({"method": self.method, **columns})

    def layer_frame(self) -> pd.DataFrame:
        """One row per layer: its effective heads, the share of its first head and its largest rise."""
        columns = {
            "layer": np.arange(len(self.rise)),
            "effective_heads": self.effective_heads,
            "effective_heads_sem": self.effective_heads_sem,
            "top_share": self.importance.max(1),
            "top_head": self.rise.argmax(1),
            "top_rise": self.rise.max(1),
        }
        return pd.DataFrame({"method": self.method, **columns})

    def plot(self) -> go.Figure:
        """Rise of the excess risk: layers by heads, or with one layer a bar per head."""
        title = f"Rise of the excess risk when a head is masked ({self.method} ablation)"
        if len(self.rise) > 1:
            return figures.layers_by_heads(self.rise, title=title, unit="y²")
        return figures.bars(
            self.head_names,
            {f"{self.method} ablation": self.rise.ravel()},
            errors={f"{self.method} ablation": self.rise_sem.ravel()},
            title=title,
            y_title="rise of excess risk (y²)",
        )

    def plot_importance(self) -> go.Figure:
        """Importance within the layer, layers by heads."""
        title = f"Importance: share of the layer's rise ({self.method} ablation)"
        return figures.layers_by_heads(self.importance, title=title, unit="share", signed=False)


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


def ablate_heads(
    model: "HookedPredictor | ICLTransformer",
    prompts: Prompts,
    *,
    method: str = "zero",
    track: Track = untracked,
) -> HeadAblation:
    """Rise of the excess risk when each head of a hooked model is masked, one at a time.

    Args:
        method: "zero"; "mean" over the given prompts at each position; or "resample", from another prompt.
        track: Told of the progress.
    Raises:
        ValueError: If the method is unknown, or prompts are to be swapped and odd in number.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time; that the importance is
        normalised within a layer, and how it is estimated, is a choice made here.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_heads(load("checkpoints/softmax-h2-s0").model, prompts).rise.shape
        (1, 2)
    """
    predictor = as_predictor(model)
    shape = (predictor.n_layers, predictor.n_heads)
    masks = [[], *([head] for head in np.ndindex(shape))]
    errors = masked_errors(predictor, prompts, masks, method=method, track=track)
    full, rises = errors[:, 0], (errors[:, 1:] - errors[:, :1]).reshape(-1, *shape)
    full_risk, full_risk_sem = mean_and_sem(full)
    rise, rise_sem = mean_and_sem(rises)
    effective_heads, effective_heads_sem = _effective_heads(rises)
    return HeadAblation(
        method=method,
        rise=rise,
        rise_sem=rise_sem,
        p_value=_corrected_p_values(rise, rise_sem),
        effective_heads=effective_heads,
        effective_heads_sem=effective_heads_sem,
        full_risk=float(full_risk),
        full_risk_sem=float(full_risk_sem),
    )


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
    _require_subset_method(method)
    weights = weights_of(source)
    if weights.n_heads > MAX_SUBSET_HEADS:
        raise ValueError(
            f"n_heads must be <= {MAX_SUBSET_HEADS} for all subsets, got {weights.n_heads}."
        )
    prompts = prompts.to("cpu").to(torch.float64)
    chunks = [prompts[i : i + CHUNK] for i in range(0, len(prompts), CHUNK)]
    outputs = torch.cat(
        [head_outputs(weights, chunk) for chunk in chunks]
    ).numpy()  # [prompt, head, d_y]
    target = prompts.y_query_clean.numpy()
    if weights.b_O is not None:  # no head's own: every subset predicts it
        target = target - weights.b_O.numpy(force=True)
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


def _shares(rise: Float[np.ndarray, "layer head"]) -> Float[np.ndarray, "layer head"]:
    positive = rise.clip(min=0)
    total = positive.sum(1, keepdims=True)
    return positive / np.where(total == 0, 1, total)


def _effective_heads(
    rises: Float[np.ndarray, "unit layer head"],
) -> tuple[Float[np.ndarray, " layer"], Float[np.ndarray, " layer"]]:
    """exp(H) with H = -sum_j w_j log w_j, and its standard error: d exp(H)/d rise_j = -exp(H) (log w_j + H) / sum."""
    rise = rises.mean(0)
    shares = _shares(rise)
    logs = np.log(np.where(shares > 0, shares, 1))
    entropy = -(shares * logs).sum(1)
    number = np.where(shares.any(1), np.exp(entropy), 0.0)
    total = rise.clip(min=0).sum(1)
    slope = -number[:, None] * (logs + entropy[:, None]) / np.where(total == 0, 1, total)[:, None]
    _, sem = mean_and_sem((rises * np.where(shares > 0, slope, 0)).sum(2))
    return number, sem


def _corrected_p_values(
    rise: Float[np.ndarray, "layer head"], sem: Float[np.ndarray, "layer head"]
) -> Float[np.ndarray, "layer head"]:
    # Here and not above: `classify` reads this file and need not wait for it.
    import scipy.stats

    # A head that changes no prediction has no spread either: 0 / 0 is no evidence.
    score = np.abs(rise) / np.where((rise == 0) & (sem == 0), 1, sem)
    p_values = 2 * scipy.stats.norm.sf(score)
    return scipy.stats.false_discovery_control(p_values.ravel()).reshape(rise.shape)


def _require_subset_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
