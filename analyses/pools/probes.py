"""Linear probes for the posterior under a pool in the stream of a model, layer by layer.

log p_i = -(beta_i^T G beta_i - 2 b^T beta_i) / (2 s^2) + const is linear in the moments G = X^T X
and b = X^T y of the context. A model that has these moments for ridge therefore passes a linear
probe for log p_i without knowing the pool. The p_i themselves are not linear in the moments. So
both are probed, and the moments too, on prompts of the pool and of new tasks."""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechinterp import Prompts
from mechinterp.icl.predictors import Pool, log_posterior
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.ways import Predictor

PENALTY = 1e-3
"""Penalty of the ridge regression behind a probe, per prompt and unit of variance."""


def targets_of(prompts: Prompts, pool: Pool, noise_var: float) -> dict[str, Tensor]:
    """Targets of the probes, [prompt, entry]."""
    logs = log_posterior(prompts, pool=pool, noise_var=noise_var)
    moments = prompts.x.mT @ torch.cat([prompts.x, prompts.y], 2)
    return {
        "log_p": logs - logs.mean(1, keepdim=True),
        "p": logs.exp(),
        "moments": moments.flatten(1),
    }


def r2(features: Tensor, target: Tensor) -> float:
    """Fraction of the variance of the second half that a probe fitted on the first half explains."""
    half = len(features) // 2
    mean, scale = features[:half].mean(0), features[:half].std(0) + 1e-12
    features = torch.cat([(features - mean) / scale, torch.ones(len(features), 1)], 1).double()
    center = target[:half].mean(0)
    gram = features[:half].mT @ features[:half] + PENALTY * half * torch.eye(features.shape[1])
    found = features @ torch.linalg.solve(gram, features[:half].mT @ (target - center)[:half])
    residual = (target - center - found)[half:].square().sum()
    return float(1 - residual / (target - center)[half:].square().sum())


def probes(predictor: Predictor, pool: Pool, *, n_prompts: int, seed: int = 1) -> pd.DataFrame:
    """One row per kind of tasks, target, position and layer, with the R² of a probe on the moments
    themselves."""
    task = predictor.task
    assert task is not None
    generator = np.random.default_rng(seed)
    rows = []
    for kind in ("pool", "new"):
        prompts = draw_prompts(
            task, n_prompts, seed=seed, dtype=torch.float64, new_tasks=kind == "new"
        )
        streams = predictor.streams(prompts, positions=(-2, -1)).double()  # the last y, the query
        targets = targets_of(prompts, pool, task.noise_var)
        shuffled = torch.from_numpy(generator.permutation(n_prompts))
        for name, target in targets.items():
            known = r2(targets["moments"], target)
            for at, position in enumerate(("last pair", "query")):
                control = r2(streams[-1, :, at], target[shuffled])
                rows += [
                    {
                        "tasks": kind,
                        "target": name,
                        "position": position,
                        "layer": layer,
                        "r2": r2(stream[:, at], target),
                        "control_r2": control,
                        "r2_of_moments": known,
                    }
                    for layer, stream in enumerate(streams)
                ]
    return pd.DataFrame(rows)
