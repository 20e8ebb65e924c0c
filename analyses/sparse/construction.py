"""C1 to C3 of sparse regression: the hand-built model equals Algorithm 1, and properties of that
algorithm. All exact.

Settings and thresholds are ours: only the abstract and captions of Chen, Zhao and Zou 2024, arXiv
2408.04532, are known to us.
Run: python -m analyses sparse/construction (seconds)"""

from dataclasses import replace
from functools import cache

import pandas as pd
import torch

from analyses.lib import Measured, records
from analyses.sparse.setting import SMALL as TASK
from analyses.sparse.setting import draw
from mechinterp import ICLTransformer, Prompts
from mechinterp.analysis.probing.target_functions import reweighted
from mechinterp.icl.sparse_predictors import excess_risk, ols, preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model

ETA, STEPS, TIMES = 0.8, 12, (0, 4, 16, 64, 256)


@cache
def built(steps: int) -> ICLTransformer:
    weights = preprocess_then_optimise_model([ETA] * steps, d_x=16)
    return ICLTransformer.from_weights(weights, task=TASK)


def unmasked(prompts: Prompts, steps: int) -> torch.Tensor:
    """Predictions of the built model when the query is a key too: it appears twice, and the second
    one is read."""
    tokens = torch.cat([prompts.tokens, prompts.tokens[:, -1:]], dim=1)
    # 41 keys instead of 40.
    hook = (lambda name: name.endswith("hook_pattern"), lambda pattern, hook: pattern * 41 / 40)
    return built(steps).run_with_hooks(tokens, fwd_hooks=[hook])[:, -1]


def preconditioned(prompts: Prompts) -> torch.Tensor:
    """Descent in the space of task vectors, with gradients multiplied by the squared correlations."""
    G, r = prompts.x.mT @ prompts.x / 40, (prompts.x * prompts.y).mean(1)
    w = torch.zeros_like(r)
    for _ in range(STEPS):
        w = w - ETA * r.square() * ((G @ w[..., None])[..., 0] - r)
    return (w * prompts.x_query).sum(1, keepdim=True)


@torch.no_grad()
def measure(quick: bool) -> Measured:
    n_prompts = 32 if quick else 128
    prompts = draw(TASK, n_prompts)
    path = preprocess_then_optimise(prompts, steps=STEPS, eta=ETA)
    _, cache = built(1).run_with_cache(prompts.tokens)
    errors = {"first layer": cache["resid_post", 0][..., 17:] - reweighted(prompts)[0]}
    for steps in range(STEPS + 1):
        errors[f"step {steps}"] = built(steps).predict(prompts) - path[steps]
    errors |= {f"step {t}, query a key": unmasked(prompts, t) - path[t] for t in (1, 2, 3, 4)}
    errors["preconditioned"] = preconditioned(prompts) - path[STEPS]
    largest = {name: error.abs().max().item() for name, error in errors.items()}
    squares = replace(prompts, y_query_clean=ols(prompts))
    far = preprocess_then_optimise(prompts, steps=TIMES[-1])[list(TIMES)]
    away = excess_risk(far, squares).mean(1)
    falls = away[1:] / away[:-1]
    asked = {
        "C1-first-layer": {"d 16": largest["first layer"]},
        "C2-steps": {f"step {t}": largest[f"step {t}"] for t in range(STEPS + 1)},
        "C2-query": {f"step {t}": largest[f"step {t}, query a key"] for t in (2, 3, 4)},
        "C3-preconditioned": {f"{STEPS} steps": largest["preconditioned"]},
        "C3-limit": {f"step {t}": fall.item() for t, fall in zip(TIMES[1:], falls, strict=True)},
    }
    claims = records("sparse-", asked, over={"prompts": n_prompts})
    what = "squared distance from least squares, step"
    rows = [
        *largest.items(),
        *((f"{what} {t}", a.item()) for t, a in zip(TIMES, away, strict=True)),
    ]
    return Measured(pd.DataFrame(rows, columns=["what", "value"]), claims=claims)
