"""Plateaus of separate heads: alignment, principal component regression, and jumps predicted before
training.

Zhang et al. 2025, arXiv 2501.16265, eq. (20) and (22); jump times from the initial weights are
derived here.
Run: python -m analyses linear/plateaus (seconds; --quick 2 seeds)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured, Record, record, records
from analyses.lib.plateaus import Plateaus
from analyses.lib.theory.learners import one_step_pcr
from analyses.lib.theory.linear_jumps import first_jump_bound
from analyses.linear.setting import EIGENVALUES, FOUND, INITS, NORMS, named, separate, task
from mechinterp.theory.linear import separate_heads
from mechinterp.training.linear import Flow
from mechinterp.training.linear_models import training_set


def held(found: Flow, rests: Plateaus) -> np.ndarray:
    """Alignment and norms of the head that holds the newest direction at each plateau.

    Columns: 1 - |cos| of key and of query with the eigenvector, | |k| / |v| - 1 | of both, | |v| /
        v_inf - 1 |."""
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
    for init in INITS:
        every = [separate(init, seed) for seed in seeds]
        heads = np.array([held(*one) for one in every])
        claims += head_records(init, heads)
        claims += jump_records(init, [rest for _, rest in every])
        claims += regression_records(init, np.array([rest.pcr_distance for _, rest in every]))
        rows += [
            rest.to_frame().assign(init=init, seed=seed)
            for seed, (_, rest) in zip(seeds, every, strict=True)
        ]
    far = long_context(500 if quick else 2000)
    claims.append(record("linear-15-long", {"closed form": far}))
    shown = separate(INITS[0], 0)[1]
    pages = {"jumps": shown.plot(), "learned": shown.plot_learned()}
    return Measured(pd.concat(rows), pages, claims)


def head_records(init: float, heads: np.ndarray) -> list[Record]:
    """Claim 11: rows of `held` by seed and direction."""
    asked = {
        f"aligned-init{init:g}": {"median": float(np.median(heads[..., :2]))},
        f"equal-init{init:g}": named(heads[..., 2:4].max(-1), "seed", "direction"),
        f"value-init{init:g}": named(heads[..., 4], "seed", "direction"),
    }
    return records("linear-11-", asked)


def jump_records(init: float, found: list[Plateaus]) -> list[Record]:
    """Claim 13: times of the jumps predicted from the initial weights, and actual times."""
    errors = np.abs([rest.predicted.time / rest.crossing_time - 1 for rest in found])
    order = [rest.predicted.mode.tolist() == [0, 1, 2, 3] for rest in found]
    firsts = [
        rest.crossing_time[0] / first_jump_bound(separate_heads(5, 4, std=init, seed=seed), FOUND)
        for seed, rest in enumerate(found)
    ]
    return [
        record(f"linear-13-median-init{init:g}", named(np.median(errors, 0), "jump")),
        record(f"linear-13-order-init{init:g}", named(np.array(order, dtype=float), "seed")),
        record(f"linear-13-single-init{init:g}", named(errors, "seed", "jump")),
        record(f"linear-13-bound-init{init:g}", named(np.array(firsts), "seed")),
    ]


def regression_records(init: float, distance: np.ndarray) -> list[Record]:
    """Claim 15: relative squared distance of the plateaus from eq. (22), by seed and level."""
    return [
        record(f"linear-15-median-init{init:g}", {"median": float(np.median(distance))}),
        record(f"linear-15-largest-init{init:g}", named(distance, "seed", "level")),
    ]
