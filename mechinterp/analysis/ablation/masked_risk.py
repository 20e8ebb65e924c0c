"""Errors of a model with heads masked, and each head's share of its layer's rises."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.stats import require_moderate
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.hooked.runner import require_runs
from mechinterp.models.run.predictor import predictor_of
from mechinterp.progress import ProgressCallback, no_progress


def masked_errors(
    source: object,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    method: str = "zero",
    progress: ProgressCallback = no_progress,
) -> Float[np.ndarray, "unit mask"]:
    """Squared error against the clean target under each mask, mean over responses, for independent
    units.

    A unit is a prompt; for resample ablation, where two prompts swap, it is the mean of a pair."""
    predictions = predictor_of(source).run(prompts, masks, method=method, progress=progress)
    require_moderate(predictions)
    errors = (predictions.double() - prompts.y_query_clean.to(predictions)).square().mean(2).T
    errors = errors.unflatten(0, (-1, 2)).mean(1) if method == "resample" else errors
    return errors.double().numpy(force=True)


def single_masks(
    source: object,
    prompts: Prompts,
    *,
    method: str = "zero",
    runs: str = "one",
    progress: ProgressCallback = no_progress,
) -> tuple[Float[np.ndarray, " unit"], Float[np.ndarray, "unit layer head"]]:
    """Squared error of the full model on each unit, and the rise of the error when each head alone
    is masked.

    Args:
        runs: "one" masks a head in one layer; "all" masks it in all runs of its block, and the axis
            is then of blocks.
    Raises:
        ValueError: If there are fewer than two units, or runs is neither "one" nor "all".
    """
    predictor = predictor_of(source)
    require_runs(runs)
    each = [[head] for head in predictor.heads]
    if runs == "all":
        together = (tuple(predictor.hooked.in_all_runs(heads)) for heads in each)
        each = [list(heads) for heads in dict.fromkeys(together)]
    masks = [[], *each]
    errors = masked_errors(predictor, prompts, masks, method=method, progress=progress)
    if len(errors) < 2:
        raise ValueError(f"At least 2 prompts (or pairs of prompts) are needed, got {len(errors)}.")
    rises = errors[:, 1:] - errors[:, :1]
    return errors[:, 0], rises.reshape(len(rises), -1, predictor.n_heads)


def layer_shares(
    rise: Float[np.ndarray, "*axes layer head"],
) -> Float[np.ndarray, "*axes layer head"]:
    """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head of the
    layer counts.

    Example:
        >>> layer_shares(np.array([[1.0, 3.0], [-1.0, 0.0]])).tolist()
        [[0.25, 0.75], [0.0, 0.0]]
    """
    positive = rise.clip(min=0)
    total = positive.sum(-1, keepdims=True)
    return positive / np.where(total == 0, 1, total)
