"""Algorithms fitted to the predictions of a model on some prompts, and scored on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float

from mechinterp.analysis.multi_layer.algorithm_tests import Setting, isotropic
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS, Algorithm
from mechinterp.icl.prompt_moments import JoinedMoments, PromptMoments

N_STARTS = 2
FINE = 1e-4
"""A fit ends where a step takes off less than this share of what is left."""
NEAR = 0.5
"""R^2 to some member below which prompts are not answered."""


@dataclass(frozen=True, eq=False)
class Scores:
    """R^2 of each member in each column, a setting or a layer; NaN where nothing is asked."""

    scalars: tuple[Float[np.ndarray, " _"], ...]
    """Fitted ones of each member; NaN where none are."""
    answered: Bool[np.ndarray, " column"]
    r2: Float[np.ndarray, "member column"]
    """1 - mean (model - member)^2 / mean model^2, on prompts that nothing was fitted to."""
    r2_sem: Float[np.ndarray, "member column"]
    difference: Float[np.ndarray, "member member column"]
    """R^2 of the first member minus that of the second."""
    difference_sem: Float[np.ndarray, "member member column"]
    """Paired: the same prompts for both."""


def candidates_of(task: TaskConfig) -> tuple[Algorithm, ...]:
    """Algorithms with a label; where Sigma is a multiple of I, preconditioned gradient descent is
    gradient descent and left out."""
    labelled = [algorithm for algorithm in ALGORITHMS if algorithm.label is not None]
    left_out = {"preconditioned_gd"} if isotropic(task) else set()
    return tuple(member for member in labelled if member.label not in left_out)


def scores_of(
    members: Sequence[Algorithm],
    settings: Mapping[str, Setting],
    task: TaskConfig,
    n_layers: int,
) -> Scores:
    """Members fitted to the even prompts of every setting that is answered, scored on the odd."""
    own = settings["own length"]
    useful = np.array([own.useful and setting.useful for setting in settings.values()])
    found = _fitted_and_scored(members, settings, task, n_layers, useful)
    answered = useful & (np.nan_to_num(found.r2, nan=-np.inf).max(0) >= NEAR)
    if (answered == useful).all():
        return found
    return _fitted_and_scored(members, settings, task, n_layers, answered)


def fitted_to_settings(
    member: Algorithm, chosen: Sequence[Setting], task: TaskConfig, n_layers: int
) -> Float[np.ndarray, " scalar"]:
    """Scalars of a member, from the even prompts of all settings together."""
    joined = JoinedMoments([PromptMoments(s.prompts[::2], task) for s in chosen])
    target = torch.cat([s.known[::2] for s in chosen])
    found = fit_algorithm(
        member, joined, target, n_layers=n_layers, n_starts=N_STARTS, tolerance=FINE
    )
    return found.scalars


def squared_errors(
    member: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    setting: Setting,
    task: TaskConfig,
    n_layers: int,
) -> Float[np.ndarray, " prompt"]:
    """Of the last prediction, on the odd prompts."""
    moments = PromptMoments(setting.prompts[1::2], task)
    last = member.predictions(moments, scalars.tolist(), n_layers)[-1]
    return (last - setting.known[1::2]).square().mean(1).numpy()


def _fitted_and_scored(
    members: Sequence[Algorithm],
    settings: Mapping[str, Setting],
    task: TaskConfig,
    n_layers: int,
    used: Bool[np.ndarray, " setting"],
) -> Scores:
    each = list(settings.values())
    shape = (len(members), len(each), len(each[0].prompts) // 2)
    error, size = np.full(shape, np.nan), np.full(shape[1:], np.nan)
    scalars = [np.full(len(member.names(n_layers)), np.nan) for member in members]
    chosen = [setting for setting, use in zip(each, used, strict=True) if use]
    for s in np.flatnonzero(used):
        size[s] = each[s].known[1::2].square().mean(1).numpy()
    for m, member in enumerate(members if chosen else ()):
        scalars[m] = fitted_to_settings(member, chosen, task, n_layers)
        for s in np.flatnonzero(used):
            error[m, s] = squared_errors(member, scalars[m], each[s], task, n_layers)
    return compared(tuple(scalars), used, error, size)


def compared(
    scalars: tuple[np.ndarray, ...],
    answered: Bool[np.ndarray, " column"],
    error: Float[np.ndarray, "member column prompt"],
    size: Float[np.ndarray, "column prompt"],
) -> Scores:
    """R^2 of squared errors relative to squared sizes, and its differences between members."""
    n_members, n_columns, _ = error.shape
    r2, r2_sem = np.full((2, n_members, n_columns), np.nan)
    difference, difference_sem = np.full((2, n_members, n_members, n_columns), np.nan)
    for c in range(n_columns):
        if not np.isfinite(size[c]).all():
            continue
        unexplained, r2_sem[:, c] = ratio_and_sem(error[:, c].T, size[c])
        r2[:, c] = 1 - unexplained
        pairs = error[None, :, c] - error[:, None, c]
        difference[..., c], difference_sem[..., c] = ratio_and_sem(
            np.moveaxis(pairs, 2, 0), size[c]
        )
    return Scores(scalars, answered, r2, r2_sem, difference, difference_sem)
