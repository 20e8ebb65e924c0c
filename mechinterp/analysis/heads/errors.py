"""Errors of a model with heads masked."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.estimates import require_moderate
from mechinterp.icl.prompts import Prompts
from mechinterp.models.masks import Head
from mechinterp.models.predictor import predictor_of
from mechinterp.progress import ProgressCallback, no_progress


def masked_errors(
    source: object,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    method: str = "zero",
    progress: ProgressCallback = no_progress,
) -> Float[np.ndarray, "unit mask"]:
    """Squared error against the clean target under each mask, mean over responses, of independent units.

    A unit is a prompt; where prompts swap in pairs it is the mean of a pair.
    """
    predictions = predictor_of(source).run(prompts, masks, method=method, progress=progress)
    require_moderate(predictions)
    errors = (predictions.double() - prompts.y_query_clean.to(predictions)).square().mean(2).T
    errors = errors.unflatten(0, (-1, 2)).mean(1) if method == "resample" else errors
    return errors.double().numpy(force=True)
