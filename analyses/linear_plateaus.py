"""At the rests of separate heads: alignment, principal component regression, and the jumps foretold before training.

Zhang et al. 2025, arXiv 2501.16265, eq. (20) and (22); jump times from the initial weights are derived here.
Run: python analyses/linear_plateaus.py (seconds; --quick 2 seeds)
"""

import numpy as np
import pandas as pd
import torch
from linear_setting import EIGENVALUES, FOUND, INITS, NORMS, separate, task
from measured import Claim, Measured, numbers, run

from mechinterp.analysis.dynamics.plateaus import Plateaus
from mechinterp.icl.predictors import one_step_pcr
from mechinterp.theory.linear_heads import separate_heads
from mechinterp.theory.linear_jumps import first_jump_bound
from mechinterp.training.descent import training_set
from mechinterp.training.flow import Flow


def held(found: Flow, rests: Plateaus) -> np.ndarray:
    """Of the head that holds the newest direction at each rest: alignment and norms.

    Columns: 1 - |cos| of key and of query with the eigenvector, | |k| / |v| - 1 | of both, | |v| / v_inf - 1 |.
    """
    rows = []
    for mode, place in enumerate(np.searchsorted(found.time, rests.time[1:])):
        v, K, Q = found.heads.v[place], found.heads.K[place, :, 0], found.heads.Q[place, :, 0]
        head = np.abs(v * K[:, mode] * Q[:, mode]).argmax()
        norms = np.linalg.norm([K[head], Q[head]], axis=1)
        cosines = np.abs([K[head, mode], Q[head, mode]]) / norms
        size = abs(v[head])
        rows.append([*(1 - cosines), *np.abs(norms / size - 1), abs(size / NORMS[mode] - 1)])
    return np.array(rows)


def long_context(n_prompts: int) -> float:
    """Largest mean squared distance, over m, of eq. (22) from w^T P_m x_query at N = 1,000."""
    (prompts,) = training_set(task(1000), n_prompts, seed=1)
    distances = []
    for components in range(5):
        kept = prompts.x_query * (torch.arange(4) < components)
        exact = torch.einsum("bdk,bd->bk", prompts.beta, kept)
        ours = one_step_pcr(prompts, components=components, covariance=np.diag(EIGENVALUES))
        distances.append(float((ours - exact).square().mean()))
    return max(distances)


def measure(quick: bool) -> Measured:
    seeds, claims, rows = range(2 if quick else 10), [], []
    for init, norm, jump, pcr in zip(INITS, (3e-2, 1e-3), (2e-2, 5e-3), (1e-2, 1e-6), strict=True):
        every, models = [separate(init, seed) for seed in seeds], f"{len(seeds)} seeds, init {init:g}"  # fmt: skip
        heads = np.concatenate([held(*one) for one in every])
        miss, ratio, value = heads[:, :2], heads[:, 2:4].max(), heads[:, 4].max()
        errors = np.array([rest.predicted.time / rest.crossing_time - 1 for _, rest in every])
        order = all(rest.predicted.mode.tolist() == [0, 1, 2, 3] for _, rest in every)
        typical, early = np.median(np.abs(errors), 0), [rest.crossing_time[0] / first_jump_bound(separate_heads(5, 4, std=init, seed=seed), FOUND) for seed, (_, rest) in zip(seeds, every, strict=True)]  # fmt: skip
        distance = np.array([rest.pcr_distance for _, rest in every])
        claims += [
            Claim("L-11", f"key and query align with e_m (median 1 - |cos| < 1e-3) and have the norm of v (within {norm:g})", models, "aligned, equal", f"median {np.median(miss):.1e}, largest {miss.max():.1e}; within {ratio:.1e}", bool(np.median(miss) < 1e-3 and ratio < norm)),
            Claim("L-11", "|v| is m_d^(1/3) within 3%", models, ", ".join(f"{one:.4f}" for one in NORMS), f"within {value:.2%}", bool(value < 0.03)),
            Claim("L-13", f"jumps are foretold from the initial weights, median error of each below {jump:.1%}", models, "not asked", f"{numbers(100 * typical, 2)}%", bool(order and typical.max() < jump)),
            Claim("L-13", f"the same for every single jump, below {jump:.1%}", models, "not asked", f"largest {np.abs(errors).max():.1%}; {(np.abs(errors) < jump).sum()} of {errors.size} below", bool(np.abs(errors).max() < jump)),
            Claim("L-13", "no first jump comes before tau sqrt(3) / (lambda_1^2 max |theta|)", models, "not asked", f"{numbers(early, 2)} times as late", min(early) > 1),
            Claim("L-15", f"rests are principal component regression, eq. (22): relative squared distance, median < 1e-6, largest < {pcr:g}", models, "equal", f"{np.median(distance):.0e}, {distance.max():.0e}", bool(np.median(distance) < 1e-6 and distance.max() < pcr)),
        ]  # fmt: skip
        rows += [rest.to_frame().assign(init=init, seed=seed) for seed, (_, rest) in zip(seeds, every, strict=True)]  # fmt: skip
    far = long_context(500 if quick else 2000)
    claims.append(Claim("L-15", "eq. (22) tends to w^T P_m x: mean squared distance below 0.006 at N = 1,000", "closed form, on prompts", "0 as N tends to infinity", f"at most {far:.4f}", far < 0.006))  # fmt: skip
    shown = separate(INITS[0], 0)[1]
    return Measured(pd.concat(rows), {"jumps": shown.plot(), "learned": shown.plot_learned()}, claims)  # fmt: skip


if __name__ == "__main__":
    run(measure, __file__)
