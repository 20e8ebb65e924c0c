"""Linear probes of the stream after each layer: ridge regressions with held-out scores, targets of other prompts as a
control, and P-probing, gradient descent on the features of a layer.

If the first layer reweights covariates as Algorithm 1 does, then a few steps of descent on its output get further than
on the raw x. The step size is 1 / lambda_max of each prompt for every curve, so that the comparison is fair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import loss_and_r2, mean_and_sem
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Predictor, Source, predictor_of
from mechinterp.progress import progress

PENALTIES = (1e-8, 1e-6, 1e-4, 1e-2, 1e-1, 1.0)
FOLDS = 5

Target = Callable[[Prompts], tuple[Tensor, Tensor]]
"""Function from prompts to the values a probe is fitted to and the values it is scored against,
both [batch, pos, target]."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerProbes(Result):
    """Fit of a ridge regression on the stream to a target, layer by layer; layer 0 is the input."""

    positions: tuple[int, ...]
    """Positions in the prompt, from 0; the last position is the query's."""
    risk: Float[np.ndarray, "layer pos"]
    """Excess risk of the probe on held-out prompts: mean squared error against the target without
    noise."""
    risk_sem: Float[np.ndarray, "layer pos"]
    r2: Float[np.ndarray, "layer pos"]
    """1 - excess risk / mean square of the target without noise."""
    r2_sem: Float[np.ndarray, "layer pos"]
    control_r2: Float[np.ndarray, "layer pos"]
    """`r2` of a control that is fitted to the targets of other prompts, assigned at random."""
    control_r2_sem: Float[np.ndarray, "layer pos"]
    penalty: Float[np.ndarray, "layer pos"]
    """Penalty with the smallest cross-validated error, in units of the features' mean square."""

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
        return figures.lines(
            np.arange(len(self.risk)),
            figures.named(names, self.risk.T, self.risk_sem.T),
            title="Error of a linear probe of the stream, before each layer and at the end",
            x_title="layers run",
            y_title="excess risk (y²)",
            log_y=True,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Probing(Result):
    """Probes of the stream after each layer, for several targets."""

    probes: Mapping[str, LayerProbes]
    """Probes by target: the response, then possible outputs of a first layer."""

    def __repr__(self) -> str:
        r2 = [
            f"{name} {' '.join(map(cell, probes.r2[:, -1]))} (control {cell(probes.control_r2[:, -1].max())})"
            for name, probes in list(self.probes.items())[1:]
        ]
        return f"Probing({self.probes['response']!r}; R² of {', '.join(r2)})"

    @property
    def target(self) -> tuple[str, ...]:
        """Target of a probe: the response; x reweighted, times the context's correlations with y
        (Algorithm 1); x preconditioned, (S - 1) x with the context's covariance S."""
        return tuple(self.probes)

    def to_frame(self) -> pd.DataFrame:
        """One row per target, layer and position."""
        frames = {name: each.to_frame() for name, each in self.probes.items()}
        return pd.concat(frames, names=["target"]).reset_index("target").reset_index(drop=True)

    def tables(self) -> dict[str, Table]:
        """One table per target."""
        title = "Read from the stream at the query; control r2: probe fitted to targets of other prompts"
        return {"probes": Table(self.to_frame(), title, per="target", quiet=("pos", "penalty"))}

    def figures(self) -> dict[str, go.Figure]:
        """R² of all probes, and the excess risk of the probe of the response."""
        return {"probe_r2": self.plot_r2(), "probe_risk": self.plot()}

    def to_document(self) -> dict:
        """Rows of the response, and rows of the other targets."""
        frame = self.to_frame()
        return {
            "response": records(self.probes["response"].to_frame()),
            "structure": records(frame[frame["target"] != "response"]),
        }

    def plot(self) -> go.Figure:
        """Excess risk of the probe of the response after each layer."""
        return self.probes["response"].plot()

    def plot_r2(self) -> go.Figure:
        """R² of each probe after each layer, with its control."""
        return figures.lines(
            np.arange(len(self.probes["response"].risk)),
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


def responses(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Response at each position: with noise to fit to, and without noise (if known) to score
    against."""
    noisy = torch.cat([prompts.y, prompts.y_query[:, None]], dim=1)
    context = prompts.y if prompts.beta is None else prompts.x @ prompts.beta
    clean = torch.cat([context, prompts.y_query_clean[:, None]], dim=1)
    return noisy, clean


def reweighted(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Covariates of each position times the context's correlations, r_j x_j with r = (1/L) sum_l
    y_l x_l.

    With several responses, y is their mean. A preprocessing first layer (Algorithm 1) writes this.
    """
    correlations = (prompts.x.mT @ prompts.y / prompts.x.shape[1]).mean(2)
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    return x * correlations[:, None], x * correlations[:, None]


def preconditioned(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """(S - 1) x at each position, with the context's covariance S = (1/L) sum_l x_l x_l^T.

    A first layer that preconditions the descent of later layers without using y writes this.
    """
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    target = x @ (prompts.x.mT @ prompts.x / prompts.x.shape[1]) - x
    return target, target


STRUCTURES = {"reweighted x": reweighted, "preconditioned x": preconditioned}
"""Possible outputs of a first layer, as targets of a probe."""


def probe_layers(
    source: Source,
    prompts: Prompts | None = None,
    *,
    target: Target = responses,
    heads: Sequence[Head] = (),
    positions: Sequence[int] = (-1,),
    n_prompts: int | None = None,
    seed: int = 0,
) -> LayerProbes:
    """Ridge probes of the stream before each layer and after the last.

    Each probe is fitted to four fifths of the prompts and scored on the other fifth, for every
    penalty. The penalty with the smallest error against the fitted target is used.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        target: Target of the probe: `responses`, or one of `STRUCTURES`.
        heads: Heads that are masked during the run.
        positions: Positions of the target; -1 is the query's. A model without one position for each
            pair, such as one that reads x and y in turn, can be probed at -1 only.
    Raises:
        ValueError: If there are too few prompts for the features, a position is out of range, or
            the model has no hook on its last stream.
    Source:
        Alain and Bengio 2016, arXiv 1610.01644; Akyürek et al. 2023, arXiv 2211.15661, for
        in-context regression.
    See also:
        `read_out_by_layer`, `p_probe`.
    Example:
        >>> from mechinterp import load
        >>> probes = probe_layers(load("softmax-h2-s0"), n_prompts=512)
        >>> probes.r2[0, 0] < 0.1, probes.r2[1, 0] > 0.8
        (np.True_, np.True_)
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    noisy, clean = (tensor.double().numpy(force=True) for tensor in target(prompts))
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
            own, control = cross_validated(features, fitted, fitted[shuffled])
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


def probe(
    source: Source, prompts: Prompts | None = None, *, n_prompts: int | None = None, seed: int = 0
) -> Probing:
    """Linear probes of the response and of possible outputs of a first layer, after each layer.

    Probes are ridge regressions on the stream at the query. Each is fitted to four fifths of the
    prompts and scored on the other fifth, for several penalties, of which the best is used. R² is 1
    minus squared error / mean square of the target without noise. A control is fitted to the
    targets of other prompts: it shows what a probe finds by chance.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
    Raises:
        ValueError: If there are too few prompts for the features.
    See also:
        `probe_layers`, `p_probe`.
    Example:
        >>> from mechinterp import load
        >>> probe(load("checkpoints/softmax-h2-s0"), n_prompts=64).target
        ('response', 'reweighted x', 'preconditioned x')
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    targets = {"response": responses, **STRUCTURES}
    return Probing(
        {name: probe_layers(source, prompts, target=target) for name, target in targets.items()}
    )


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Ridge predictions for held-out prompts."""

    prediction: Float[np.ndarray, "prompt target"]
    target: Float[np.ndarray, "prompt target"]
    """Target that the regression was fitted to."""
    penalty: float
    """Penalty with the smallest held-out error, in units of the features' mean square."""
    root: Float[np.ndarray, "prompt feature"]
    """Root U of the hat matrix U U^T of a fit to all prompts."""
    freedom: float
    """Degrees of freedom of that fit: sum of the squared entries of its hat matrix."""

    def scores(
        self, clean: Float[np.ndarray, "prompt target"]
    ) -> tuple[float, float, float, float]:
        """Mean squared error and R² against a target without noise, each with its standard error.

        Both errors are over prompts and over the fit.
        """
        loss, loss_sem, r2, r2_sem = loss_and_r2(self.prediction, clean)
        fit, size = self.fit_sem(clean), np.square(clean).mean()
        return loss, float(np.hypot(loss_sem, fit)), r2, float(np.hypot(r2_sem, fit / size))

    def fit_sem(self, clean: Float[np.ndarray, "prompt target"]) -> float:
        """Standard deviation of the mean squared error over samples that is due to the fit."""
        # Let e = target - clean be noise, and d the part of the clean target that no linear map explains. With the hat
        # matrix h, a fit to the other prompts moves prediction i by sum_j h_ij (d_j + e_j). That adds to the sum of the
        # squared errors (d_i - move_i)^2, because h is a projection,
        #     sum_ij h_ij [(d_i + e_i)(d_j + e_j) - 2 d_i (d_j + e_j)] = sum_ij h_ij (e_i e_j - d_i d_j).
        # Different pairs i < j are uncorrelated, and so are pairs and the d_i^2, whose spread over prompts is counted
        # separately. The sum over pairs has the variance 2 sum_ij h_ij^2 (e_i^2 e_j^2 + d_i^2 d_j^2), and with
        # h = U U^T sum_ij h_ij^2 d_i^2 d_j^2 is the squared norm of U^T diag(d^2) U. One n of 1 / n^2 becomes n - p, the
        # degrees of freedom p, so that least squares is exact if d is the same for all prompts:
        # RSS n / (n - p)^2 has the relative variance 2 / (n - p) = 2 / n + 2 p / (n (n - p)).
        n_prompts, n_targets = clean.shape
        left = max(n_prompts - self.freedom, 1.0)
        pairs = self._pairs(self.target - clean) + self._pairs(self.prediction - clean)
        return float(np.sqrt(2 * pairs / (n_prompts * left)) / n_targets)

    def _pairs(self, values: Float[np.ndarray, "prompt target"]) -> float:
        """sum_ij h_ij^2 (v_i v_j)^2, v_i v_j being an inner product over targets."""
        sizes = np.square(values).sum(1)
        if not sizes.any():
            return 0.0
        # Inner products are taken as spread over the angles between targets as the covariance of all prompts says.
        spread = np.square(values.T @ values).sum() / sizes.sum() ** 2
        return float(spread * np.square(self.root.T @ (self.root * sizes[:, None])).sum())


def cross_validated(
    features: Float[np.ndarray, "prompt feature"], *targets: Float[np.ndarray, "prompt _"]
) -> list[HeldOut]:
    """Ridge predictions of each target: each fifth of the prompts is predicted from the other four.

    With fewer prompts than features, a large penalty wins.
    """
    fold_of, together = np.arange(len(features)) % FOLDS, np.hstack(targets)
    predictions = np.zeros((len(PENALTIES), *together.shape))
    for fold in range(FOLDS):
        seen, unseen = fold_of != fold, fold_of == fold
        for row, weights in enumerate(fit_ridge(features[seen], together[seen])):
            predictions[row, unseen] = features[unseen] @ weights[:-1] + weights[-1]
    centred = features - features.mean(0)
    values, vectors, size = _decomposed(centred)
    ends, held_out = np.cumsum([target.shape[1] for target in targets]), []
    for target, predicted in zip(targets, np.split(predictions, ends[:-1], axis=2), strict=True):
        best = int(np.square(predicted - target).mean((1, 2)).argmin())
        sizes = values + PENALTIES[best] * size
        freedom = float(np.square(values / sizes).sum())
        root = centred @ vectors / np.sqrt(sizes)
        held_out.append(HeldOut(predicted[best], target, PENALTIES[best], root, freedom))
    return held_out


def fit_ridge(
    features: Float[np.ndarray, "row feature"], targets: Float[np.ndarray, "row target"]
) -> list[Float[np.ndarray, "feature_and_one target"]]:
    """Weights for each of `PENALTIES`, with the constant in the last row; penalties are in units of
    the features' mean square.

    Example:
        >>> x = np.array([[0.0], [1.0], [2.0]])
        >>> fit_ridge(x, 3 * x + 1)[0].round(6).tolist()
        [[3.0], [1.0]]
    """
    centre, level = features.mean(0), targets.mean(0)
    # One decomposition serves all penalties.
    values, vectors, size = _decomposed(features - centre)
    moments = vectors.T @ ((features - centre).T @ (targets - level))
    fits = []
    for penalty in PENALTIES:
        weights = vectors @ (moments / (values + penalty * size)[:, None])
        fits.append(np.vstack([weights, level - centre @ weights]))
    return fits


def _decomposed(
    centred: Float[np.ndarray, "row feature"],
) -> tuple[Float[np.ndarray, " feature"], Float[np.ndarray, "feature feature"], float]:
    """Eigenvalues and eigenvectors of the Gram matrix of centred features, and the mean eigenvalue,
    the unit of penalties."""
    values, vectors = np.linalg.eigh(centred.T @ centred)
    return values.clip(min=0), vectors, max(float(values.mean()), np.finfo(float).tiny)


RAW, IDEAL = "raw x", "reweighted x"
"""Names of the features that every model is compared with."""


@dataclass(frozen=True, eq=False, repr=False)
class DescentCurves(Result):
    """Excess risk of gradient descent on several kinds of features of the same prompts, step by
    step."""

    features: tuple[str, ...]
    """Names of the features."""
    risk: Float[np.ndarray, "features step"]
    """Mean squared distance to the noise-free target after 0, 1, ... steps, unit y^2."""
    risk_sem: Float[np.ndarray, "features step"]
    log_area: Float[np.ndarray, " features"]
    """Mean over steps 1, 2, ... of log excess risk minus that of the first features; negative means
    faster."""
    log_area_sem: Float[np.ndarray, " features"]
    """Standard error of `log_area`, paired over prompts, by the delta method."""

    @property
    def least_risk(self) -> Float[np.ndarray, " features"]:
        """Smallest excess risk of the descent, unit y^2."""
        return self.risk.min(1)

    @property
    def at_step(self) -> Int[np.ndarray, " features"]:
        """Step with the smallest excess risk."""
        return self.risk.argmin(1)

    def __repr__(self) -> str:
        rows = zip(self.features, self.least_risk, self.at_step, strict=True)
        least = ", ".join(f"{name} {risk:.3g}@{step}" for name, risk, step in rows)
        areas = zip(self.features[1:], self.log_area[1:], self.log_area_sem[1:], strict=True)
        faster = ", ".join(f"{name} {with_error(*area)}" for name, *area in areas)
        return f"DescentCurves(least excess risk: {least}; log area: {faster})"

    def tables(self) -> dict[str, Table]:
        """Table of all steps, and table of what descent reaches on each kind of features."""
        title = (
            "Gradient descent on the features; log area: mean log risk minus that of the first row"
        )
        steps = Table(self.to_frame(), "Excess risk at every step", brief=False)
        return {"descent": steps, "areas": Table(self.area_frame(), title)}

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of features and step."""
        steps = range(self.risk.shape[1])
        return frame_of(self, *with_sem("risk"), features=self.features, step=steps)

    def area_frame(self) -> pd.DataFrame:
        """One row per kind of features: the smallest excess risk and the log area."""
        names = ("least_risk", "at_step", *with_sem("log_area"))
        return frame_of(self, *names, features=self.features)

    def plot(self) -> go.Figure:
        """Excess risk over steps, one curve per kind of features."""
        return figures.lines(
            np.arange(self.risk.shape[1]),
            figures.named(self.features, self.risk, self.risk_sem),
            title="Excess risk of gradient descent on the features of a layer",
            x_title="steps",
            y_title="excess risk (y²)",
            log_y=True,
        )


def p_probe(
    models: Mapping[str, Source] | Source,
    prompts: Prompts | None = None,
    *,
    layer: int = 1,
    steps: int = 32,
    n_prompts: int | None = None,
    seed: int = 0,
) -> DescentCurves:
    """Gradient descent on the stream of models after some layers, on raw x, and on reweighted x.

    Features of a context token must not contain its own response. So every token is run as a query:
    without its response, after the same context.

    Args:
        models: Models by name; or a single model, which gets the name "model".
        prompts: Prompts to use; None draws `n_prompts` of the first model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        layer: Number of layers run; 0 means the input.
        steps: Number of descent steps on (1/2L) sum_l (y_l - <u, phi_l>)^2, from zero.
    Raises:
        ValueError: If there is no model, a model has fewer layers, or `steps` is below 1.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, of which only the name and the aim are
        known to us; the features are a choice made here.
    See also:
        `probe_layers`.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> built = preprocess_then_optimise_model([0.5], d_x=4)
        >>> p_probe({"built": built}, n_prompts=64, steps=4).features
        ('raw x', 'reweighted x', 'built')
    """
    models = models if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise ValueError("p_probe needs at least one model, got none.")
    first = next(iter(models.values()))
    prompts = evaluation_prompts(first, prompts, n_prompts=n_prompts, seed=seed)
    features = {
        RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1),
        IDEAL: reweighted(prompts)[0],
    }
    for name, model in models.items():
        features[name] = predictor_of(model).query_streams(prompts, layer)
    return descent_curves(features, prompts, steps=steps)


def descent_curves(
    features: Mapping[str, Float[Tensor, "batch pos _feature"]], prompts: Prompts, *, steps: int
) -> DescentCurves:
    """Excess risk of gradient descent on features of the context; the last position holds the
    query's features.

    Raises:
        ValueError: If `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}.")
    n_responses, target = prompts.y.shape[2], prompts.to(torch.float64)
    squares = []
    for phi in features.values():
        columns = phi.double()[..., None].expand(-1, -1, -1, n_responses)
        path = descend(columns[:, :-1], target.y, columns[:, -1], steps=steps)
        squares.append(excess_risk(path, target).T.numpy(force=True))
    risk, risk_sem = mean_and_sem(np.stack(squares, 1))
    # d log(mean) = (value - mean) / mean, summed over steps.
    relative = np.stack([square[:, 1:] / square[:, 1:].mean(0) for square in squares], 1).mean(2)
    _, log_area_sem = mean_and_sem(relative - relative[:, :1])
    area = np.log(risk[:, 1:]).mean(1)
    return DescentCurves(tuple(features), risk, risk_sem, area - area[0], log_area_sem)
