"""Linear probes of the stream: ridge regressions with held-out scores, and targets of other prompts as a control."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.probing.linear import cross_validated_probe
from mechinterp.analysis.probing.read_out import (
    PLACE,
    ReadOut,
    in_a_row,
    over_places,
    read_out_at_places,
)
from mechinterp.analysis.probing.targets import (
    READ_OUT,
    STRUCTURES,
    Target,
    named_targets,
    values_of,
)
from mechinterp.analysis.result import Table, known, records, tables_of
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.n_prompts import stream_width
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

USUAL = ("y", *STRUCTURES, READ_OUT)
"""Default targets."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerProbes(Result):
    """Fit of a ridge regression on the stream to a target, layer by layer.

    Row k is the stream before layer k, counted from 0; the last row is the stream after the last layer."""

    COLUMNS: ClassVar = {
        "risk": "Excess risk of the probe on held-out prompts: mean squared error against the target without noise.",
        "risk_sem": "Standard error of risk, over prompts and over the fit.",
        "r2": "1 - excess risk / mean square of the target without noise.",
        "r2_sem": "Standard error of r2, over prompts and over the fit.",
        "control_r2": "r2 of a control that is fitted to the targets of other prompts, assigned at random.",
        "control_r2_sem": "Standard error of control_r2, over prompts and over the fit.",
        "penalty": "Penalty with the smallest cross-validated error, in units of the features' mean square.",
        "target": "Target of the probe.",
        "layer": "Number of the layer before which the stream is read, from 0; the number of layers is the end.",
        "pos": "Position of the target in the prompt, from 0; the last position is the query's.",
    }
    positions: tuple[int, ...]
    """Positions in the prompt, from 0; the last position is the query's."""
    risk: Float[np.ndarray, "layer pos"]
    risk_sem: Float[np.ndarray, "layer pos"]
    r2: Float[np.ndarray, "layer pos"]
    r2_sem: Float[np.ndarray, "layer pos"]
    control_r2: Float[np.ndarray, "layer pos"]
    control_r2_sem: Float[np.ndarray, "layer pos"]
    penalty: Float[np.ndarray, "layer pos"]

    def __repr__(self) -> str:
        risks = " ".join(f"{risk:.3g}" for risk in self.risk[:, -1])
        return f"LayerProbes(excess risk {risks} at position {self.positions[-1]})"

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and position."""
        names = (*with_sem("risk", "r2", "control_r2"), "penalty")
        return frame_of(self, *names, layer=range(len(self.risk)), pos=self.positions)

    def plot(self) -> go.Figure:
        """Excess risk of the probe over layers, one curve per position."""
        names = [f"position {pos}" for pos in self.positions]
        figure = figures.lines(
            np.arange(len(self.risk)),
            figures.named(names, self.risk.T, self.risk_sem.T),
            title="Error of a linear probe of the stream",
            x_title=PLACE,
            y_title="excess risk (y²)",
            log_y=True,
        )
        return over_places(figure, len(self.risk) - 1)


@dataclass(frozen=True, eq=False, repr=False)
class Probing(Result):
    """Probes of the stream before each layer and at the end, for several targets."""

    COLUMNS: ClassVar = {
        "target": "Target of a probe: y, the response; beta, the task vector; x reweighted, times the context's correlations with y (Algorithm 1); x preconditioned, (S - 1) x with the context's covariance S; or a given function of the prompts."
    }
    probes: Mapping[str, LayerProbes]
    """Probes by target."""
    read_out: ReadOut | None = None
    """Own and fitted read-outs at each place of the stream; None if they are no target."""

    def __repr__(self) -> str:
        parts = [f"{self.probes['y']!r}"] if "y" in self.probes else []
        r2 = [
            f"{name} {' '.join(map(cell, each.r2[:, -1]))} (control {cell(each.control_r2[:, -1].max())})"
            for name, each in self.probes.items()
            if name != "y"
        ]
        parts += [f"R² of {', '.join(r2)}"] if r2 else []
        parts += [f"{self.read_out!r}"] if self.read_out else []
        return f"Probing({'; '.join(parts)})"

    def sentences(self) -> list[str]:
        """R² of each target before each layer and at the end, with the largest of the controls; then the read-outs."""
        texts = self.read_out.sentences() if self.read_out else []
        if not self.probes:
            return texts
        r2 = (
            f"{name} {in_a_row(each.r2[:, -1], each.r2_sem[:, -1])}"
            for name, each in self.probes.items()
        )
        controls = [
            pair
            for each in self.probes.values()
            for pair in zip(each.control_r2[:, -1], each.control_r2_sem[:, -1], strict=True)
        ]
        control = with_error(*max(controls, key=lambda pair: np.nan_to_num(pair[0], nan=-np.inf)))
        return [
            f"R² of linear probes of the stream at the query, before each layer and at the end: {'; '.join(r2)}. Fitted to "
            f"targets of other prompts, the largest is {control}.",
            *texts,
        ]

    @property
    def target(self) -> tuple[str, ...]:
        """Names of the targets of the probes."""
        return tuple(self.probes)

    def to_frame(self) -> pd.DataFrame:
        """One row per target, layer and position; of the read-outs if there is no other target."""
        if not self.probes and self.read_out:
            return self.read_out.to_frame()
        frames = {name: each.to_frame() for name, each in self.probes.items()}
        return pd.concat(frames, names=["target"]).reset_index("target").reset_index(drop=True)

    def tables(self) -> dict[str, Table]:
        """One table per target, then the read-outs."""
        title = "Read from the stream at the query; control r2: probe fitted to targets of other prompts"
        quiet = ("pos", "penalty")
        probes = Table(
            self.to_frame(), title, per="target", quiet=quiet, known=known(self, LayerProbes)
        )
        tables = {"probes": probes} if self.probes else {}
        return tables | (tables_of(READ_OUT, self.read_out) if self.read_out else {})

    def figures(self) -> dict[str, go.Figure]:
        """R² of all probes, the excess risk of the probe of y, and R² of the read-outs."""
        figures = {"probe_r2": self.plot_r2()} if self.probes else {}
        if "y" in self.probes:
            figures["probe_risk"] = self.probes["y"].plot()
        return figures | ({READ_OUT: self.read_out.plot()} if self.read_out else {})

    def to_document(self) -> dict:
        """Rows of y, of the other targets, and of the read-outs."""
        others = {name: each for name, each in self.probes.items() if name != "y"}
        document = {}
        if "y" in self.probes:
            document["response"] = records(self.probes["y"].to_frame())
        if others:
            document["structure"] = records(Probing(others).to_frame())
        if self.read_out:
            document[READ_OUT] = records(self.read_out.to_frame())
        return document

    def plot(self) -> go.Figure:
        """Excess risk of the probe of y, else of the first target; R² of the read-outs if there is no other target."""
        if not self.probes and self.read_out:
            return self.read_out.plot()
        return self.probes.get("y", next(iter(self.probes.values()))).plot()

    def plot_r2(self) -> go.Figure:
        """R² of each probe with its control, over the layers."""
        n_layers = len(next(iter(self.probes.values())).risk) - 1
        figure = figures.lines(
            np.arange(n_layers + 1),
            {
                f"{name}{of}": (getattr(each, r2)[:, -1], getattr(each, f"{r2}_sem")[:, -1])
                for name, each in self.probes.items()
                for r2, of in (("r2", ""), ("control_r2", ", control"))
            },
            title="R² of linear probes of the stream at the query",
            x_title=PLACE,
            y_title="R²",
            zero_line=True,
        )
        return over_places(figure, n_layers)


def probe(
    source: Source,
    prompts: Prompts | None = None,
    *,
    targets: str | Target | Sequence[str | Target] | Mapping[str, Target] = USUAL,
    heads: Sequence[Head] = (),
    positions: Sequence[int] = (-1,),
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Probing:
    """Linear probes of the stream before each layer and after the last, and read-outs at each place of it.

    A probe is a ridge regression on the stream. It is fitted to four fifths of the prompts and scored on the other
    fifth, for several penalties; the penalty with the smallest error against the fitted target is used. R² is 1 minus
    squared error / mean square of the target without noise. A control is fitted to the targets of other prompts: it
    shows what a probe finds by chance.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        targets: Names, functions, or functions by name. "y" is the response, "beta" the task vector; "reweighted x" and
            "preconditioned x" are possible outputs of a first layer; "read_out" adds the read-outs: the model's own (the
            logit lens) and a fitted one, of y, of the model's prediction and of ridge regression, after each layer and
            with the output of each head added. A function takes prompts and gives values [batch, pos, target], or these
            and the values without noise.
        heads: Heads that are masked during the run; not with "read_out".
        positions: Positions of the target; -1 is the query's. A model without one position for each
            pair, such as one that reads x and y in turn, can be probed at -1 only, and so can "read_out".
        task: Law of drawn prompts; None means the model's own. With given prompts whose law is unknown, ridge regression
            has the penalty that is best on them.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more for a wide stream: two prompts per
            entry, eight for "read_out".
    Raises:
        ValueError: If there are too few prompts for the features, a target or a position is unknown, there is neither
            a task nor prompts, or the model has no hooks on its streams.
    Source:
        Alain and Bengio 2016, arXiv 1610.01644; Akyürek et al. 2023, arXiv 2211.15661, for in-context regression.
        Read-outs: nostalgebraist 2020, the logit lens; Belrose et al. 2023, arXiv 2303.08112, the tuned lens.
    See also:
        `p_probe`, `name_algorithm`.
    Example:
        >>> from mechinterp import load
        >>> found = probe(load("softmax-h2-s0"), targets=["y", "read_out"], n_prompts=512)
        >>> r2 = found.probes["y"].r2
        >>> r2[0, 0] < 0.1, r2[1, 0] > 0.8, found.read_out.places
        (np.True_, np.True_, ['input', 'L0H0', 'L0H1', 'after L0'])
    """
    chosen, with_read_out = named_targets(targets)
    if with_read_out and (len(heads) or list(positions) != [-1]):
        raise ValueError(
            "targets: read_out has no masked heads and position -1 only; leave it out, as in targets='y'."
        )
    shared: dict = {"task": task, "n_prompts": n_prompts, "seed": seed}
    found: dict[str, LayerProbes] = {}
    if chosen:
        width = stream_width(source)
        drawn, _ = prompts_and_law(source, prompts, analysis="probe", fitted=width, **shared)
        for name, target in chosen.items():
            found[name] = _layer_probes(source, drawn, name, target, heads, positions)
    return Probing(found, read_out_at_places(source, prompts, **shared) if with_read_out else None)


def _layer_probes(
    source: Source,
    prompts: Prompts,
    name: str,
    target: Target,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> LayerProbes:
    """Probes of one target."""
    values = values_of(name, target, prompts)
    noisy, clean = (each.double().numpy(force=True) for each in values)
    places = _places(predictor_of(source), prompts, positions, noisy.shape[1])
    at = [place - noisy.shape[1] for place in places]
    streams = predictor_of(source).streams(prompts, heads=heads, positions=at)
    layers = streams.double().numpy(force=True)
    shuffled = np.random.default_rng(0).permutation(len(prompts))
    columns = []
    for layer in progress(range(len(layers)), "probing layers"):
        for column, place in enumerate(places):
            fitted, scored = noisy[:, place], clean[:, place]
            features = layers[layer, :, column]
            own, control = cross_validated_probe(features, fitted, fitted[shuffled])
            control_r2 = control.scores(scored[shuffled])[2:]
            columns.append([*own.scores(scored), *control_r2, own.penalty])
    shape = (len(layers), len(places))
    arrays = [np.array(values).reshape(shape) for values in zip(*columns, strict=True)]
    return LayerProbes(tuple(places), *arrays)


def _places(
    predictor: Predictor, prompts: Prompts, positions: Sequence[int], n_pos: int
) -> list[int]:
    """Positions from 0; refused if the model has other positions than the target and one is not the query's."""
    for position in positions:
        if not -n_pos <= position < n_pos:
            raise ValueError(f"positions must lie in 0 to {n_pos - 1}, got {position}.")
    places = [position % n_pos for position in positions]
    if set(places) != {n_pos - 1}:
        layers = range(predictor.n_layers + 1)
        lengths = {predictor.stream(prompts[:1], layer).shape[1] for layer in layers}
        if lengths != {n_pos}:
            got = ", ".join(map(str, sorted(lengths)))
            raise ValueError(
                f"Only position -1, the query's, can be probed: the model must have {n_pos} positions like the "
                f"target, got {got}."
            )
    return places
