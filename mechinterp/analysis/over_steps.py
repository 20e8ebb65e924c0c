"""Any analysis at every saved step of a training: one table, figures with a slider, and curves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.basedatatypes import BaseTraceType

from mechinterp import figures
from mechinterp.analysis.needs import Model
from mechinterp.analysis.registry import analysis_of, run_analysis
from mechinterp.analysis.result import Finding, Table, figures_of, known, tables_of
from mechinterp.config import TaskLike
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import require_prompts
from mechinterp.progress import progress

N_STEP_PROMPTS = 512
"""Default number of prompts at each step."""
MOST_FRAMES, MOST_STEP_NUMBERS = 40, 200_000
"""Most steps and most numbers in a figure with a slider; with more, fewer steps are drawn."""
MOST_CURVES = 3
"""Number of columns of a table that are drawn as curves."""
SUFFIX = "-over-steps"
"""Suffix of the name by which a page shows an analysis at every saved step."""


@dataclass(frozen=True, eq=False, repr=False)
class OverSteps(Result):
    """Results of one analysis at each saved step, and the loss there."""

    analysis: str
    """Name of the analysis."""
    results: tuple[Finding, ...]
    """Result at each step."""
    step: Int[np.ndarray, " step"]
    """Number of updates."""
    curve: Float[np.ndarray, "row 2"]
    """Step and eval_loss of the whole history; no rows without one."""
    COLUMNS: ClassVar = {
        "step": "Number of updates.",
        "eval_loss": "Loss at the last logged step before or at each saved step; NaN without a history.",
        "headline": "Result at the step in a few words.",
    }
    UNITS: ClassVar = {"y²": ("eval_loss",)}

    def __repr__(self) -> str:
        ends = [f"step {self.step[row]:,}{self._told(row, ' ')}" for row in (0, -1)]
        return f"OverSteps({self.analysis} at {len(self.step)} steps, {' to '.join(ends)})"

    @property
    def eval_loss(self) -> Float[np.ndarray, " step"]:
        """Loss at the last logged step before or at each saved step, unit y^2; NaN without a
        history."""
        rows = np.searchsorted(self.curve[:, 0], self.step, side="right")
        return np.r_[np.nan, self.curve[:, 1]][rows]

    @property
    def headlines(self) -> list[str]:
        """Result at each step in a few words; empty if the analysis has no headline."""
        return [getattr(result, "headline", "") for result in self.results]

    def _told(self, row: int, before: str) -> str:
        headline = self.headlines[row]
        return f"{before}{headline}" if headline else ""

    def sentences(self) -> list[str]:
        """Headlines with the steps at which they change; if there are more than five, the first and
        last."""
        rows = range(len(self.step))
        changes = [r for r in rows if not r or self.headlines[r] != self.headlines[r - 1]]
        shown = changes if len(changes) <= 5 else [0, -1]
        texts = [
            f"{self.headlines[r]} at step {self.step[r]:,}" for r in shown if self.headlines[r]
        ]
        ends = f"{self.step[0]:,} to {self.step[-1]:,}"
        return [f"{len(self.step)} saved steps, {ends}{': ' if texts else ''}{', '.join(texts)}."]

    def to_frame(self) -> pd.DataFrame:
        """One row per step and row of the analysis."""
        first = {"step": self.step, "eval_loss": self.eval_loss}
        if any(self.headlines):
            first["headline"] = np.array(self.headlines)
        frames = [result.to_frame() for result in self.results]
        row = np.repeat(np.arange(len(frames)), [len(frame) for frame in frames])
        rest = pd.concat(frames, ignore_index=True).drop(columns=list(first), errors="ignore")
        return pd.DataFrame({name: values[row] for name, values in first.items()}).join(rest)

    def tables(self) -> dict[str, Table]:
        """Every row at every step."""
        last = next(iter(tables_of(self.analysis, self.results[-1]).values()))
        title = f"{last.title or self.analysis.capitalize()} at the saved steps"
        name = f"{self.analysis.replace('-', '_')}_over_steps"
        meanings = {**last.known, **known(self)}
        return {name: Table(self.to_frame(), title, quiet=last.quiet, known=meanings)}

    def figures(self) -> dict[str, go.Figure]:
        """Figures of the analysis with a slider, or else curves; first the loss, if there are
        headlines."""
        key = self.analysis.replace("-", "_")
        sliders = {f"{name}_over_steps": each for name, each in self._sliders().items()}
        curves = {f"{key}_{name}_over_steps": self.plot_curve(name) for name in self.curves}
        shown = len(self.curve) and any(self.headlines)
        return ({f"{key}_loss": self.plot_loss()} if shown else {}) | (sliders or curves)

    @property
    def curves(self) -> tuple[str, ...]:
        """Columns that are drawn as curves: the first numeric ones without standard errors."""
        numbers = self.results[-1].to_frame().select_dtypes("floating").columns
        return tuple(name for name in numbers if not name.endswith(("_sem", "_p")))[:MOST_CURVES]

    def plot(self) -> go.Figure:
        """First figure of the analysis with a slider over the steps; the first curve if its traces
        change."""
        sliders = self._sliders()
        return next(iter(sliders.values())) if sliders else self.plot_curve(self.curves[0])

    def plot_curve(self, column: str) -> go.Figure:
        """A column of the table over the steps, one curve per row of the analysis."""
        names = _row_names([result.to_frame() for result in self.results])
        every = self.to_frame().assign(name=[name for each in names for name in each])
        shown = [c for c in (column, f"{column}_sem") if c in every]
        curves = {}
        for name, rows in every.groupby("name", sort=False):
            values = rows.drop_duplicates("step").set_index("step")[shown].reindex(self.step)
            curves[str(name)] = tuple(values.to_numpy(dtype=np.float64).T)
        unit = next(iter(self.tables().values())).units.get(column, "")
        return figures.lines(
            self._places(self.step),
            {name: each if len(each) > 1 else each[0] for name, each in curves.items()},
            title=f"{column} over training",
            x_title="step (step 0 at the left edge)",
            y_title=f"{column} ({unit})" if unit else column,
            log_x=True,
        )

    def plot_loss(self) -> go.Figure:
        """Loss over training, with a mark that a slider moves along the steps."""
        shown, edge = self._places(self.curve[:, 0]), self._places(np.zeros(1))
        figure = figures.lines(
            shown,
            {"eval_loss": self.curve[:, 1]},
            title="",
            x_title="step (step 0 at the left edge)",
            y_title="loss (y²)",
            levels=getattr(self.results[-1], "levels", ()),
            log_x=True,
            log_y=True,
        )
        places, loss = self._places(self.step), self.eval_loss
        mark = {"size": 13, "color": figures.COLORS[1]}
        figure.add_scatter(x=edge, y=loss[-1:], mode="markers", name="this step", marker=mark)
        frames, titles = {}, []
        for row in self._drawn:
            step = self.step[row]
            frames[f"{step:,}"] = [{"x": [float(places[row])], "y": [float(loss[row])]}]
            titles.append(f"Step {step:,}: loss {loss[row]:.4g}{self._told(row, ', ')}")
        return figures.with_slider(figure, frames, label="step", titles=titles, traces=[1])

    def _places(self, steps: np.ndarray) -> Float[np.ndarray, " step"]:
        """Positions of steps on a logarithmic axis; step 0 is drawn at half of the first other
        step."""
        every = np.concatenate([self.step, self.curve[:, 0]])
        later = every[every > 0]
        return np.maximum(steps, later.min() / 2 if len(later) else 0.5).astype(np.float64)

    @property
    def _drawn(self) -> list[int]:
        """Rows of the steps that a slider shows: the first, the last, and some between them."""
        count = len(self.step)
        return sorted({round(row) for row in np.linspace(0, count - 1, min(count, MOST_FRAMES))})

    def _sliders(self) -> dict[str, go.Figure]:
        """Figures of the analysis whose traces are the same at all steps, with a slider."""
        every = [figures_of(self.analysis, self.results[row]) for row in self._drawn]
        shared = [name for name in every[-1] if all(name in drawn for drawn in every)]
        sliders = {n: self._slider([drawn[n] for drawn in every]) for n in shared}
        return {name: figure for name, figure in sliders.items() if figure is not None}

    def _slider(self, drawn: Sequence[go.Figure]) -> go.Figure | None:
        """Figure for all steps, with one scale for heatmaps; None if the traces change or it has frames already."""
        kinds = {tuple((trace.type, trace.name) for trace in figure.data) for figure in drawn}
        if len(kinds) > 1 or any(figure.frames for figure in drawn):
            return None
        last = drawn[-1]
        for place, trace in enumerate(last.data):
            if trace.type == "heatmap":
                limits = [(figure.data[place].zmin, figure.data[place].zmax) for figure in drawn]
                low, high = zip(*limits, strict=True)
                trace.update(zmin=min(low), zmax=max(high))
        numbers = sum(
            np.size(trace[n]) for trace in last.data for n in ("x", "y", "z") if n in trace
        )
        stride = -(-len(drawn) * numbers // MOST_STEP_NUMBERS)
        shown = list(zip(self._drawn, drawn, strict=True))[::-stride][::-1]
        rows = [row for row, _ in shown]
        frames = {f"{self.step[r]:,}": [_moving(trace) for trace in each.data] for r, each in shown}
        title = last.layout.title.text or self.analysis
        titles = [f"{title} at step {self.step[r]:,}{self._told(r, ': ')}" for r in rows]
        return figures.with_slider(last, frames, label="step", titles=titles)


def _moving(trace: BaseTraceType) -> dict[str, object]:
    """Properties of a trace that differ between steps."""
    names = ("z", "text", "customdata") if trace.type == "heatmap" else ("x", "y", "text")
    moving = {name: trace[name] for name in names if name in trace and trace[name] is not None}
    if trace.type != "heatmap" and trace.error_y.array is not None:
        moving["error_y"] = {"array": trace.error_y.array}
    if "z" in moving:
        moving["z"] = np.asarray(moving["z"], dtype=np.float32)
    return moving


def _row_names(frames: Sequence[pd.DataFrame]) -> list[list[str]]:
    """Name of each row: its layer and head, and its other texts and integers that are the same at
    every step."""
    first = frames[0].drop(columns="step", errors="ignore")
    fixed = [
        name
        for name in first.select_dtypes(exclude="floating")
        if all(name in each and each[name].tolist() == first[name].tolist() for each in frames)
    ]
    names = [name for name in fixed if name not in ("layer", "head")]
    heads = [name for name in ("layer", "head") if name in fixed]

    def named(row: pd.Series) -> str:
        head = "".join(f"{name[0].upper()}{row[name]}" for name in heads)
        return " ".join(filter(None, (head, *(str(row[name]) for name in names))))

    return [[named(row) or str(at) for at, row in frame.iterrows()] for frame in frames]


def over_steps(
    source: Model,
    analysis: str | Callable[..., Finding] = "classify",
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    context_length: int | None = None,
    **settings: object,
) -> OverSteps:
    """Any analysis at each saved step of a training, on the same prompts.

    Args:
        source: A checkpoint with snapshots, a run of files (`load`), or a module that a `Monitor` watched.
        analysis: Name in `ANALYSES`, "module:function", or a function.
        prompts: Given prompts; None: they are drawn.
        task: Law of the prompts; None: the model's own.
        n_prompts: Number of prompts; None: the default of the analysis, at most 512.
        seed: Seed of the prompts; None: 0.
        context_length: Pairs per prompt; None: the task's own.
        settings: Further arguments of the analysis.
    Raises:
        ValueError: If the source has no snapshots, or as the analysis does.
    See also:
        `classify`, `ablate`, `history`, `load`.
    Example:
        >>> from mechinterp import load
        >>> over_steps(load("checkpoints/softmax-h2-s0"), "classify", n_prompts=64)
        OverSteps(classify at 10 steps, step 0 unstructured to step 500,000 debiased_gd)
    """
    name, chosen = analysis_of(analysis)
    require_prompts(prompts, "over_steps")
    steps = getattr(source, "steps", None)
    if not steps:
        path = getattr(source, "path", None)
        got = type(source).__name__ if path is None else f"{path} without"
        raise ValueError(f"{name} over steps needs a checkpoint with snapshots, got {got}.")
    if n_prompts is None and prompts is None and chosen.draws_prompts:
        default = chosen.options["n_prompts"].default
        n_prompts = min(default, N_STEP_PROMPTS) if isinstance(default, int) else N_STEP_PROMPTS
    results = tuple(
        run_analysis(
            analysis,
            source.at(step),
            prompts=prompts,
            task=task,
            context_length=context_length,
            n_prompts=n_prompts,
            seed=seed,
            settings=settings,
        )
        for step in progress(steps, f"{name} at saved steps")
    )
    return OverSteps(name, results, np.array(steps), source.loss_curve)
