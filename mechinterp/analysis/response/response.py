"""Response of a learner to its prompt: how it weighs the directions, ages, similarity and order of the
pairs, which symmetries it keeps, and what none of these explain. It needs no hypothesis and gives no
label.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp.analysis.response import figure, measures, reading
from mechinterp.analysis.response.beside import bayes_of, learners_beside
from mechinterp.analysis.response.frames import MEANINGS, OUTPUT, Estimate, Frames
from mechinterp.analysis.response.pair_weights import function_of, pair_weights, values
from mechinterp.analysis.response.projection import (
    GROUPS,
    FewPromptsError,
    Projection,
    PromptArrays,
    jackknife,
    solve,
    spline,
)
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import require_moderate
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.predictor import Learner, Source, is_learner, predictor_of

LEAST_DISTINCT = 2 * GROUPS
"""Smallest number of distinct prompts: two in each group of the jackknife."""
LEAST_EFFECTIVE = 30
"""Smallest effective number of prompts, (sum f^2)^2 / sum f^4. Below it a few prompts decide all numbers."""
SWAPPED, SYMMETRIC = 128, 512
"""Number of prompts for the order of the pairs, and for the symmetries."""
ROTATED = 0.01
"""Mismatch under a rotation of x above which other coordinates are looked for."""
MOST_COORDINATES = 16
"""Largest d_x at which other coordinates are looked for, as M has d_x^2 entries."""
LEAST_NOISE = 1e-6
"""Smallest noise of the metric of y given x, as a fraction of E y^2."""
WAYS = ("auto", "gradient", "predictions")


@dataclass(frozen=True, eq=False, repr=False)
class Response(Frames, Result):
    """Measurements of what a learner does with its prompt, each with its standard error.

    Frames of a task with several responses have a last column `output`.
    """

    def __repr__(self) -> str:
        return f"Response({reading.summary(self)})"

    @property
    def reading(self) -> str:
        """Class of learner: batch, online, no interaction, recursive least squares, kernel, or no linear map."""
        return reading.kind(self)

    @property
    def headline(self) -> str:
        """The reading and the smallest form of the filter that fits."""
        return reading.headline(self)

    def sentences(self) -> list[str]:
        """Summary, excess over the Bayes learner, and what was not measured."""
        return reading.sentences(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per scalar: name, value, sem."""
        return self.scalars.copy()

    def tables(self) -> dict[str, Table]:
        """All frames; the scalars first."""
        titles = {
            "scalars": "Numbers of the response",
            "filter": "Weight of directions",
            "forms": "Part left by each form of the filter",
            "left": "Part left as columns are added",
            "symmetries": "Symmetries",
            "position": "Weight of pairs by age",
            "similarity": "Weight of pairs by similarity",
            "order": "Effect of one pair on another's weight",
        }
        brief = ("scalars", "forms", "left", "symmetries")
        return {
            f"response_{name}": Table(
                getattr(self, name).copy(),
                title,
                brief=name in brief,
                known={**MEANINGS[name], **OUTPUT},
            )
            for name, title in titles.items()
        }

    def plot(self, beside: Sequence["Response"] = (), names: Sequence[str] = ()) -> go.Figure:
        """Filter, ages, order and left part of this model, and of others beside it.

        Args:
            beside: Responses of further models, one column of panels for each.
            names: Names of the models, this one first.
        """
        return figure.panels([self, *beside], names)

    def figures(self) -> dict[str, go.Figure]:
        """The panels, the filter after each layer with a slider if it was asked for, similarity and symmetries."""
        shown = {"response": self.plot()}
        if "layer" in self.filter:
            shown["response_layers"] = figure.filter_by_layer(self)
        return shown | {
            "response_similarity": figure.similarity(self),
            "response_symmetries": figure.symmetries(self),
        }


