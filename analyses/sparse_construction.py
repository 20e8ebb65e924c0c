"""C1 to C3 of sparse regression: the hand-built model is Algorithm 1, and what that algorithm is. All exact.

Settings and thresholds are ours: Chen, Zhao and Zou 2024, arXiv 2408.04532, is known to us by its abstract and captions.
Run: python analyses/sparse_construction.py (seconds)
"""

from dataclasses import replace
from functools import cache

import pandas as pd
import torch
from measured import Claim, Measured, run

from mechinterp.analysis.probing.probes import reweighted
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk, ols, preprocess_then_optimise
from mechinterp.models.constructions_sparse import preprocess_then_optimise_model
from mechinterp.models.transformer import ICLTransformer

TASK = TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4)
ETA, STEPS, TIMES = 0.8, 12, (0, 4, 16, 64, 256)


@cache
def built(steps: int) -> ICLTransformer:
    weights = preprocess_then_optimise_model([ETA] * steps, d_x=16)
    return ICLTransformer.from_weights(weights, task=TASK)


def unmasked(prompts: Prompts, steps: int) -> torch.Tensor:
    """Predictions of the built model where the query is a key, too: it stands twice and the second one is read."""
    tokens = torch.cat([prompts.tokens, prompts.tokens[:, -1:]], dim=1)
    # 41 keys where there were 40.
    hook = (lambda name: name.endswith("hook_pattern"), lambda pattern, hook: pattern * 41 / 40)
    return built(steps).run_with_hooks(tokens, fwd_hooks=[hook])[:, -1]


def preconditioned(prompts: Prompts) -> torch.Tensor:
    """Descent in the space of task vectors, its gradients multiplied by the squared correlations."""
    G, r = prompts.x.mT @ prompts.x / 40, (prompts.x * prompts.y).mean(1)
    w = torch.zeros_like(r)
    for _ in range(STEPS):
        w = w - ETA * r.square() * ((G @ w[..., None])[..., 0] - r)
    return (w * prompts.x_query).sum(1, keepdim=True)


@torch.no_grad()
def measure(quick: bool) -> Measured:
    n_prompts = 32 if quick else 128
    prompts = sample_prompts(TASK, n_prompts, generator=generator_for(0, "eval", 0), dtype=torch.float64)  # fmt: skip
    path = preprocess_then_optimise(prompts, steps=STEPS, eta=ETA)
    _, cache = built(1).run_with_cache(prompts.tokens)
    errors = {"first layer": cache["resid_post", 0][..., 17:] - reweighted(prompts)[0]}
    for steps in range(STEPS + 1):
        errors[f"step {steps}"] = built(steps).predict(prompts) - path[steps]
    errors |= {f"step {t}, query a key": unmasked(prompts, t) - path[t] for t in (1, 2, 3, 4)}
    errors["preconditioned"] = preconditioned(prompts) - path[STEPS]
    largest = {name: error.abs().max().item() for name, error in errors.items()}
    later = max(largest[f"step {steps}"] for steps in range(STEPS + 1))
    without = [largest[f"step {t}, query a key"] for t in (1, 2, 3, 4)]
    squares = replace(prompts, y_query_clean=ols(prompts))
    away = excess_risk(preprocess_then_optimise(prompts, steps=TIMES[-1])[list(TIMES)], squares).mean(1)  # fmt: skip
    claims = [
        Claim("C1", "the first layer of the built model writes R x: within 1e-12", "built, d 16, L 40", "exact", f"within {largest['first layer']:.0e}", largest["first layer"] <= 1e-12),
        Claim("C2", f"one head per later layer is a step of GD on R x: within 1e-12 for 0 to {STEPS} steps", "built, d 16, L 40", "exact", f"within {later:.0e}", later <= 1e-12),
        Claim("C2", "with the query as a key, too, the first step holds and later ones err by more than 0.01", "built, d 16, L 40", "not asked", f"{without[0]:.0e}; " + ", ".join(f"{e:.2f}" for e in without[1:]), without[0] <= 1e-12 and min(without[1:]) > 0.01),
        Claim("C3", "Algorithm 1 is GD preconditioned by r^2: within 1e-12", "closed form, d 16, L 40", "exact", f"within {largest['preconditioned']:.0e}", largest["preconditioned"] <= 1e-12),
        Claim("C3", "it approaches least squares step by step, without reaching it in 256 steps", "closed form, d 16, L 40", "in the limit (derived)", "squared distance " + ", ".join(f"{a:.3g}" for a in away) + " at t = 0, 4, 16, 64, 256", bool((away.diff() < 0).all() and away[-1] > 1e-3)),
    ]  # fmt: skip
    distances = {f"squared distance from least squares, step {t}": a.item() for t, a in zip(TIMES, away, strict=True)}  # fmt: skip
    rows = [*largest.items(), *distances.items()]
    return Measured(pd.DataFrame(rows, columns=["what", "value"]), claims=claims)


if __name__ == "__main__":
    run(measure, __file__)
