"""Joint ablation of heads: pairs that need or replace each other, and a greedy order of all heads."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.stats import halves, mean_and_sem
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True, eq=False, repr=False)
class PairAblation(Result):
    """How much more, or less, it costs to mask two heads together than one after the other."""

    names: tuple[str, ...]
    """L0H0, L0H1, ...: the heads along both axes."""
    rise: Float[np.ndarray, "head head"]
    """Excess risk with both masked minus that of the full model, unit y^2; a head alone on the diagonal."""
    rise_sem: Float[np.ndarray, "head head"]
    interaction: Float[np.ndarray, "head head"]
    """rise(a, b) - rise(a) - rise(b): above 0 for heads that replace each other, below 0 for heads that
    only work together; 0 on the diagonal."""
    interaction_sem: Float[np.ndarray, "head head"]
    """Standard errors, paired over prompts."""

    def __repr__(self) -> str:
        one, other = np.unravel_index(int(np.abs(self.interaction).argmax()), self.rise.shape)
        size, sem = self.interaction[one, other], self.interaction_sem[one, other]
        return f"PairAblation({self.names[one]} with {self.names[other]}: {size:+.3g} ± {sem:.2g})"

    def to_frame(self) -> pd.DataFrame:
        """One row per pair."""
        pairs = list(combinations(range(len(self.names)), 2))
        columns: dict[str, list] = {
            "head": [self.names[one] for one, _ in pairs],
            "other": [self.names[other] for _, other in pairs],
        }
        for name in ("rise", "rise_sem", "interaction", "interaction_sem"):
            columns[name] = [getattr(self, name)[pair] for pair in pairs]
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Interaction of every two heads."""
        return figures.heatmap(
            self.interaction,
            title="Interaction: rise with both heads masked minus the sum of their rises",
            rows=self.names,
            columns=self.names,
            unit="y²",
        )


@dataclass(frozen=True, eq=False, repr=False)
class GreedyOrder(Result):
    """The excess risk as head after head is masked, each time the one that is missed least."""

    heads: Int[np.ndarray, "step 2"]
    """(layer, head) masked at each step."""
    risk: Float[np.ndarray, " size"]
    """Excess risk with the first 0, 1, ..., all of them masked, unit y^2."""
    risk_sem: Float[np.ndarray, " size"]
    rise: Float[np.ndarray, " size"]
    """Risk minus that of the full model."""
    rise_sem: Float[np.ndarray, " size"]
    """Standard error of `rise`, paired over prompts."""

    @property
    def names(self) -> list[str]:
        """The heads in the order in which they are masked."""
        return [f"L{layer}H{head}" for layer, head in self.heads]

    def __repr__(self) -> str:
        return (
            f"GreedyOrder({' '.join(self.names)}; risk {self.risk[0]:.3g} to {self.risk[-1]:.3g})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per number of masked heads."""
        frame = frame_of(self, *with_sem("risk", "rise"), n_masked=range(len(self.risk)))
        frame.insert(1, "head", ["", *self.names])
        return frame

    def plot(self) -> go.Figure:
        """Excess risk over the number of masked heads."""
        return figures.lines(
            np.arange(len(self.risk)),
            {"excess risk": self.risk},
            errors={"excess risk": self.risk_sem},
            title="Excess risk as the heads that are missed least are masked one after another",
            x_title="number of masked heads",
            y_title="excess risk (y²)",
            log_y=True,
        )


def ablate_pairs(
    source: Source,
    prompts: Prompts | None = None,
    *,
    method: str = "zero",
    n_prompts: int | None = None,
    seed: int = 0,
) -> PairAblation:
    """Rise of the excess risk when every two heads of a model are masked together, and their interaction.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        method: As in `ablate_heads`.
    Raises:
        ValueError: If the method is unknown, or prompts are to be swapped and odd in number.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_pairs(load("checkpoints/softmax-h2-s0").model, prompts).names
        ('L0H0', 'L0H1')
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    heads = predictor_of(source).heads
    pairs = [(one, other) for one in range(len(heads)) for other in range(one, len(heads))]
    masks = [[], *([heads[one], heads[other]] for one, other in pairs)]
    errors = masked_errors(source, prompts, masks, method=method)
    rises = np.zeros((len(errors), len(heads), len(heads)))
    for column, (one, other) in enumerate(pairs, start=1):
        rises[:, one, other] = rises[:, other, one] = errors[:, column] - errors[:, 0]
    alone = rises.diagonal(axis1=1, axis2=2)
    # A head masked twice is masked once.
    apart = (alone[:, :, None] + alone[:, None]) * (1 - np.eye(len(heads)))
    apart += alone[:, :, None] * np.eye(len(heads))
    names = tuple(f"L{layer}H{head}" for layer, head in heads)
    return PairAblation(names, *mean_and_sem(rises), *mean_and_sem(rises - apart))


def greedy_order(
    source: Source,
    prompts: Prompts | None = None,
    *,
    method: str = "zero",
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> GreedyOrder:
    """All heads in the order of a greedy search: each time the one whose masking leaves the least excess risk.

    The order is chosen on the first half of the prompts; the risks are those of the second.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        method: As in `ablate_heads`.
        progress: Optional progress callback.
    Raises:
        ValueError: If the method is unknown, there are fewer than four prompts, or halves that are to be
            swapped are odd in number.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> len(greedy_order(load("checkpoints/softmax-h2-s0").model, prompts).risk)
        3
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    chosen_on, measured_on = halves(prompts)
    gone: list[tuple[int, int]] = []
    left = predictor_of(source).heads
    for _ in progress(range(len(left)), "greedy order of heads"):
        errors = masked_errors(source, chosen_on, [[*gone, head] for head in left], method=method)
        gone.append(left.pop(int(errors.mean(0).argmin())))
    masks = [gone[:size] for size in range(len(gone) + 1)]
    errors = masked_errors(source, measured_on, masks, method=method)
    risks, rises = mean_and_sem(errors), mean_and_sem(errors - errors[:, :1])
    return GreedyOrder(np.array(gone), *risks, *rises)