def response(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int = 1024,
    seed: int = 0,
    layers: bool = False,
    by: str = "auto",
    coordinates: str | Float[np.ndarray, "d_x d_x"] | None = "auto",
    trim: float = 0.0,
) -> Response:
    """Response of a model to its prompts, measured without a hypothesis.

    f is the prediction at the query q, S = X^T X / L has eigenvalues s_k and eigenvectors v_k, and
    a_j = df/dy_j is the weight of pair j. Measured are the filter phi of
    f = sum_k phi(s_k) <v_k, q> <v_k, X^T y / L>, the weight of a pair by age and by similarity, the effect
    of one pair on the weight of another, symmetries, and the part of f that is left.

    Args:
        source: A checkpoint, a hooked model or module, weights, or a function of prompts.
        prompts: Given prompts; None draws them.
        task: Law of the prompts; None means the model's own.
        layers: True: also the filter after each layer, by the model's own read-out.
        by: "gradient" projects df/dy, which is exact if y given x is Gaussian; "predictions" projects
            f; "auto" takes gradients for Gaussian tasks.
        coordinates: "auto" looks for coordinates of x if a rotation of x changes predictions; None
            keeps those of x; a matrix R measures in R x.
        trim: Fraction of the prompts that is left out, those with the largest eigenvalue of S.
    Raises:
        ValueError: If there are fewer than 64 distinct or 30 effective prompts, predictions
            overflow, or an argument is not one of the above.
    Source:
        Derived here; Stein's lemma gives the projection by gradients.
    See also:
        `name_algorithm`, `compare_learners`.
    Example:
        >>> from functools import partial
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> found = response(
        ...     partial(vanilla_gd, eta=0.8), task=TaskConfig(d_x=3, context_length=12), n_prompts=256
        ... )
        >>> found.reading, found.filter.phi.round(6).unique().tolist()
        ('no interaction', [0.8])
    """
    _require_arguments(by, coordinates, trim)
    prompts, law = prompts_and_law(
        source, prompts, analysis="response", task=task, n_prompts=n_prompts, seed=seed
    )
    prompts = _trimmed(prompts, trim)
    setting = _Setting.of(source, prompts, law, by, coordinates, layers, seed)
    outputs = [_measured(setting, output) for output in range(prompts.y.shape[2])]
    frames = {name: _joined([each.frames[name] for each in outputs]) for name in outputs[0].frames}
    return Response(
        **frames,
        by_gradient=setting.by_gradient,
        sums_follow_law=setting.by_gradient or setting.drifts,
        coordinates=outputs[0].root,
        context_length=prompts.x.shape[1],
        n_prompts=len(prompts),
        uses_sparsity=reading.uses_sparsity(law, frames["symmetries"]),
        notes=tuple(dict.fromkeys(note for each in outputs for note in each.notes)),
    )


def _require_arguments(by: str, coordinates: object, trim: float) -> None:
    if by not in WAYS:
        raise ValueError(f"by must be one of {', '.join(WAYS)}, got {by!r}.")
    if isinstance(coordinates, str) and coordinates != "auto":
        raise ValueError(f"coordinates must be 'auto', None or a matrix, got {coordinates!r}.")
    if not 0 <= trim < 1:
        raise ValueError(f"trim must lie in [0, 1), got {trim}.")


