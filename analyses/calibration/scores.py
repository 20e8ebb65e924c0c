"""Test whether the best factor on the output of a one-layer model reveals the attention score of
its training.

The factor c that minimises E (c f - y)^2 is 1 under a fully trained model's own score. Each shipped
model runs on 16,384 prompts of its own task under its own score, and under the scores that a file
of weights leaves open.
Run: python -m analyses calibration/scores (half a minute)."""

import pandas as pd

from analyses.lib import Measured, checkpoint, shipped
from mechinterp import Prompts
from mechinterp.analysis.stats import best_factor
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights

OPEN = ("softmax", "linear/L")


def off_one(heads: Weights, prompts: Prompts) -> float:
    """Distance of the best factor from 1, in standard errors."""
    factor, sem = best_factor(predict(heads, prompts), prompts.y_query)
    return abs(factor - 1) / sem


def measure(quick: bool) -> Measured:
    rows = []
    for name in shipped("*"):
        model = checkpoint(name)
        if not model.config.model.one_attention:
            continue
        generator = generator_for(2, "eval", 0)
        prompts = draw_prompts(model.task, 1024 if quick else 16_384, generator=generator)
        heads = model.weights
        others = [
            off_one(heads.with_model(score=score, score_slope=1.0), prompts)
            for score in OPEN
            if score != heads.model.score
        ]
        rows.append({"model": name, "own": off_one(heads, prompts), "other": min(others)})
    return Measured(pd.DataFrame(rows))
