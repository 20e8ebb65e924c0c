"""What a linear read-out finds in the stream after each layer, held against the paths of algorithms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_scores import (
    FINE,
    N_STARTS,
    NEAR,
    Scores,
    compared,
)
from mechinterp.analysis.multi_layer.algorithm_tests import Setting
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import Algorithm, Scalar
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.models.run.predictor import Predictor

MISSED = 0.02
"""Share of the prediction that a linear read-out of the last stream may miss."""
SHARE = 0.3
"""Of the second algorithm of a mixture, where the search for its scalars starts."""
COARSE = 1e-3
"""A mixture's fit ends where a step takes off less than this share of what is left."""
RESOLVED = 1e-4
"""Share of the model below which what an algorithm leaves unexplained is rounding."""


@dataclass(frozen=True, eq=False)
class Path:
    """What the stream holds at the query after each layer, and how near members come to it."""

    answered: bool
    """Whether a linear read-out predicts as the model does, and comes near to some member's path."""
    read: Float[Tensor, "layer prompt d_y"] | None
    """What that read-out finds after each layer; None where it does not predict as the model does."""
    scores: Scores
    """Of members with a path, relative to the mean square of the last prediction."""
    readout_r2: Float[np.ndarray, "member layer"]
    """R^2 with which a linear read-out of its own for each layer, fitted on the even prompts, finds
    a member's prediction there in the stream of the odd ones; relative to the mean square of that."""


def path_of(
    members: Sequence[Algorithm], predictor: Predictor, own: Setting, task: TaskConfig
) -> Path:
    """Read-outs are fitted on the even prompts, and scored on the odd.

    The one for all layers is fitted to the model's predictions from the last stream. Members are
    fitted to what it reads after every layer.
    """
    n_layers, half = predictor.n_layers, len(own.prompts) // 2
    error = np.full((len(members), n_layers, half), np.nan)
    size = np.full((n_layers, half), np.nan)
    found = [np.full(len(member.names(n_layers)), np.nan) for member in members]
    readout = np.full((len(members), n_layers), np.nan)
    streams, read = _read_streams(predictor, own)
    if read is None:
        scores = compared(tuple(found), np.zeros(n_layers, bool), error, size)
        return Path(False, None, scores, readout)
    fitted, scored = (PromptMoments(own.prompts[i::2], task) for i in (0, 1))
    size[:] = own.known[1::2].square().mean(1).numpy()
    for m, member in enumerate(members):
        if not member.has_path:
            continue
        found[m] = fit_algorithm(
            member, fitted, read[:, ::2], n_layers=n_layers, n_starts=N_STARTS, tolerance=FINE
        ).scalars
        here, there = (member.predictions(p, found[m].tolist(), n_layers) for p in (fitted, scored))
        error[m] = (there - read[:, 1::2]).square().mean(2).numpy()
        readout[m] = _readout_r2(streams, here, there)
    scores = compared(tuple(found), np.ones(n_layers, bool), error, size)
    least = np.nan_to_num(scores.r2, nan=-np.inf).min(1)
    return Path(bool(least.max() >= NEAR), read, scores, readout)


def _read_streams(
    predictor: Predictor, own: Setting
) -> tuple[Float[Tensor, "layer prompt d_model"], Float[Tensor, "layer prompt d_y"] | None]:
    if not own.useful:
        return torch.empty(0, 0, 0), None
    try:
        streams = predictor.streams(own.prompts)[1:, :, -1].cpu().double()
    except NoStreamError:
        return torch.empty(0, 0, 0), None
    wanted = own.known
    solution = torch.linalg.lstsq(streams[-1, ::2], wanted[::2], driver="gelsd").solution
    read = streams @ solution
    missed = (read[-1, 1::2] - wanted[1::2]).square().mean()
    return streams, read if missed <= MISSED * wanted[1::2].square().mean() else None


def _readout_r2(
    streams: Float[Tensor, "layer prompt d_model"],
    here: Float[Tensor, "layer half d_y"],
    there: Float[Tensor, "layer half d_y"],
) -> Float[np.ndarray, " layer"]:
    found = np.full(len(streams), np.nan)
    for layer, stream in enumerate(streams):
        wanted = there[layer].square().mean()
        if wanted > 0:
            read = torch.linalg.lstsq(stream[::2], here[layer], driver="gelsd").solution
            missed = (stream[1::2] @ read - there[layer]).square().mean()
            found[layer] = 1 - (missed / wanted).item()
    return found


def mixed(first: Algorithm, second: Algorithm) -> Algorithm:
    """(1 - share) of the first algorithm's prediction and a share of the second's, at every layer."""

    def run(moments: PromptMoments, n_layers: int, *scalars: Tensor) -> Tensor:
        n, share = len(first.scalars), scalars[-1]
        ours = first.run(moments, n_layers, *scalars[:n])
        theirs = second.run(moments, n_layers, *scalars[n:-1])
        return (1 - share) * ours + share * theirs

    share = Scalar("share", lambda moments: SHARE, where="once")
    return Algorithm(
        name=f"{first.name} and {second.name}",
        label=None,
        scalars=(*first.scalars, *second.scalars, share),
        run=run,
        has_path=first.has_path and second.has_path,
    )


def mixture_gain(
    first: Algorithm,
    second: Algorithm,
    scalars: tuple[Float[np.ndarray, " first"], Float[np.ndarray, " second"]],
    target: Float[Tensor, "*layer prompt d_y"],
    moments: tuple[PromptMoments, PromptMoments],
    *,
    n_layers: int,
) -> float:
    """Share of what the first algorithm leaves unexplained that a mixture with the second explains.

    Args:
        scalars: Fitted ones of each alone, from which those of the mixture are sought; none of the
            second, if it was not fitted alone.
        target: What is explained, after every layer or after the last one.
        moments: Of the even prompts, for the fit, and of the odd ones, for the share.
    """
    both, (fitted, scored) = mixed(first, second), moments
    ours, theirs = (torch.from_numpy(values) for values in scalars)
    even, odd = target[..., ::2, :], target[..., 1::2, :]
    fits = [
        fit_algorithm(
            both,
            fitted,
            even,
            n_layers=n_layers,
            n_starts=1,
            start=torch.cat([ours, begin, torch.tensor([SHARE]).to(ours)]),
            tolerance=COARSE,
        )
        for begin in (theirs, second.start(fitted, n_layers))
        if len(begin) == len(second.names(n_layers))
    ]
    found = min(fits, key=lambda fit: fit.error).scalars

    def error(algorithm: Algorithm, values: np.ndarray) -> float:
        known = algorithm.predictions(scored, values.tolist(), n_layers)
        return float(((known if target.ndim == 3 else known[-1]) - odd).square().mean())

    alone = error(first, scalars[0])
    if alone <= RESOLVED * odd.square().mean():
        return 0.0
    return max(0.0, 1 - error(both, found) / alone)
