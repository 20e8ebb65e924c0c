"""Linear read-outs of the stream at the query after each layer and each head (the logit lens for regression)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.probing.linear import cross_validated_probe
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import loss_and_r2
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.n_prompts import least_number, stream_width, usual_number
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

READ = ("y", "model", "ridge")
"""Targets of the read-outs."""
PLACE = "stream before layer"
"""Title of an axis over the layers."""
PER_READ_OUT = 4
"""Number of prompts for a fitted read-out, as a multiple of the smallest number that a probe
accepts."""


def in_a_row(values: Float[np.ndarray, " place"], sems: Float[np.ndarray, " place"]) -> str:
    """Numbers with their standard errors, separated by commas."""
    return ", ".join(map(with_error, values, sems))


@dataclass(frozen=True, eq=False, repr=False)
class ReadOut(Result):
    """R² of the model's own read-out and of a fitted one, on the stream at the query, place by
    place.

    Places are the stream before the first layer, before each layer plus the output of one of its
    heads, and after each layer. Targets are y with its noise, the model's prediction, and the
    prediction of ridge regression at the task's penalty."""

    layers_run: Int[np.ndarray, " place"]
    head: Int[np.ndarray, " place"]
    own_loss: Float[np.ndarray, "target place"]
    own_loss_sem: Float[np.ndarray, "target place"]
    own_r2: Float[np.ndarray, "target place"]
    own_r2_sem: Float[np.ndarray, "target place"]
    fitted_loss: Float[np.ndarray, "target place"]
    fitted_loss_sem: Float[np.ndarray, "target place"]
    fitted_r2: Float[np.ndarray, "target place"]
    fitted_r2_sem: Float[np.ndarray, "target place"]
    penalty: Float[np.ndarray, "target place"]
    COLUMNS: ClassVar = {
        "layers_run": "Number of complete layers that have run.",
        "head": "Head of the next layer whose output is added; -1 if none is added.",
        "own_loss": "Mean squared distance between the target and the model's own read-out (last norm and W_U); NaN if that read-out uses other positions too.",
        "own_r2": "1 - own_loss / mean square of the target.",
        "fitted_loss": "Mean squared distance between the target and a ridge read-out, on held-out prompts.",
        "fitted_loss_sem": "Standard error of fitted_loss, over prompts and over the fit.",
        "penalty": "Penalty of the fitted read-out, in units of the features' mean square.",
        "target": "Target of the read-out: y, the model's prediction, or the prediction of ridge regression.",
        "place": "Stream at the query: the input, before a layer plus the output of one head, or after a layer.",
        "fitted_r2": "1 - fitted_loss / mean square of the target.",
    }
    UNITS: ClassVar = {"y²": ("own_loss", "fitted_loss")}

    @property
    def places(self) -> list[str]:
        """Names of the places: input, L0H0, ..., after L0, ..."""
        pairs = zip(self.layers_run, self.head, strict=True)
        return [
            f"L{layers}H{head}" if head >= 0 else f"after L{layers - 1}" if layers else "input"
            for layers, head in pairs
        ]

    def __repr__(self) -> str:
        whole = self.head < 0
        fitted, own = (" ".join(map(cell, r2[0, whole])) for r2 in (self.fitted_r2, self.own_r2))
        return f"ReadOut(R² of y before each layer and at the end: fitted {fitted}; own {own})"

    def sentences(self) -> list[str]:
        """R² of y before each layer and at the end, by the model's own read-out and by a fitted one."""
        whole = self.head < 0
        own = in_a_row(self.own_r2[0, whole], self.own_r2_sem[0, whole])
        fitted = in_a_row(self.fitted_r2[0, whole], self.fitted_r2_sem[0, whole])
        return [
            f"R² of y before each layer and at the end, by the model's own read-out of the stream: {own}; by a fitted "
            f"one: {fitted}."
        ]

    def tables(self) -> dict[str, Table]:
        """All places, one table per target."""
        quiet, title = ("layers_run", "penalty"), "Read from the stream at the query"
        return {"read_out": Table(self.to_frame(), title, per="target", quiet=quiet)}

    def to_frame(self) -> pd.DataFrame:
        """One row per target and place."""
        names = with_sem("own_r2", "own_loss", "fitted_r2", "fitted_loss")
        frame = frame_of(self, *names, "penalty", target=READ, place=self.places)
        frame.insert(2, "layers_run", np.tile(self.layers_run, len(READ)))
        return frame

    def plot(self) -> go.Figure:
        """R² after each complete layer, for both read-outs and all targets."""
        whole = self.head < 0
        titles = {"y": "y", "model": "its prediction", "ridge": "ridge's"}
        curves = {
            f"{titles[target]}, {how}": (r2[row, whole], sem[row, whole])
            for how, r2, sem in (
                ("fitted", self.fitted_r2, self.fitted_r2_sem),
                ("own", self.own_r2, self.own_r2_sem),
            )
            for row, target in enumerate(READ)
            if np.isfinite(r2[row, whole]).any()
        }
        figure = figures.lines(
            self.layers_run[whole],
            curves,
            title="R² of linear read-outs of the stream at the query",
            x_title=PLACE,
            y_title="R²",
            zero_line=True,
        )
        figure.update_yaxes(range=[-0.55, 1.05])
        return over_places(figures.in_pairs(figure, len(READ)), int(self.layers_run.max()))