def _trimmed(prompts: Prompts, trim: float) -> Prompts:
    """The prompts without the fraction with the largest eigenvalue of S. Predictions play no part."""
    if not trim:
        return prompts
    largest = torch.linalg.matrix_norm(prompts.x.double(), ord=2)
    return prompts[largest <= largest.quantile(1 - trim)]


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Frames of all responses; with several, a last column `output`."""
    if len(frames) == 1:
        return frames[0]
    return pd.concat([f.assign(output=n) for n, f in enumerate(frames)], ignore_index=True)


@dataclass(frozen=True, eq=False)
class _Setting:
    """Model, prompts and settings that all measurements of a response share."""

    source: Source
    function: Learner
    prompts: Prompts
    group: np.ndarray
    """Group of each prompt."""
    law: TaskConfig | None
    bayes: Learner | None
    by_gradient: bool
    drifts: bool
    """True: Gaussian task vectors that change from pair to pair, and one noise level."""
    coordinates: str | np.ndarray | None
    n_layers: int
    """Number of layers after which the filter is measured; 0 without them."""
    descents: int
    """Number of steps of the descent beside the model."""
    seed: int

    @classmethod
    def of(
        cls,
        source: Source | Learner,
        prompts: Prompts,
        law: TaskConfig | None,
        by: str,
        coordinates: str | np.ndarray | None,
        layers: bool,
        seed: int,
    ) -> "_Setting":
        function = function_of(source)
        depth = 1 if is_learner(source) else predictor_of(source).n_layers
        # The metric of the gradients is that of Gaussian y given x with one task vector and one noise level.
        normal = (
            law is not None
            and law.n_tasks is None
            and law.sparsity is None
            and len(law.noise_levels) == 1
        )
        gaussian = normal and law is not None and law.drift == 1
        return cls(
            source=source,
            function=function,
            prompts=prompts,
            group=_groups(prompts),
            law=law,
            bayes=None if law is None else bayes_of(law),
            by_gradient=gaussian if by == "auto" else by == "gradient",
            drifts=normal and not gaussian,
            coordinates=coordinates,
            n_layers=depth if layers else 0,
            descents=depth,
            seed=seed,
        )


def _groups(prompts: Prompts) -> np.ndarray:
    """Group of each prompt.

    Raises:
        FewPromptsError: If there are fewer than 64 prompts.
    """
    n = len(prompts)
    if n < LEAST_DISTINCT:
        raise FewPromptsError(
            f"response needs {LEAST_DISTINCT} distinct prompts (n_prompts), got {n}."
        )
    return np.arange(n) % GROUPS


@dataclass(frozen=True, eq=False)
class _Measured:
    """Frames of one response."""

    frames: dict[str, pd.DataFrame]
    root: np.ndarray | None
    notes: list[str]


def _sample(
    setting: _Setting, function: Learner, output: int, *, weights: bool = True
) -> PromptArrays:
    """Prompts as arrays with the predictions of a function and the weights of the pairs."""
    prompts, law = setting.prompts, setting.law
    y = prompts.y[..., output].double().numpy(force=True)
    if not prompts.x.any():
        raise ValueError("response needs an x other than 0 among the pairs, got 0 alone.")
    f = values(function, prompts, output)
    require_moderate(torch.from_numpy(f))
    size = float(np.square(y).mean())
    noise = 0.0 if law is None else law.noise_variance
    x = prompts.x.double().numpy(force=True)
    noise_var = max(noise, LEAST_NOISE * size)
    return PromptArrays(
        x=x,
        y=y,
        x_query=prompts.x_query.double().numpy(force=True),
        f=f,
        odd=(f - values(function, replace(prompts, y=-prompts.y), output)) / 2,
        a=pair_weights(function, prompts, output) if weights else np.zeros_like(y),
        group=setting.group,
        beta_var=max(size - noise_var, 0.0) / float(np.square(x).sum(2).mean()),
        noise_var=noise_var,
        by_gradient=setting.by_gradient and weights,
    )


def _measured(setting: _Setting, output: int) -> _Measured:
    """All frames of one response."""
    notes: list[str] = []
    plain = _sample(setting, setting.function, output)
    effective = _require_effective(plain.f)
    if not np.isfinite(plain.a).all():
        raise ValueError("Gradients with respect to y must be finite, got NaN or infinite ones.")
    symmetries = _symmetries(setting, output)
    root = _root(setting, plain, symmetries)
    sample = plain if root is None else measures.in_coordinates(plain, root)
    shrunk = measures.shrinkage(sample)
    phi, fit = measures.filter_frame(sample, shrunk)
    against = _against_bayes(setting, sample, root, phi.s.to_numpy(), fit, shrunk, output)
    position, alpha = measures.position_frame(sample)
    left = _left(setting, sample, shrunk, output)
    order = _order(setting, plain, root, output, notes)
    scalars = {
        "effective prompts": (effective, np.nan),
        "amplitude": shrunk.amplitude,
        "c": shrunk.c,
        "alpha": alpha,
        "mean of x": left.mean_of_x,
        "linear in y, no filter": left.linear,
        "disagreement": _disagreement(sample, fit, phi.s.to_numpy(), shrunk),
        **against.scalars,
    }
    if setting.law is None or setting.law.n_tasks is None:
        scalars["even in y"] = left.even
    if order is not None:
        scalars |= {"later": order.later, "earlier": order.earlier}
        online = order.earlier[0] < reading.ONLINE * order.later[0]
        scalars["eta"] = order.eta if online else (np.nan, np.nan)
        scalars["gate"] = _gate(alpha, order.eta) if online else alpha
    if setting.prompts.y.shape[2] > 1:
        scalars["cross"] = _cross(setting, plain, output)
    rows = [(name, *pair) for name, pair in scalars.items()]
    frames = {
        "symmetries": symmetries,
        "filter": _with_layers(setting, phi, against.phi, root, shrunk, output),
        "differences": against.differences,
        "beside": learners_beside(sample, phi.s.to_numpy(), setting.law, setting.descents),
        "forms": measures.forms_frame(sample, shrunk, fit),
        "position": position,
        "similarity": measures.similarity_frame(sample),
        "order": pd.DataFrame(columns=list(measures.ORDER_COLUMNS))
        if order is None
        else order.frame,
        "left": left.frame,
        "scalars": pd.DataFrame(rows, columns=["name", "value", "sem"]),
    }
    return _Measured(frames, root, notes)


def _require_effective(f: np.ndarray) -> float:
    """Effective number of prompts.

    Raises:
        FewPromptsError: If all predictions are 0, or fewer than 30 prompts are effective.
    """
    squares = np.square(f)
    if not squares.any():
        raise FewPromptsError("response needs predictions that are not all 0.")
    scaled = squares / squares.max()
    effective = float(scaled.sum() ** 2 / np.square(scaled).sum())
    if effective < LEAST_EFFECTIVE:
        raise FewPromptsError(
            f"response needs {LEAST_EFFECTIVE} effective prompts, (sum f^2)^2 / sum f^4, got "
            f"{effective:.1f}: a few prompts decide all numbers. Leave out those with the "
            "largest x by trim=0.05, or draw more (n_prompts=)."
        )
    return effective


def _symmetries(setting: _Setting, output: int) -> pd.DataFrame:
    few = slice(SYMMETRIC if setting.by_gradient else SWAPPED)
    functions = {"model": setting.function}
    if setting.bayes is not None:
        functions["bayes"] = setting.bayes
    with np.errstate(over="ignore", invalid="ignore"):
        return measures.symmetries_frame(
            functions, setting.prompts[few], setting.group[few], output, setting.seed
        )


def _root(setting: _Setting, sample: PromptArrays, symmetries: pd.DataFrame) -> np.ndarray | None:
    """Coordinates of x in which the filter is measured."""
    if not isinstance(setting.coordinates, str):
        given = setting.coordinates
        d_x = sample.x.shape[2]
        if given is not None and np.shape(given) != (d_x, d_x):
            raise ValueError(
                f"coordinates must be a matrix of shape [{d_x}, {d_x}], got {list(np.shape(given))}."
            )
        return given
    rotated = symmetries.set_index("symmetry").mismatch["rotation of x"]
    if rotated <= ROTATED or not 1 < sample.x.shape[2] <= MOST_COORDINATES:
        return None
    return measures.coordinates_of(sample)


@dataclass(frozen=True, eq=False)
class _Against:
    """The filter of the Bayes learner on the same prompts, and the model's difference from it."""

    phi: np.ndarray
    differences: pd.DataFrame
    scalars: dict[str, Estimate]


