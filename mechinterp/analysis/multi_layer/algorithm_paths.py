"""What the stream holds at the query after each layer: the prediction so far, and x as layers have changed it."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_source import AlgorithmSource
from mechinterp.analysis.multi_layer.algorithm_tests import Setting
from mechinterp.analysis.multi_layer.step_effects import held, step_image
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.given import no_law
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.models.run.predictor import Predictor

MISSED = 0.02
"""Share of the prediction that a read-out of the last stream may miss."""
PER_FEATURE = 8
"""Prompts behind a fitted read-out for each entry of the stream; half of them are scored."""
PENALTY = 1e-9
"""Of a fitted read-out, relative to the mean square of an entry of the stream."""
PLACE = 20
"""Place of the prompts of read-outs among those of a seed."""


@dataclass(frozen=True, eq=False)
class Path:
    """The prediction after each layer, and how it is known."""

    read: Float[Tensor, "layer prompt d_y"] | None
    how: str
    """"the unembedding", "a fitted read-out", "the function"; else why there is none."""
    read_out: Float[Tensor, "d_model d_y"] | None = None
    """What reads the stream after each layer; None of a function."""


def path_of(source: AlgorithmSource, own: Setting, seed: int) -> Path:
    """The prediction after each layer of a model, by one read-out for all layers, or of a function."""
    predictor = source.predictor
    if predictor is None:
        if not source.has_path:
            return Path(None, "the function gives the last prediction alone")
        return Path(source.path(own.prompts), "the function")
    try:
        streams = query_streams(predictor, own.prompts)[1:]
    except NoStreamError as error:
        return Path(None, str(error).rstrip("."))
    W_U = None if predictor.weights is None else predictor.weights.tensors.get("unembed.W_U")
    if W_U is not None:
        read = streams @ W_U.cpu().double()
        if _missed(read[-1], own.known) <= MISSED:
            return Path(read, "the unembedding", W_U.cpu().double())
    prompts = _reading_prompts(source, own, seed, streams.shape[2])
    if prompts is None:
        return Path(
            None, f"a read-out of the stream needs {PER_FEATURE * streams.shape[2]} prompts"
        )
    last = query_streams(predictor, prompts)[-1]
    fitted = _read_out(last, source.predicted(prompts))
    read = streams @ fitted
    missed = _missed(read[-1], own.known)
    if missed > MISSED:
        return Path(
            None, f"a linear read-out of the last stream misses {missed:.1%} of the prediction"
        )
    return Path(read, "a fitted read-out", fitted)


def read_path(
    source: AlgorithmSource, path: Path, prompts: Prompts
) -> Float[Tensor, "layer prompt d_y"]:
    """The prediction after each layer on other prompts, by the same read-out."""
    if source.predictor is None or path.read_out is None:
        return source.path(prompts)
    return query_streams(source.predictor, prompts)[1:] @ path.read_out


def claims_r2(
    source: AlgorithmSource,
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    own: Setting,
    path: Path,
    seed: int,
) -> tuple[float, float]:
    """Whether the stream bears out an algorithm that changes x: two R^2, NaN for a function or one layer.

    The first is that with which linear read-outs of the stream find the part of the algorithm's x that is not linear
    in x, over the layers before the last. The second is that of the prediction with linear images of the algorithm's
    steps in place of what all layers add. Both on other prompts than they are fitted to.
    """
    predictor = source.predictor
    if predictor is None or path.read_out is None or source.n_layers < 2:
        return float("nan"), float("nan")
    width = query_streams(predictor, own.prompts[:1]).shape[2]
    prompts = _reading_prompts(source, own, seed, width)
    if prompts is None:
        return float("nan"), float("nan")
    streams = query_streams(predictor, prompts)
    states = held(algorithm, scalars, prompts, source.task, source.n_layers)
    layers = range(source.n_layers)
    steps = sum(step_image(states, streams, layer) for layer in layers)
    known = source.predicted(prompts[1::2])
    replaced = (streams[0, 1::2] + steps) @ path.read_out
    d_y, x = prompts.y.shape[2], prompts.x_query.double()
    missed = wanted = 0.0
    for layer in range(1, source.n_layers):
        features, target = (_without(part, x) for part in (streams[layer], states[layer][:, d_y:]))
        read = features[1::2] @ _read_out(features[::2], target[::2])
        missed += (read - target[1::2]).square().sum().item()
        wanted += target[1::2].square().sum().item()
    return (1 - missed / wanted if wanted > 0 else float("nan")), 1 - _missed(replaced, known)


def query_streams(predictor: Predictor, prompts: Prompts) -> Float[Tensor, "layer prompt d_model"]:
    """The stream at the query before each layer and after the last."""
    return predictor.streams(prompts)[:, :, -1].cpu().double()


def _reading_prompts(
    source: AlgorithmSource, own: Setting, seed: int, width: int
) -> Prompts | None:
    """Other prompts for read-outs; without a law the given ones, None if they are too few."""
    if no_law(source.task):
        return own.prompts if len(own.prompts) >= PER_FEATURE * width else None
    return sample_prompts(
        source.task,
        PER_FEATURE * width,
        generator=generator_for(seed, "eval", PLACE),
        context_length=own.prompts.x.shape[1],
        dtype=torch.float64,
    )


def _missed(values: Tensor, wanted: Tensor) -> float:
    return ((values - wanted).square().mean() / wanted.square().mean()).item()


def _without(values: Float[Tensor, "prompt _"], x: Float[Tensor, "prompt d_x"]) -> Tensor:
    """Values minus what is linear in x of them, by the even prompts."""
    return values - x @ torch.linalg.lstsq(x[::2], values[::2], driver="gelsd").solution


def _read_out(
    features: Float[Tensor, "prompt feature"], target: Float[Tensor, "prompt target"]
) -> Float[Tensor, "feature target"]:
    """Ridge regression with a small penalty, since entries of a stream may depend on each other."""
    gram = features.mT @ features
    penalty = PENALTY * gram.diagonal().mean().clamp(min=1e-30)
    return torch.linalg.solve(
        gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device),
        features.mT @ target,
    )
