"""Interventions on the stream at the query, which put what a fitted algorithm holds there in place of what the model has.

The query is no key of later layers, so that a change of its stream changes its own prediction alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.stats import r2_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Hooks
from mechinterp.models.hooked.query_position import NoStreamError, query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.predictor import Predictor

PROMPTS = 512
"""Largest number of prompts; linear images are fitted to the even ones, effects are measured on the odd ones."""


@dataclass(frozen=True, eq=False)
class StepEffects:
    """Effects of the interventions on the prediction, by layer."""

    steps_r2: Float[np.ndarray, " layer"]
    """R² with the prediction of the model as it is, if a linear image of the algorithm's step replaces the layer's
    addition to the stream at the query."""
    steps_r2_sem: Float[np.ndarray, " layer"]
    exchanged_r2: Float[np.ndarray, " layer"]
    """R² of the change of the prediction with the expected one, if the algorithm's prediction after the layer is
    exchanged with that of another prompt; NaN if the algorithm predicts 0 there."""
    exchanged_r2_sem: Float[np.ndarray, " layer"]


def step_effects(
    predictor: Predictor,
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
) -> StepEffects | None:
    """Effects of the steps of an algorithm with fitted scalars; None if the stream cannot be set, or its linear images
    need more prompts."""
    prompts, d_y = prompts[:PROMPTS], task.d_y
    try:
        places = query_positions(predictor.hooked, prompts)
        streams = predictor.streams(prompts)[:, :, -1].cpu().double()
    except NoStreamError:
        return None
    held, x = states(algorithm, scalars, prompts, task, predictor.n_layers), prompts.x_query
    if len(prompts) < 4 * (held[0].shape[1] + task.d_x):
        return None
    known, rows = _predictions(predictor.hooked, prompts[1::2]), []
    for layer in range(predictor.n_layers):
        before, after = streams[layer : layer + 2, 1::2]
        step = _image(held[layer + 1] - held[layer], streams[layer + 1] - streams[layer])
        features = torch.cat([held[layer + 1], x], 1)  # the stream holds x, too
        so_far = held[layer + 1][1::2, :d_y]
        swap = so_far.roll(1, 0) - so_far
        moved = torch.cat([swap, swap.new_zeros(len(swap), features.shape[1] - d_y)], 1)
        at = (layer + 1, places[layer + 1])
        try:
            put = _predictions(predictor.hooked, prompts[1::2], at, before + step)
            image = _image(features, streams[layer + 1], moved)
            exchanged = _predictions(predictor.hooked, prompts[1::2], at, after + image)
        except NoStreamError:
            return None
        silent = so_far.abs().max() == 0
        change = (np.nan, np.nan) if silent else r2_and_sem(exchanged - known, swap)
        rows.append((*r2_and_sem(put, known), *change))
    return StepEffects(*np.array(rows).T)


def states(
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
    n_layers: int,
) -> list[Float[Tensor, "prompt entry"]]:
    """The algorithm's prediction before the first layer and after each, and x if the layers change it."""
    moments = PromptMoments(prompts, task)
    path = algorithm.predictions(moments, scalars.tolist(), n_layers)
    path = torch.cat([torch.zeros_like(path[:1]), path])
    x = algorithm.changed_covariates(moments, scalars.tolist(), n_layers)
    if x is None:
        return list(path)
    # Algorithm 1 writes its x beside the given one, into an empty place.
    own = algorithm.label == "preprocess_then_optimise"
    first = torch.zeros_like(x[:1]) if own else moments.prompts.x_query[None]
    return [torch.cat(both, 1) for both in zip(path, torch.cat([first, x]), strict=True)]


def _image(features: Tensor, wanted: Tensor, asked: Tensor | None = None) -> Tensor:
    """Linear image of features that is nearest to the wanted values on even prompts, on odd prompts or where asked."""
    image = torch.linalg.lstsq(features[::2], wanted[::2], driver="gelsd").solution
    return (features[1::2] if asked is None else asked) @ image


def _predictions(
    hooked: HookedPredictor,
    prompts: Prompts,
    at: tuple[int, int] | None = None,
    values: Float[Tensor, "prompt d_model"] | None = None,
) -> Float[Tensor, "prompt d_y"]:
    """Predictions, with the stream after a layer set to given values at one position."""
    weight = next(hooked.model.parameters())
    given = prompts.to(weight.device).to(weight.dtype)

    def put(stream: Tensor, hook: object) -> Tensor:
        assert at is not None
        assert values is not None
        if stream.shape[2] != values.shape[1]:
            raise NoStreamError("The stream must have one width in all layers.")
        stream = stream.clone()
        stream[:, at[1]] = values.to(stream)
        return stream

    hooks: Hooks = [] if at is None else [(hooked.stream_name(at[0]), put)]
    with torch.no_grad():
        output = hooked.model.run_with_hooks(hooked.inputs(given), fwd_hooks=hooks)
        return hooked.prediction(output, given).cpu().double()
