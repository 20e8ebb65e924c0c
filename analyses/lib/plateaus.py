"""Plateaus of the loss of linear attention during training, and what its heads hold there.

Number and times of the drops, the predicted levels between them, the eigenvectors that heads hold, and the
distance of the predictor from principal component regression.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analyses.lib.theory.linear import fixed_point
from mechinterp import figures, heatmaps
from mechinterp.analysis.training.local_losses import taken
from mechinterp.display import Result, frame_of
from mechinterp.theory.linear import MergedHeads, Modes, Moments, modes
from mechinterp.theory.linear_jumps import Jumps, predict_jumps
from mechinterp.training.linear import Flow

LEAST_HEIGHT = 1e-4
"""A maximum of -dL/dt counts as a drop if it exceeds this fraction of the largest."""


@dataclass(frozen=True, eq=False, repr=False)
class Plateaus(Result):
    """Plateaus of the loss in order: before the first drop, between drops, and after the last drop."""

    time: Float[np.ndarray, " plateau"]
    """Time of the smallest gradient between two drops, unit of tau."""
    loss: Float[np.ndarray, " plateau"]
    """Loss at `time`, unit y^2."""
    level: Float[np.ndarray, " plateau"]
    """Predicted loss with the directions learned at `time`, unit y^2."""
    learned: Float[np.ndarray, "plateau mode"]
    """f_d, the learned part of each direction."""
    pcr_distance: Float[np.ndarray, " plateau"]
    """E (y_hat - y_pcr)^2 / E y^2, where y_pcr is population principal component regression on as
    many components."""
    value: Float[np.ndarray, "plateau head"]
    """Value weights v_i."""
    key_cosine: Float[np.ndarray, "plateau head rank mode"]
    """Cosine of each key and eigenvector; empty (rank 0) for merged heads."""
    query_cosine: Float[np.ndarray, "plateau head rank mode"]
    """Cosine of each query and eigenvector; empty (rank 0) for merged heads."""
    drop_time: Float[np.ndarray, " drop"]
    """Times of the maxima of -dL/dt, unit of tau."""
    drop_loss: Float[np.ndarray, " drop"]
    """Loss at `drop_time`, unit y^2."""
    crossing_time: Float[np.ndarray, " crossing"]
    """Time at which the loss first passes the middle of two neighbouring levels, unit of tau; NaN
    if it never does."""
    predicted: Jumps
    """Jumps predicted from the initial weights; empty unless heads are separate and of rank one."""
    levels: Float[np.ndarray, " level"]
    """All predicted levels, unit y^2."""
    curve: Float[np.ndarray, "time 2"]
    """Time and loss of the whole run."""

    def __repr__(self) -> str:
        rests = ", ".join(f"{loss:.4g}" for loss in self.loss)
        return f"Plateaus({len(self.drop_time)} drops, plateaus at {rests})"

    @property
    def n_learned(self) -> Int[np.ndarray, " plateau"]:
        """Number of directions that are more than half learned."""
        return (self.learned > 0.5).sum(1)

    def to_frame(self) -> pd.DataFrame:
        """One row per plateau and direction."""
        names = ("time", "loss", "level", "pcr_distance", "n_learned", "learned")
        plateau, mode = map(range, self.learned.shape)
        return frame_of(self, *names, plateau=plateau, mode=mode)

    def plot(self) -> go.Figure:
        """Loss over time, with the predicted levels dotted and the predicted jumps dashed."""
        time, loss = self.curve.T
        # Nothing happens long before the first drop, and time 0 cannot be shown on a logarithmic
        # axis.
        falling = time[loss < 0.99 * loss[0]]
        later = self.curve[time > (falling[0] / 10 if len(falling) else 0)]
        figure = figures.lines(
            later[:, 0],
            {"loss": later[:, 1]},
            title="Loss during training, predicted levels (dotted) and predicted jumps (dashed)",
            x_title="time (tau)",
            y_title="loss (y²)",
            levels=self.levels,
            log_x=True,
        )
        for time in self.predicted.time:
            figure.add_vline(float(time), line_dash="dash", line_width=1)
        return figure

    def plot_learned(self) -> go.Figure:
        """Learned part of each direction at each plateau."""
        return heatmaps.heatmap(
            self.learned,
            title="Learned part of each direction at each plateau",
            rows=[f"plateau {row}" for row in range(len(self.learned))],
            columns=[f"direction {mode}" for mode in range(self.learned.shape[1])],
            unit="learned fraction",
        )


def plateaus(run: Flow, moments: Moments) -> Plateaus:
    """Plateaus and drops of a training run.

    Args:
        run: Run of `flow`, or of descent on the moments of the population; minibatch noise would
            add maxima.
        moments: Moments of the training population, for the levels and principal component
            regression.
    Raises:
        ValueError: If the run has fewer than 3 times, or the loss never falls.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (19) for the levels and eq. (22) for the predictor.
    See also:
        `jump_forecast`, `history`.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear import separate_heads
        >>> from mechinterp.training.linear import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(separate_heads(3, 2, std=1e-3, seed=0), moments, duration=1e6, until_loss=0.05272)
        >>> plateaus(run, moments)
        Plateaus(2 drops, plateaus at 0.6, 0.2299, 0.05272)
    """
    directions, heads = modes(moments), run.heads
    drop = drops(run)
    inner = [
        first + int(run.descent[first : last + 1].argmin()) for first, last in pairwise([0, *drop])
    ]
    # After the last drop the gradient only falls.
    rows = np.array([*inner, len(run.time) - 1])
    count = (run.learned[rows] > 0.5).sum(1)
    principal = np.stack([fixed_point(directions, range(number)) for number in count])
    none = np.zeros((*heads.v.shape, 0, len(directions.rates)))
    key, query = (none, none) if isinstance(heads, MergedHeads) else (heads.K, heads.Q)
    return Plateaus(
        time=run.time[rows],
        loss=run.loss[rows],
        level=directions.levels[count],
        learned=run.learned[rows],
        pcr_distance=moments.squared_norm(run.M[rows] - principal) / moments.yy,
        value=heads.v[rows],
        key_cosine=_cosine(key[rows], directions),
        query_cosine=_cosine(query[rows], directions),
        drop_time=run.time[drop],
        drop_loss=run.loss[drop],
        crossing_time=crossings(run, directions.levels),
        predicted=_predicted(run, directions),
        levels=directions.levels,
        curve=np.column_stack([run.time, run.loss]),
    )


def drops(run: Flow) -> Int[np.ndarray, " drop"]:
    """Rows at which -dL/dt has a local maximum above the fraction `LEAST_HEIGHT` of its largest
    value.

    Raises:
        ValueError: If the run has fewer than 3 times, or the loss never falls.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear import merged_heads
        >>> from mechinterp.training.linear import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> len(drops(flow(merged_heads(3, 2, std=1e-3, seed=0), moments, duration=300.0)))
        1
    """
    if len(run.time) < 3 or not run.descent.max() > 0:
        raise ValueError(
            f"run must have at least 3 times and a falling loss, got {len(run.time)} times."
        )
    middle = run.descent[1:-1]
    top = (middle > run.descent[:-2]) & (middle >= run.descent[2:])
    return 1 + np.flatnonzero(top & (middle > LEAST_HEIGHT * run.descent.max()))


def crossings(run: Flow, levels: Float[np.ndarray, " level"]) -> Float[np.ndarray, " crossing"]:
    """Times at which the loss first passes the middle of two neighbouring levels; NaN if it never
    does.

    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear import merged_heads
        >>> from mechinterp.training.linear import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(merged_heads(3, 2, std=1e-3, seed=0), moments, duration=1.0)
        >>> crossings(run, modes(moments).levels).tolist()
        [nan, nan]
    """
    times = np.full(len(levels) - 1, np.nan)
    for row, middle in enumerate((levels[:-1] + levels[1:]) / 2):
        below = np.flatnonzero(run.loss <= middle)
        if below.size:
            pair = slice(max(below[0] - 1, 0), below[0] + 1)
            times[row] = np.interp(-middle, -run.loss[pair], run.time[pair])
    return times


def _predicted(run: Flow, directions: Modes) -> Jumps:
    first = taken(run.heads, 0)
    if isinstance(first, MergedHeads) or first.K.shape[-2] != 1:
        none = np.zeros(0, dtype=np.int64)
        return Jumps(time=np.zeros(0), mode=none, head=none)
    return predict_jumps(first, directions)


def _cosine(vectors: np.ndarray, directions: Modes) -> np.ndarray:
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors @ directions.vectors / np.where(norm > 0, norm, 1)
