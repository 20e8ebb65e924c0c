"""Linear probes of the response and of structures after each layer, and P-probing: descent on a
layer's features.

If the first layer reweights covariates as Algorithm 1 does, then a few steps of descent on its
output get further than on the raw x. The step size is 1 / lambda_max of each prompt for every
curve, so that the comparison is fair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import cell, digits
from mechinterp.analysis.probing.descent_curves import DescentCurves, descent_curves
from mechinterp.analysis.probing.linear import (
    PENALTIES,
    STRUCTURES,
    LayerProbes,
    affine,
    fit_ridge,
    probe_layers,
    reweighted,
)
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import halves
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

VARIANTS = ("query", "map")
RAW, IDEAL = "raw x", "reweighted x"
AFTER = "after layer 0"
STEPS = 32
"""Default number of descent steps."""


@dataclass(frozen=True, eq=False, repr=False)
class Probing(Result):
    """Probes of the stream after each layer; with P-probing, also descent on the features after the first layer."""

    response: LayerProbes
    structures: Mapping[str, LayerProbes]
    """Probes of possible outputs of a first layer, by name."""
    descent: DescentCurves | None = None
    """Descent on the features after the first layer; None unless P-probing was asked for."""

    def __repr__(self) -> str:
        descent = "" if self.descent is None else f", {self.descent!r}"
        return f"Probing({self.response!r}{descent})"

    @property
    def probes(self) -> dict[str, LayerProbes]:
        """Probes of the response and of the structures, by target."""
        return {"response": self.response, **self.structures}

    @property
    def target(self) -> tuple[str, ...]:
        """Target of a probe: the response; x reweighted, times the context's correlations with y
        (Algorithm 1); x preconditioned, (S - 1) x with the context's covariance S."""
        return tuple(self.probes)

    def sentences(self) -> list[str]:
        """R² of the response and of each structure."""
        risks = ", ".join(map(digits, self.response.risk[:, -1]))
        last = len(self.response.risk) - 1
        read = [
            f"{name} with R² {', '.join(map(cell, probes.r2[:, -1]))} (control, targets of other prompts: at most "
            f"{digits(max(0.0, float(probes.control_r2[:, -1].max())))})"
            for name, probes in self.structures.items()
        ]
        return [
            f"A linear probe of the stream at the query predicts the response with an excess risk of {risks} y² after 0 "
            f"to {last} layers.",
            f"Possible outputs of a first layer, read at the same place: {'; '.join(read)}.",
            *([] if self.descent is None else self.descent.sentences()),
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per target, layer and position."""
        frames = {name: each.to_frame() for name, each in self.probes.items()}
        return pd.concat(frames, names=["target"]).reset_index("target").reset_index(drop=True)

    def tables(self) -> dict[str, Table]:
        """Tables of the probes by target, then of descent on the features."""
        title = "Read from the stream at the query; control r2: probe fitted to targets of other prompts"
        probes = Table(self.to_frame(), title, per="target", quiet=("pos", "penalty"))
        return {"probes": probes, **({} if self.descent is None else self.descent.tables())}

    def figures(self) -> dict[str, go.Figure]:
        """R^2 and excess risk of the probes, then descent."""
        descent = {} if self.descent is None else self.descent.figures()
        return {"probe_r2": self.plot_r2(), "probe_risk": self.plot(), **descent}

    def to_document(self) -> dict:
        """Fields of the JSON document."""
        frame = self.to_frame()
        document = {
            "response": records(self.response.to_frame()),
            "structure": records(frame[frame["target"] != "response"]),
        }
        if self.descent is not None:
            document["descent"] = records(self.descent.to_frame())
            document["areas"] = records(self.descent.area_frame())
        return document

    def plot(self) -> go.Figure:
        """Excess risk of the probe of the response after each layer."""
        return self.response.plot()

    def plot_r2(self) -> go.Figure:
        """R^2 of each probe after each layer, with its control."""
        return figures.lines(
            np.arange(len(self.response.risk)),
            {
                f"{name}{of}": (getattr(each, r2)[:, -1], getattr(each, f"{r2}_sem")[:, -1])
                for name, each in self.probes.items()
                for r2, of in (("r2", ""), ("control_r2", ", control"))
            },
            title="R² of linear probes of the stream at the query",
            x_title="layers run",
            y_title="R²",
            zero_line=True,
        )


def probe(
    source: Source,
    prompts: Prompts | None = None,
    *,
    p_probe: bool = False,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Probing:
    """Linear probes of the response and of possible outputs of a first layer, after each layer.

    Probes are ridge regressions on the stream at the query. Each is fitted to four fifths of the
    prompts and scored on the other fifth, for several penalties, of which the best is used. R² is 1
    minus squared error / mean square of the target without noise. A control is fitted to the
    targets of other prompts: it shows what a probe finds by chance.

    Args:
        p_probe: True: also descent on the features after the first layer, as in `p_probe`.
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are too few prompts for the features.
    See also:
        `probe_layers`, `p_probe`.
    Example:
        >>> from mechinterp import load
        >>> list(probe(load("checkpoints/softmax-h2-s0"), n_prompts=64).structures)
        ['reweighted x', 'preconditioned x']
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    response = probe_layers(source, prompts, progress=progress)
    structures = {
        name: probe_layers(source, prompts, target=target, progress=progress)
        for name, target in STRUCTURES.items()
    }
    if not p_probe:
        return Probing(response, structures)
    features = {AFTER: query_features(source, prompts, layer=1, progress=progress)}
    return Probing(response, structures, _descent(features, prompts, STEPS))


def p_probe(
    models: Mapping[str, Source] | Source,
    prompts: Prompts | None = None,
    *,
    layer: int = 1,
    variant: str = "query",
    steps: int = STEPS,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> DescentCurves:
    """Gradient descent on the stream of models after some layers, on raw x, and on reweighted x.

    Features of a context token must not contain its own response. "query" (variant B of our
    reading) runs every token as a query: without its response, after the same context. "map"
    (variant A) takes the tokens
    unchanged and maps them linearly to r_j x_j. The map is fitted on the first half of the
    prompts; all curves use the second half.

    Args:
        models: Models by name; or a single model, which gets the name "model".
        prompts: Prompts to use; None draws `n_prompts` of the first model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        layer: Number of layers run; 0 means the input.
        steps: Number of descent steps on (1/2L) sum_l (y_l - <u, phi_l>)^2, from zero.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no model, the variant is unknown, a model has fewer layers, `steps`
            is below 1, or the first half of the prompts does not have more tokens than a map has
            features.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, of which only the name and the aim are
        known to us. The variants are
        choices made here.
    See also:
        `probe_layers`.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> from mechinterp.models.hooked.transformer import ICLTransformer
        >>> task = TaskConfig(d_x=4, context_length=16)
        >>> weights = preprocess_then_optimise_model([0.5], d_x=4)
        >>> model = ICLTransformer.from_weights(weights, task=task)
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = sample_prompts(task, 64, generator=generator, dtype=torch.float64)
        >>> p_probe({"built": model}, prompts, steps=4).features
        ('raw x', 'reweighted x', 'built')
    """
    models = models if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise ValueError("p_probe needs at least one model, got none.")
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
    first = next(iter(models.values()))
    prompts = evaluation_prompts(first, prompts, n_prompts=n_prompts, seed=seed)
    if variant == "map":
        mapped = {name: _mapped(source, prompts, layer) for name, source in models.items()}
        return _descent(mapped, halves(prompts)[1], steps)
    features = {
        name: query_features(source, prompts, layer=layer, progress=progress)
        for name, source in models.items()
    }
    return _descent(features, prompts, steps)


def _descent(features: Mapping[str, Tensor], prompts: Prompts, steps: int) -> DescentCurves:
    """Descent on raw x, on reweighted x, and on the features of models."""
    raw = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    return descent_curves(
        {RAW: raw, IDEAL: reweighted(prompts)[0], **features}, prompts, steps=steps
    )


def query_features(
    source: Source,
    prompts: Prompts,
    *,
    layer: int,
    heads: Sequence[Head] = (),
    progress: ProgressCallback = no_progress,
) -> Float[Tensor, "batch pos d_model"]:
    """Stream after some layers, with every covariate of a prompt run as its query; the query's own
    comes last.

    Args:
        layer: Number of layers run.
        heads: Heads that are masked during the run.
        progress: Optional progress callback.
    Raises:
        ValueError: If the model has fewer layers.
    """
    return predictor_of(source).query_streams(prompts, layer, heads=heads, progress=progress)


def _mapped(source: Source, prompts: Prompts, layer: int) -> Float[Tensor, "batch pos d_x"]:
    """Stream of the second half of the prompts, mapped to r_j x_j by a map fitted on the first
    half."""
    predictor = predictor_of(source)
    fitted, measured = (
        predictor.stream(half, layer).double().numpy(force=True) for half in halves(prompts)
    )
    target = reweighted(halves(prompts)[0])[0].double().numpy(force=True)
    if fitted.shape[1] != target.shape[1]:
        raise ValueError(
            f"variant 'map' needs one position for each pair, got {fitted.shape[1]} for {target.shape[1]} pairs."
        )
    if (place := predictor.query_position(prompts, layer)) != -1:
        raise ValueError(f"variant 'map' needs the query at the last position, got it at {place}.")
    rows = fitted.reshape(-1, fitted.shape[2])
    if len(rows) <= rows.shape[1]:
        raise ValueError(
            f"A map of {rows.shape[1]} features needs more tokens than features for its fit; the first half of "
            f"{len(prompts)} prompts has {len(rows)}."
        )
    weights = fit_ridge(rows, target.reshape(len(rows), -1), PENALTIES[:1])[0]
    return torch.from_numpy(affine(measured, weights))