def _against_bayes(
    setting: _Setting,
    sample: PromptArrays,
    root: np.ndarray | None,
    knots: np.ndarray,
    fit: Projection,
    shrunk: measures.Shrinkage,
    output: int,
) -> _Against:
    """Filter of the Bayes learner, and the share of the excess risk that the difference explains."""
    if setting.bayes is None:
        nothing = pd.DataFrame(columns=["s", "difference", "difference_sem"], dtype=float)
        return _Against(np.full(len(knots), np.nan), nothing, {})
    bayes = _sample(setting, setting.bayes, output, weights=setting.by_gradient)
    bayes = bayes if root is None else measures.in_coordinates(bayes, root)
    own = measures.shrinkage(bayes)
    phi, theirs = measures.filter_frame(bayes, own, knots)
    # Each filter in its own basis: that of the model cannot follow the Bayes learner's at small s.
    value, sem = jackknife(
        lambda g, m, h, b: solve(g, m) - solve(h, b), fit.gram, fit.inner, theirs.gram, theirs.inner
    )
    modes = sample.modes
    gap = (
        spline(modes.s, knots, shrunk.c[0]) @ fit.coefficients()[0]
        - spline(modes.s, knots, own.c[0]) @ phi.phi.to_numpy()
    )
    by_filter = (gap * modes.query * modes.y).sum(1)
    excess = (sample.f - bayes.f) ** 2
    share = jackknife(measures.ratio, sample.sums(by_filter**2), sample.sums(excess))
    mean = jackknife(measures.ratio, sample.sums(excess), sample.sums(np.ones(len(excess))))
    return _Against(
        phi=phi.phi.to_numpy(),
        differences=pd.DataFrame({"s": knots, "difference": value, "difference_sem": sem}),
        scalars={
            "c of Bayes": own.c,
            "squared distance to Bayes": (float(mean[0]), float(mean[1])),
            "share of it in the filter": (float(share[0]), float(share[1])),
        },
    )


