"""The stream of a model at the query: read after each layer, and set to what an algorithm holds there."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.naming_prompts import (
    FITTED_PROMPTS,
    SCORED_PROMPTS,
    NamingSetting,
    Predict,
    Subject,
    drawn_at,
    relative_risk,
)
from mechinterp.analysis.stats import r2_and_sem
from mechinterp.config import TaskConfig
from mechinterp.display import with_sem
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.given import no_law
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.models.run.ways import Predictor

MISSED = 0.02
"""Largest fraction of the prediction that a read-out of the last stream may miss."""
PROMPTS_PER_ENTRY = 8
"""Prompts for a fitted read-out, per entry of the stream."""
PENALTY = 1e-9
"""Ridge penalty of a fitted read-out, relative to the mean square of an entry of the stream."""
READING = 20
"""Step of the random stream from which the prompts of a read-out are drawn."""
STEP_PROMPTS = 512
"""Largest number of prompts on which steps are put into the stream."""


def path_of(subject: Subject, own: NamingSetting, seed: int) -> tuple[Predict | None, str]:
    """Function that gives the prediction after each layer, by one linear read-out of the stream for all layers; and the
    read-out in words. None: the prediction after each layer is unknown, and why.
    """
    source, task = subject.source, subject.task
    if not isinstance(source, Predictor):
        if subject.has_path:
            return subject.outputs, "the function"
        return None, "the function gives the last prediction alone"

    def streams(prompts: Prompts) -> Tensor:
        return source.streams(prompts)[1:, :, -1].cpu().double()

    def read_by(read_out: Tensor) -> Predict:
        return lambda prompts: streams(prompts) @ read_out

    try:
        last = streams(own.prompts)[-1]
    except NoStreamError as error:
        return None, str(error).rstrip(".")
    weights = source.weights
    if weights is not None and "unembed.W_U" in weights.tensors:
        W_U = weights.tensors["unembed.W_U"].cpu().double()
        if relative_risk(last @ W_U, own.predictions) <= MISSED:
            return read_by(W_U), "the unembedding"
    needed = PROMPTS_PER_ENTRY * last.shape[1]
    prompts = own.prompts
    if not no_law(task):
        prompts = drawn_at(task, needed, prompts.x.shape[1], seed=seed, step=READING)
    if len(prompts) < needed:
        return None, f"a read-out of the stream needs {needed} prompts"
    read_out = _fitted(streams(prompts)[-1], subject.predict(prompts))
    missed = relative_risk(last @ read_out, own.predictions)
    if missed <= MISSED:
        return read_by(read_out), "a fitted read-out"
    return None, f"a linear read-out of the last stream misses {missed:.1%} of the prediction"


def _fitted(
    features: Float[Tensor, "prompt feature"], target: Float[Tensor, "prompt d_y"]
) -> Tensor:
    """Read-out by ridge regression with a small penalty, since entries of a stream may depend on each other."""
    gram = features.mT @ features
    gram.diagonal().add_(PENALTY * gram.diagonal().mean().clamp(min=1e-30))
    return torch.linalg.solve(gram, features.mT @ target)


def step_effects(
    predictor: Predictor,
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
) -> pd.DataFrame | None:
    """Effects of the steps of an algorithm with fitted scalars, put into the stream at the query, one row per layer.

    The query is no key of later layers, so that a change of its stream changes its own prediction alone. Linear images of
    what the algorithm holds are fitted to the even prompts, effects are measured on the odd ones.

    Returns:
        `steps_r2`: R² with the prediction of the model as it is, if a linear image of the algorithm's step replaces the
        layer's addition. `exchanged_r2`: R² of the change of the prediction with the expected one, if the algorithm's
        prediction after the layer is exchanged with that of another prompt; NaN if the algorithm predicts 0 there. It has
        no error: the fit of the linear images, and not the prompts, decides its spread. `steps_r2_sem` is over prompts. None
        if the stream cannot be set, or its linear images need more prompts.
    """
    prompts = prompts[:STEP_PROMPTS]
    try:
        if not predictor.one_stream_width(prompts):
            return None  # a layer whose output is no sum with its input
        streams = predictor.streams(prompts)[:, :, -1].cpu().double()
    except NoStreamError:
        return None
    held = states(algorithm, scalars, prompts, task, predictor.n_layers)
    if len(prompts) < 4 * (held[0].shape[1] + task.d_x):
        return None
    scored = prompts[SCORED_PROMPTS]

    def predicted(layer: int, at_query: Tensor) -> Tensor:
        return predictor.predict_from(scored, layer, at_query).cpu().double()

    known = predictor.predict(scored).cpu().double()
    rows = []
    for layer in range(predictor.n_layers):
        before, after = streams[layer : layer + 2]
        step = held[layer + 1] - held[layer]
        image = step[SCORED_PROMPTS] @ _map(step, after - before)
        put = predicted(layer + 1, before[SCORED_PROMPTS] + image)
        so_far = held[layer + 1][SCORED_PROMPTS, : task.d_y]
        swap = so_far.roll(1, 0) - so_far
        # The stream holds x, too, so that the map has rows for it.
        image = swap @ _map(torch.cat([held[layer + 1], prompts.x_query], 1), after)[: task.d_y]
        exchanged = predicted(layer + 1, after[SCORED_PROMPTS] + image)
        silent = so_far.abs().max() == 0
        change = np.nan if silent else r2_and_sem(exchanged - known, swap)[0]
        rows.append((*r2_and_sem(put, known), change))
    return pd.DataFrame(rows, columns=[*with_sem("steps_r2"), "exchanged_r2"])


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


def _map(
    features: Float[Tensor, "prompt feature"], wanted: Float[Tensor, "prompt d_model"]
) -> Float[Tensor, "feature d_model"]:
    """Linear map from features that is nearest to the wanted values on even prompts."""
    return torch.linalg.lstsq(
        features[FITTED_PROMPTS], wanted[FITTED_PROMPTS], driver="gelsd"
    ).solution
