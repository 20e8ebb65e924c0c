"""Excess risk with every subset of the heads of one layer, and the Shapley value of each head."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float

from mechinterp import figures
from mechinterp.analysis.circuits import weights_of
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import head_outputs
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source

MAX_SUBSET_HEADS = 12
CHUNK = 8192
SHOWN = 5
"""Number of prompts on which a result keeps the heads' outputs."""


@dataclass(frozen=True, eq=False, repr=False)
class SubsetAblation(Result):
    """Excess risk with every subset of a layer's heads kept, and the Shapley value of each head; an absent head adds 0."""

    kept: Bool[np.ndarray, "subset head"]
    """Kept heads of each subset; the empty subset first, all heads last."""
    risk: Float[np.ndarray, " subset"]
    """Excess risk, mean (y_hat - y_query_clean)^2, unit y^2."""
    risk_sem: Float[np.ndarray, " subset"]
    rise: Float[np.ndarray, " subset"]
    """Risk minus that of the full model."""
    rise_sem: Float[np.ndarray, " subset"]
    """Standard error of `rise`, paired over prompts."""
    shapley: Float[np.ndarray, " head"]
    """Fall of the excess risk due to a head, averaged over all orders of adding heads; unit y^2.

    The values sum to the risk without heads minus the risk with all heads."""
    shapley_sem: Float[np.ndarray, " head"]
    outputs: Float[np.ndarray, "prompt head d_y"]
    """Output of each head on the first prompts, unit y."""
    rest: Float[np.ndarray, " d_y"]
    """Part of the prediction that does not depend on heads: the bias."""
    target: Float[np.ndarray, "prompt d_y"]
    """Response without noise on these prompts."""

    def __repr__(self) -> str:
        values = " ".join(f"H{head} {value:.3g}" for head, value in enumerate(self.shapley))
        return f"SubsetAblation(zero: risk {self.risk[-1]:.3g}; Shapley {values})"

    def to_frame(self) -> pd.DataFrame:
        """One row per subset."""
        names = [
            " ".join(f"H{head}" for head in np.flatnonzero(kept)) or "none" for kept in self.kept
        ]
        frame = frame_of(self, *with_sem("risk", "rise"), kept=names)
        frame.insert(1, "n_kept", self.kept.sum(1))
        return frame

    def shapley_frame(self) -> pd.DataFrame:
        """One row per head."""
        return frame_of(self, *with_sem("shapley"), head=range(len(self.shapley)))

    def switches(self) -> dict[str, object]:
        """Numbers for switches of the heads: risk of each subset, and outputs on a few prompts."""
        subsets = ["".join(map(str, kept.astype(int))) for kept in self.kept]
        risks = zip(subsets, self.risk, self.risk_sem, strict=True)
        return {
            "said": {subset: with_error(risk, sem) for subset, risk, sem in risks},
            "outputs": self.outputs.tolist(),
            "rest": self.rest.tolist(),
            "target": self.target.tolist(),
        }

    def plot(self) -> go.Figure:
        """Shapley value of each head."""
        return figures.bars(
            [f"L0H{head}" for head in range(len(self.shapley))],
            {"Shapley value": (self.shapley, self.shapley_sem)},
            title="Shapley value: fall of the excess risk due to a head (zero ablation)",
            y_title="fall of excess risk (y²)",
        )


def ablate_subsets(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
) -> SubsetAblation:
    """Excess risk of all 2^H subsets of a one-layer model's heads, from one forward pass.

    In one layer the heads' outputs o_h add up, so a subset's prediction is a partial sum. With v(S)
    = -(sum_S o - y)^2, a head's Shapley value is o_h (2 y - sum of all o): v is quadratic, and each
    pair shares its interaction equally.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
    Raises:
        ValueError: If there are more than 12 heads.
    Source:
        Shapley value of a quadratic game; derived here.
    See also:
        `ablate_heads`.
    Example:
        >>> from mechinterp import load
        >>> ablate_subsets(load("softmax-h2-s0"), n_prompts=512).to_frame()["kept"].tolist()
        ['none', 'H0', 'H1', 'H0 H1']
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    weights = weights_of(source, "ablate_subsets")
    if weights.n_heads > MAX_SUBSET_HEADS:
        raise ValueError(
            f"n_heads must be <= {MAX_SUBSET_HEADS} for all subsets, got {weights.n_heads}."
        )
    prompts = prompts.to("cpu").to(torch.float64)
    chunks = [prompts[i : i + CHUNK] for i in range(0, len(prompts), CHUNK)]
    outputs = torch.cat(
        [head_outputs(weights, chunk) for chunk in chunks]
    ).numpy()  # [prompt, head, d_y]
    # The bias belongs to no head: every subset predicts it.
    target = (prompts.y_query_clean - weights.output_bias).numpy(force=True)
    subsets = itertools.product([False, True], repeat=weights.n_heads)
    # By size; within one size, those with the first heads come first.
    kept = np.array(sorted(subsets, key=lambda each: (sum(each), [not k for k in each])))
    full = np.square(outputs.sum(1) - target).mean(1)
    risks = np.array(
        [
            [*mean_and_sem(errors), *mean_and_sem(errors - full)]
            for errors in (np.square(outputs[:, s].sum(1) - target).mean(1) for s in kept)
        ]
    )
    contributions = (outputs * (2 * target - outputs.sum(1))[:, None]).mean(2)
    shapley, shapley_sem = mean_and_sem(contributions)
    clean = prompts.y_query_clean.numpy()[:SHOWN]
    names = ("risk", "risk_sem", "rise", "rise_sem")
    return SubsetAblation(
        kept,
        **dict(zip(names, risks.T, strict=True)),
        shapley=shapley,
        shapley_sem=shapley_sem,
        outputs=outputs[:SHOWN],
        rest=clean[0] - target[0],
        target=clean,
    )
