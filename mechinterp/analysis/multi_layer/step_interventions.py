"""Interventions on what the stream holds at the query, by what the fitted algorithm says of it.

A layer's whole addition at the query is replaced by the algorithm's step, or what the algorithm says is
held there is exchanged between prompts; if the model carries out the algorithm, its predictions follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.learners.nearest import NEAR
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.step_effects import QueryRun, held, step_image
from mechinterp.analysis.stats import r2_and_sem
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.given import PromptsTask
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.run.evaluation import require_number
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.task import task_for

ALL = "all layers"
PROMPTS = 16
"""Place of the prompts among those of a seed, behind all that `name_algorithm` draws."""
PARTS = 8
"""Parts of the prompts of a fit that are left out in turn, for the error that is due to the fit (jackknife)."""


@dataclass(frozen=True, eq=False, repr=False)
class StepInterventions(Result):
    """How much of the prediction follows the fitted algorithm when what is held at the query is set."""

    algorithm: str
    """Label of the algorithm whose steps are put in."""
    layers: tuple[str, ...]
    """Each layer, from 0, and "all layers"."""
    replaced_r2: Float[np.ndarray, " intervention"]
    """R^2 of the prediction on that of the untouched model, with what the layer adds at the query
    replaced by a linear image of the algorithm's step, fitted on other prompts."""
    replaced_r2_sem: Float[np.ndarray, " intervention"]
    control_r2: Float[np.ndarray, " intervention"]
    """The same with the step of another prompt."""
    control_r2_sem: Float[np.ndarray, " intervention"]
    exchanged_r2: Float[np.ndarray, " layer"]
    """R^2 of the change of the prediction on the one expected, where the prediction so far, as the
    algorithm has it after the layer, is exchanged with that of another prompt."""
    exchanged_r2_sem: Float[np.ndarray, " layer"]
    """Standard error of `exchanged_r2`. The error of the image of the prediction in the stream, which is fitted on other
    prompts, is in it. Where that image is right but for this error the spread is 0.7 (1 / sqrt(2)) of the standard error,
    as R^2 is at its maximum."""
    n_prompts: int

    def __repr__(self) -> str:
        last, sem = self.replaced_r2[-1], self.replaced_r2_sem[-1]
        return (
            f"StepInterventions(steps of {self.algorithm} in place of all layers: R² {last:.3f} ± "
            f"{sem:.1g}, of another prompt's {self.control_r2[-1]:.3f})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per layer, and one for all."""
        frame = frame_of(self, *with_sem("replaced_r2", "control_r2"), layer=self.layers)
        exchanged = ("exchanged_r2", "exchanged_r2_sem")
        return frame.assign(**{name: [*getattr(self, name), np.nan] for name in exchanged})

    def plot(self) -> go.Figure:
        """R^2 after replacing each layer, and all."""
        return figures.bars(
            list(self.layers),
            {
                "the algorithm's step": (self.replaced_r2, self.replaced_r2_sem),
                "another prompt's": (self.control_r2, self.control_r2_sem),
            },
            title=f"The prediction with steps of {self.algorithm} in place of what layers add",
            y_title="R² on the untouched model",
        )


@torch.inference_mode(False)  # algorithms are fitted by gradients, which may be off
def intervene_on_steps(
    source: Source,
    evidence: AlgorithmEvidence | None = None,
    *,
    prompts: Prompts | None = None,
    task: TaskLike | None = None,
    n_prompts: int = 256,
    seed: int = 0,
) -> StepInterventions:
    """What the predictions become when steps of the algorithm stand in for layers.

    Only the stream at the query is set; a query is no key of later layers, so that all it changes is
    its own prediction. Linear images are fitted on the even prompts, effects measured on the odd ones.

    Args:
        evidence: What `name_algorithm` says of the model; None: it is asked, with the same task,
            number of prompts and seed.
        prompts: Given prompts, for the evidence too; None: they are drawn.
        task: Law of the prompts; None: the model's own, of given prompts not known.
        seed: Seed of the prompts, which are others than those of the evidence with the same seed.
    Raises:
        ValueError: If there is no task, what the layers put out is not the stream, or no algorithm with a path comes near.
    Source:
        After the interchange interventions of Geiger et al. 2021, arXiv 2106.02997.
    See also:
        `name_algorithm`, `read_out_by_layer`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> found = intervene_on_steps(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128)
        >>> found.replaced_r2.round(6).tolist()
        [1.0, 1.0, 1.0]
    """
    predictor = predictor_of(source)
    task = task_for(predictor, task, "intervene_on_steps", prompts)
    if prompts is not None:
        n_prompts = len(prompts)
    # Images of the prediction so far, of x as changed and of x, fitted to half of the prompts.
    require_number(n_prompts, 2 * (task.d_y + 2 * task.d_x))
    if isinstance(task, PromptsTask):
        prompts = task.prompts.to(torch.float64)
    else:
        generator = generator_for(seed, "eval", PROMPTS)
        prompts = sample_prompts(task, n_prompts, generator=generator, dtype=torch.float64)
    streams = predictor.streams(prompts)[:, :, -1].cpu().double()
    if evidence is None:
        evidence = name_algorithm(predictor, task=task, n_prompts=n_prompts, seed=seed)
    algorithm, scalars = _path_of(evidence)
    states = held(algorithm, scalars, prompts, task, predictor.n_layers)
    run = QueryRun.of(predictor.hooked, prompts[1::2])
    full, layers = run.predictions([]), range(predictor.n_layers)
    steps = [step_image(states, streams, layer) for layer in layers]
    chosen = [*([layer] for layer in layers), list(layers)]
    own = [r2_and_sem(run.replaced(each, steps), full) for each in chosen]
    others = [step.roll(1, 0) for step in steps]
    control = [_r2_of_pairs(run.replaced(each, others), full) for each in chosen]
    swapped = [_exchange_r2(run, states, streams, prompts.x_query, layer, full) for layer in layers]
    return StepInterventions(
        algorithm=str(algorithm.label),
        layers=(*map(str, layers), ALL),
        replaced_r2=np.array([r2 for r2, _ in own]),
        replaced_r2_sem=np.array([sem for _, sem in own]),
        control_r2=np.array([r2 for r2, _ in control]),
        control_r2_sem=np.array([sem for _, sem in control]),
        exchanged_r2=np.array([r2 for r2, _ in swapped]),
        exchanged_r2_sem=np.array([sem for _, sem in swapped]),
        n_prompts=len(prompts),
    )


def _path_of(evidence: AlgorithmEvidence) -> tuple[Algorithm, Float[np.ndarray, " scalar"]]:
    """The algorithm of the label, else the one whose path is nearest, and the scalars of its path.

    Raises:
        ValueError: If none comes near, or the path is not known.
    """
    least = np.nan_to_num(evidence.path_r2.min(1), nan=-np.inf)
    best = int(least.argmax())
    if evidence.mechanism in evidence.members:
        best = evidence.members.index(evidence.mechanism)
    if not least[best] >= NEAR:
        raise ValueError(
            "intervene_on_steps needs a model near to an algorithm with a path, got "
            f"{evidence.label}."
        )
    return evidence.measured.members[best], evidence.path_scalars[best]


def _exchange_r2(
    run: QueryRun,
    states: Sequence[Tensor],
    streams: Float[Tensor, "layer prompt d_model"],
    x: Float[Tensor, "prompt d_x"],
    layer: int,
    full: Float[Tensor, "half d_y"],
) -> tuple[float, float]:
    """Of the change where the prediction so far is that of the prompt before."""
    after, d_y = states[layer + 1], full.shape[1]
    so_far = after[1::2, :d_y]
    if so_far.abs().max() == 0:  # The algorithm has predicted nothing yet.
        return float("nan"), float("nan")
    expected = so_far.roll(1, 0) - so_far
    # With x beside it, as the stream holds that too.
    features, stream = torch.cat([after, x], dim=1)[::2], streams[layer + 1, ::2]

    def measured(fitted: Bool[Tensor, " half"]) -> tuple[float, float]:
        image = torch.linalg.lstsq(features[fitted], stream[fitted], driver="gelsd").solution
        found = run.predictions(run.shifted(layer + 1, expected @ image[:d_y])) - full
        return _r2_of_pairs(found, expected)

    part = torch.arange(len(features)) % PARTS
    r2, sem = measured(part >= 0)
    without = np.array([measured(part != each)[0] for each in range(PARTS)])
    return r2, float(np.hypot(sem, without.std() * (PARTS - 1) ** 0.5))


def _r2_of_pairs(
    predicted: Float[Tensor, "half d_y"], expected: Float[Tensor, "half d_y"]
) -> tuple[float, float]:
    """`r2_and_sem` where a row depends on its prompt and on the one before, so that it correlates with the next row."""
    errors, squares = (each.square().mean(1).numpy() for each in (predicted - expected, expected))
    unexplained = errors.mean() / squares.mean()
    left = errors - unexplained * squares
    variance = (left * (left + 2 * np.roll(left, 1))).mean() / len(left)
    return float(1 - unexplained), float(max(variance, 0) ** 0.5 / squares.mean())