def over_places(figure: go.Figure, n_layers: int) -> go.Figure:
    """The figure with its x axis marked by the layers, from 0, and the end."""
    places = [f"L{layer}" for layer in range(n_layers)]
    return figure.update_xaxes(tickvals=list(range(n_layers + 1)), ticktext=[*places, "end"])


def read_out_at_places(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> ReadOut:
    """R² of linear read-outs of the stream at the query after each layer, and with the output of
    each head added.

    The model's own read-out (the logit lens) is used unchanged. The fitted read-out is a ridge
    regression: it is fitted to four fifths of the prompts and scored on the other fifth, with the
    best penalty.

    Args:
        prompts, task, n_prompts, seed: As for `probe`. With fewer than two prompts per entry of the stream the fitted
            read-out underestimates R².
    Raises:
        ValueError: As for `probe`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> found = read_out_at_places(gradient_descent_model([0.5, 0.5], d_x=4), n_prompts=256)
        >>> found.places
        ['input', 'L0H0', 'after L0', 'L1H0', 'after L1']
    """
    predictor = predictor_of(source)
    if n_prompts is None:
        n_prompts = max(usual_number(predictor), PER_READ_OUT * least_number(predictor))
    law, width = task_for(predictor, task, "probe", prompts), stream_width(predictor)
    prompts = evaluation_prompts(
        predictor, prompts, law=law, n_prompts=n_prompts, seed=seed, fitted=width
    )
    with torch.no_grad():
        predicted = predictor.predict(prompts)
    best = ridge(prompts.to(torch.float64), penalty=law.posterior_penalty)
    targets = [t.double().numpy(force=True) for t in (prompts.y_query, predicted, best)]
    places = _places(predictor, prompts)
    streams, rows = list(places.values()), []
    read = torch.stack([predictor.own_read_out(stream, prompts) for stream in streams])
    whole = predicted.to(read)
    # A model that reads several positions, for example, has no read-out of the query's stream alone.
    if not torch.allclose(read[-1], whole, rtol=1e-3, atol=1e-4 * whole.abs().max().item()):
        read = torch.full_like(read, torch.nan)
    own = read.double().numpy(force=True)
    for index, stream in enumerate(progress(streams, "reading out")):
        features = stream.double().numpy(force=True)
        for target, fitted in zip(targets, cross_validated_probe(features, *targets), strict=True):
            as_is = loss_and_r2(own[index], target)
            rows.append([*as_is, *fitted.scores(target), fitted.penalty])
    names = [f"{of}_{name}" for of in ("own", "fitted") for name in with_sem("loss", "r2")]
    values = np.array(rows).reshape(len(places), len(READ), -1).T
    columns = dict(zip([*names, "penalty"], values, strict=True))
    layers_run, head = (np.array(each) for each in zip(*places, strict=True))
    return ReadOut(layers_run=layers_run, head=head, **columns)


def _places(
    predictor: Predictor, prompts: Prompts
) -> dict[tuple[int, int], Float[Tensor, "batch d_model"]]:
    """Streams at the query in order, by (layers run, head whose output is added, or -1)."""
    streams = predictor.streams(prompts)[:, :, 0]
    written = predictor.query_writes(prompts)
    places = {(0, -1): streams[0]}
    for layer in range(predictor.n_layers):
        if written is not None:
            for head in range(predictor.n_heads):
                places[layer, head] = streams[layer] + written[layer][:, head]
        places[layer + 1, -1] = streams[layer + 1]
    return places
