"""Response of a learner to its prompt: how it weighs the directions, ages, similarity and order of the
pairs, which symmetries it keeps, and what none of these explain. It needs no hypothesis and gives no
label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp.analysis.response import figure, reading
from mechinterp.analysis.response.frames import FRAME_MEANINGS, OUTPUT, Frames, KindFrames
from mechinterp.analysis.response.measured import measured, measured_for_kind
from mechinterp.analysis.response.sample import Measuring
from mechinterp.analysis.result import Table
from mechinterp.config import TaskLike
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.predictor import Learner, Source

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
                known={**FRAME_MEANINGS[name], **OUTPUT},
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


@torch.inference_mode(False)  # weights of pairs are gradients
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
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> found = response(
        ...     partial(vanilla_gd, eta=0.8), task=TaskConfig(d_x=3, context_length=12), n_prompts=256
        ... )
        >>> found.reading, found.filter.phi.round(6).unique().tolist()
        ('no interaction', [0.8])
    """
    _require_arguments(by, coordinates, trim)
    setting = _setting(source, prompts, task, n_prompts, seed, trim, by, coordinates, layers)
    prompts = setting.prompts
    outputs = [measured(setting, output) for output in range(prompts.y.shape[2])]
    frames = _joined([each.frames for each in outputs])
    return Response(
        **frames,
        by_gradient=setting.by_gradient,
        sums_follow_law=setting.sums_follow_law,
        coordinates=outputs[0].root,
        context_length=prompts.x.shape[1],
        n_prompts=len(prompts),
        uses_sparsity=reading.uses_sparsity(setting.law, frames["symmetries"]),
        notes=tuple(dict.fromkeys(note for each in outputs for note in each.notes)),
    )


@torch.inference_mode(False)
def kind_frames(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int = 1024,
    seed: int = 0,
    trim: float = 0.0,
) -> KindFrames:
    """The part of a response from which the class of the learner follows, in about half the time; arguments are those
    of `response`.

    Example:
        >>> from functools import partial
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> learner = partial(vanilla_gd, eta=0.8)
        >>> reading.kind(kind_frames(learner, task=TaskConfig(d_x=3, context_length=12)))
        'no interaction'
    """
    setting = _setting(source, prompts, task, n_prompts, seed, trim)
    _, context_length, n_outputs = setting.prompts.y.shape
    frames = _joined([measured_for_kind(setting, output) for output in range(n_outputs)])
    return KindFrames(
        **frames, sums_follow_law=setting.sums_follow_law, context_length=context_length
    )


def _setting(
    source: Source | Learner,
    prompts: Prompts | None,
    task: TaskLike | None,
    n_prompts: int,
    seed: int,
    trim: float,
    by: str = "auto",
    coordinates: str | Float[np.ndarray, "d_x d_x"] | None = "auto",
    layers: bool = False,
) -> Measuring:
    """Model, prompts and settings of a response."""
    prompts, law = prompts_and_law(
        source, prompts, analysis="response", task=task, n_prompts=n_prompts, seed=seed
    )
    return Measuring.of(source, _trimmed(prompts, trim), law, by, coordinates, layers, seed)


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


def _joined(outputs: Sequence[Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Frames of all responses by name; with several, a last column `output`."""
    if len(outputs) == 1:
        return dict(outputs[0])
    return {
        name: pd.concat(
            [frames[name].assign(output=n) for n, frames in enumerate(outputs)], ignore_index=True
        )
        for name in outputs[0]
    }