def _left(
    setting: _Setting, sample: PromptArrays, shrunk: measures.Shrinkage, output: int
) -> measures.Left:
    """Part left as columns are added, in the coordinates of the sample."""
    again, posterior = None, None
    if setting.prompts.knows_task_vectors and setting.by_gradient:
        other = replace(setting.prompts, y=measures.second_y(setting.prompts))
        again = pair_weights(setting.function, other, output)
    if setting.law is not None and setting.law.n_tasks is not None and setting.bayes is not None:
        posterior = values(setting.bayes, setting.prompts, output)
    return measures.left_of(sample, shrunk, again, posterior)


def _order(
    setting: _Setting, plain: PromptArrays, root: np.ndarray | None, output: int, notes: list[str]
) -> measures.Order | None:
    """Order of the pairs on a few prompts; None with a note if fresh pairs cannot be made."""
    if not setting.prompts.knows_task_vectors:
        notes.append(
            "The order of the pairs was not measured: the prompts have no task vectors (beta)."
        )
        return None
    if plain.x.shape[1] < 2:
        notes.append("The order of the pairs was not measured: there is one pair.")
        return None
    few = slice(SWAPPED)
    prompts = setting.prompts[few]
    chosen = plain.rows(np.arange(len(plain)) < SWAPPED)
    return measures.order_of(setting.function, prompts, chosen, root, output)


def _gate(alpha: Estimate, eta: Estimate) -> Estimate:
    """Gate of an online learner, alpha / (1 - eta), with the errors of both added in squares."""
    keep = 1 - eta[0]
    gate = alpha[0] / keep
    return gate, float(np.hypot(alpha[1] / keep, gate * eta[1] / keep))


def _cross(setting: _Setting, plain: PromptArrays, output: int) -> Estimate:
    """Part of the squared weights that falls on the other responses' y."""
    others = [n for n in range(setting.prompts.y.shape[2]) if n != output]
    squares = sum(
        np.square(pair_weights(setting.function, setting.prompts, output, of=n)).sum(1)
        for n in others
    )
    own = np.square(plain.a).sum(1)
    value, sem = jackknife(measures.ratio, plain.sums(squares), plain.sums(squares + own))
    return float(value), float(sem)


def _disagreement(
    sample: PromptArrays, fit: Projection, knots: np.ndarray, shrunk: measures.Shrinkage
) -> Estimate:
    """Root mean square, in standard errors, of the difference between phi by gradients and by predictions."""
    other = Projection.of_filters(
        replace(sample, by_gradient=not sample.by_gradient),
        spline(sample.modes.s, knots, shrunk.c[0]),
    )
    value, sem = jackknife(
        lambda g, i, h, j: solve(g, i) - solve(h, j), fit.gram, fit.inner, other.gram, other.inner
    )
    used = sem > 1e-9 * np.abs(fit.coefficients()[0]).max()
    if not used.any():
        return 0.0, np.nan
    return float(np.sqrt(np.square(value[used] / sem[used]).mean())), np.nan


def _with_layers(
    setting: _Setting,
    phi: pd.DataFrame,
    bayes: np.ndarray,
    root: np.ndarray | None,
    shrunk: measures.Shrinkage,
    output: int,
) -> pd.DataFrame:
    """The filter frame with the Bayes learner's; with layers, one block per layer and `layer` last."""
    frame = phi.assign(bayes=bayes)
    if not setting.n_layers:
        return frame
    blocks = []
    for layer in range(setting.n_layers):
        sample = _sample(setting, function_of(setting.source, layer + 1), output)
        sample = sample if root is None else measures.in_coordinates(sample, root)
        own = measures.shrinkage(sample)
        after, _ = measures.filter_frame(sample, own, phi.s.to_numpy())
        blocks.append(after.assign(bayes=bayes, layer=layer))
    return pd.concat(blocks, ignore_index=True)
