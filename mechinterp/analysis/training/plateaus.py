"""Plateaus of the loss of linear attention during training, and what its heads hold there.

How many drops has the loss and when, on which of the predicted levels does it rest between them, which
eigenvectors do the heads hold, and how far is the predictor from principal component regression?
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures, heatmaps
from mechinterp.display import Result, frame_of
from mechinterp.theory.linear import Modes, Moments, fixed_point, modes
from mechinterp.theory.linear_heads import MergedHeads, SeparateHeads
from mechinterp.theory.linear_jumps import Jumps, predict_jumps
from mechinterp.training.linear.flow import Flow


@dataclass(frozen=True, eq=False, repr=False)
class Plateaus(Result):
    """Rests of the loss: before the first drop, between drops and after the last, in this order."""

    time: Float[np.ndarray, " plateau"]
    """Where the gradient is smallest between two drops, unit of tau."""
    loss: Float[np.ndarray, " plateau"]
    """Unit y^2."""
    level: Float[np.ndarray, " plateau"]
    """Predicted loss with as many directions learned as were at `time`, unit y^2."""
    learned: Float[np.ndarray, "plateau mode"]
    """f_d, the part of every direction that is learned."""
    pcr_distance: Float[np.ndarray, " plateau"]
    """E (y_hat - y_pcr)^2 / E y^2, y_pcr being population principal component regression on as many components."""
    value: Float[np.ndarray, "plateau head"]
    """Value weights v_i."""
    key_cosine: Float[np.ndarray, "plateau head rank mode"]
    """Cosine of a key and an eigenvector; of rank 0 for merged heads."""
    query_cosine: Float[np.ndarray, "plateau head rank mode"]
    """Cosine of a query and an eigenvector; of rank 0 for merged heads."""
    drop_time: Float[np.ndarray, " drop"]
    """Maxima of -dL/dt, unit of tau."""
    drop_loss: Float[np.ndarray, " drop"]
    """Loss there, unit y^2."""
    crossing_time: Float[np.ndarray, " crossing"]
    """When the loss first passes the middle of two neighbouring levels, unit of tau; NaN if it never does."""
    predicted: Jumps
    """Jumps predicted from the initial weights; empty unless heads are separate and of rank one."""
    levels: Float[np.ndarray, " level"]
    """All predicted levels, unit y^2."""
    curve: Float[np.ndarray, "time 2"]
    """Time and loss of the whole run."""

    def __repr__(self) -> str:
        rests = ", ".join(f"{loss:.4g}" for loss in self.loss)
        return f"Plateaus({len(self.drop_time)} drops, loss rests at {rests})"

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
        """Loss over time, with the predicted levels dotted and the predicted jumps as vertical lines."""
        time, loss = self.curve.T
        # Long before the first drop nothing happens, and time 0 has no place on a logarithmic axis.
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
        """Learned fraction of every direction at every plateau."""
        return heatmaps.heatmap(
            self.learned,
            title="Part of each direction that is learned at each plateau",
            rows=[f"plateau {row}" for row in range(len(self.learned))],
            columns=[f"direction {mode}" for mode in range(self.learned.shape[1])],
            unit="learned fraction",
        )


def plateaus(
    run: Flow, moments: Moments, *, tau: float = 1.0, relative_height: float = 1e-4
) -> Plateaus:
    """The plateaus and drops of a training run.

    Args:
        run: From `flow` or descent on the moments of the population; minibatch noise makes maxima of its own.
        moments: Of the population trained on, for levels and principal component regression.
        tau: Of the run, for the predicted jumps.
        relative_height: Maxima of -dL/dt below this part of the largest are no drops.
    Raises:
        ValueError: If the run has fewer than 3 times or none where the loss falls.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (19) for the levels and eq. (22) for the predictor.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import separate_heads
        >>> from mechinterp.training.linear.flow import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(separate_heads(3, 2, std=1e-3, seed=0), moments, duration=1e6, until_loss=0.05272)
        >>> plateaus(run, moments)
        Plateaus(2 drops, loss rests at 0.6, 0.2299, 0.05272)
    """
    found = modes(moments)
    drop = drops(run, relative_height=relative_height)
    inner = [
        first + int(run.descent[first : last + 1].argmin()) for first, last in pairwise([0, *drop])
    ]
    # After the last drop the gradient only falls.
    rows = np.array([*inner, len(run.time) - 1])
    count = (run.learned[rows] > 0.5).sum(1)
    principal = np.stack([fixed_point(found, range(number)) for number in count])
    key, query = _cosines(run, rows, found)
    return Plateaus(
        time=run.time[rows],
        loss=run.loss[rows],
        level=found.levels[count],
        learned=run.learned[rows],
        pcr_distance=moments.squared_norm(run.M[rows] - principal) / moments.yy,
        value=run.heads.v[rows],
        key_cosine=key,
        query_cosine=query,
        drop_time=run.time[drop],
        drop_loss=run.loss[drop],
        crossing_time=crossings(run, found.levels),
        predicted=_predicted(run, found, tau),
        levels=found.levels,
        curve=np.column_stack([run.time, run.loss]),
    )


def drops(run: Flow, *, relative_height: float = 1e-4) -> Int[np.ndarray, " drop"]:
    """Rows at which -dL/dt has a local maximum above a part of its largest value.

    Raises:
        ValueError: If the run has fewer than 3 times or none where the loss falls.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import merged_heads
        >>> from mechinterp.training.linear.flow import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> len(drops(flow(merged_heads(3, 2, std=1e-3, seed=0), moments, duration=300.0)))
        1
    """
    if len(run.time) < 3 or not run.descent.max() > 0:
        raise ValueError(
            f"run must hold at least 3 times and a falling loss, got {len(run.time)} times."
        )
    middle = run.descent[1:-1]
    top = (middle > run.descent[:-2]) & (middle >= run.descent[2:])
    return 1 + np.flatnonzero(top & (middle > relative_height * run.descent.max()))


def crossings(run: Flow, levels: Float[np.ndarray, " level"]) -> Float[np.ndarray, " crossing"]:
    """When the loss first passes the middle of two neighbouring levels; NaN if it never does.

    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import merged_heads
        >>> from mechinterp.training.linear.flow import flow
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(merged_heads(3, 2, std=1e-3, seed=0), moments, duration=1.0)
        >>> crossings(run, modes(moments).levels).tolist()
        [nan, nan]
    """
    found = []
    for middle in (levels[:-1] + levels[1:]) / 2:
        below = np.flatnonzero(run.loss <= middle)
        if not below.size:
            found.append(np.nan)
            continue
        last = int(below[0])
        pair = slice(max(last - 1, 0), last + 1)
        found.append(float(np.interp(-middle, -run.loss[pair], run.time[pair])))
    return np.array(found)


def _predicted(run: Flow, found: Modes, tau: float) -> Jumps:
    first = run.heads
    if isinstance(first, MergedHeads) or first.K.shape[-2] != 1:
        none = np.zeros(0, dtype=np.int64)
        return Jumps(time=np.zeros(0), mode=none, head=none)
    return predict_jumps(SeparateHeads(v=first.v[0], K=first.K[0], Q=first.Q[0]), found, tau=tau)


def _cosines(run: Flow, rows: np.ndarray, found: Modes) -> tuple[np.ndarray, np.ndarray]:
    heads = run.heads
    if isinstance(heads, MergedHeads):
        none = np.zeros((len(rows), heads.v.shape[1], 0, len(found.rates)))
        return none, none
    return _cosine(heads.K[rows], found), _cosine(heads.Q[rows], found)


def _cosine(vectors: np.ndarray, found: Modes) -> np.ndarray:
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors @ found.vectors / np.where(norm > 0, norm, 1)
