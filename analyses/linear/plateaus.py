"""At the rests of separate heads: alignment, principal component regression, and the jumps foretold
before training.

Zhang et al. 2025, arXiv 2501.16265, eq. (20) and (22); jump times from the initial weights are
derived here. Run: python -m analyses.linear.plateaus (seconds; --quick 2 seeds)
"""

import numpy as np
import pandas as pd
import torch

from analyses.lib.measured import Measured, run
from analyses.lib.records import Record
from analyses.linear.setting import EIGENVALUES, FOUND, INITS, NORMS, named, separate, task
from mechinterp.analysis.training.plateaus import Plateaus
from mechinterp.icl.predictors import one_step_pcr
from mechinterp.theory.linear_heads import separate_heads
from mechinterp.theory.linear_jumps import first_jump_bound
from mechinterp.training.linear.descent import training_set
from mechinterp.training.linear.flow import Flow


def held(found: Flow, rests: Plateaus) -> np.ndarray:
    """Of the head that holds the newest direction at each rest: alignment and norms.

    Columns: 1 - |cos| of key and of query with the eigenvector, | |k| / |v| - 1 | of both, | |v| /
    v_inf - 1 |.
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
        every = [separate(init, seed) for seed in seeds]
        heads = np.array([held(*one) for one in every])
        claims += head_records(init, norm, heads)
        claims += jump_records(init, jump, [rest for _, rest in every])
        claims += regression_records(init, pcr, np.array([rest.pcr_distance for _, rest in every]))
        rows += [
            rest.to_frame().assign(init=init, seed=seed)
            for seed, (_, rest) in zip(seeds, every, strict=True)
        ]
    far = long_context(500 if quick else 2000)
    claims.append(
        Record(
            id="linear-15-long",
            statement="eq. (22) tends to w^T P_m x, at N = 1,000",
            quantity="largest mean squared distance over m",
            relation="below",
            bound=0.006,
            models="closed form, on prompts",
            values={"closed form": far},
        )
    )
    shown = separate(INITS[0], 0)[1]
    return Measured(
        pd.concat(rows), {"jumps": shown.plot(), "learned": shown.plot_learned()}, claims
    )


def head_records(init: float, norm: float, heads: np.ndarray) -> list[Record]:
    """Claim 11: rows of `held` by seed and direction."""
    common = {"relation": "below", "models": f"5 heads, {len(heads)} seeds, init {init:g}"}
    return [
        Record(
            id=f"linear-11-aligned-init{init:g}",
            statement="key and query of a direction's head align with it",
            quantity="median of 1 - |cos|",
            bound=1e-3,
            values={"median": float(np.median(heads[..., :2]))},
            **common,
        ),
        Record(
            id=f"linear-11-equal-init{init:g}",
            statement="and have the norm of v",
            quantity="largest relative difference",
            bound=norm,
            values=named(heads[..., 2:4].max(-1), "seed", "direction"),
            **common,
        ),
        Record(
            id=f"linear-11-value-init{init:g}",
            statement="|v| is m_d^(1/3)",
            quantity="relative difference",
            bound=0.03,
            paper=", ".join(f"{one:.4f}" for one in NORMS),
            values=named(heads[..., 4], "seed", "direction"),
            **common,
        ),
    ]


def jump_records(init: float, bound: float, found: list[Plateaus]) -> list[Record]:
    """Claim 13: when the initial weights say that jumps come, and when they do."""
    errors = np.abs([rest.predicted.time / rest.crossing_time - 1 for rest in found])
    order = [rest.predicted.mode.tolist() == [0, 1, 2, 3] for rest in found]
    firsts = [
        rest.crossing_time[0] / first_jump_bound(separate_heads(5, 4, std=init, seed=seed), FOUND)
        for seed, rest in enumerate(found)
    ]
    common = {"models": f"5 heads, {len(found)} seeds, init {init:g}", "tag": "ours"}
    return [
        Record(
            id=f"linear-13-median-init{init:g}",
            statement="jumps are predicted from the initial weights",
            quantity="median relative error of each",
            relation="below",
            bound=bound,
            values=named(np.median(errors, 0), "jump"),
            **common,
        ),
        Record(
            id=f"linear-13-order-init{init:g}",
            statement="and so is their order",
            relation="equal to",
            bound=1,
            values=named(np.array(order, dtype=float), "seed"),
            **common,
        ),
        Record(
            id=f"linear-13-single-init{init:g}",
            statement="the same for every single jump",
            quantity="relative error",
            relation="below",
            bound=bound,
            values=named(errors, "seed", "jump"),
            **common,
        ),
        Record(
            id=f"linear-13-bound-init{init:g}",
            statement="no first jump comes before tau sqrt(3) / (lambda_1^2 max |theta|)",
            quantity="its time over that bound",
            relation="above",
            bound=1,
            values=named(np.array(firsts), "seed"),
            **common,
        ),
    ]


def regression_records(init: float, worst: float, distance: np.ndarray) -> list[Record]:
    """Claim 15: relative squared distance of rests from eq. (22), by seed and level."""
    common = {"relation": "below", "models": f"5 heads, {len(distance)} seeds, init {init:g}"}
    return [
        Record(
            id=f"linear-15-median-init{init:g}",
            statement="rests are principal component regression, eq. (22)",
            quantity="median relative squared distance",
            bound=1e-6,
            values={"median": float(np.median(distance))},
            **common,
        ),
        Record(
            id=f"linear-15-largest-init{init:g}",
            statement="so is every single rest",
            quantity="relative squared distance",
            bound=worst,
            values=named(distance, "seed", "level"),
            **common,
        ),
    ]


if __name__ == "__main__":
    run(measure, __file__)
