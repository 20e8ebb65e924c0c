"""The 2^D fixed points of training: their losses, the force on heads there, and a search for
others.

Zhang et al. 2025, arXiv 2501.16265, section 4.2 and eq. (19). The search solves for zero force on
all weights, from random weights. Run: python -m analyses linear/fixed_points (a minute; --quick 40
starts)"""

from itertools import combinations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from analyses.lib import Measured, records
from analyses.lib.theory.linear import fixed_point, fixed_point_loss
from analyses.linear.setting import LENGTH, NORMS, TURNED
from mechinterp.theory.linear import SeparateHeads, modes, population_moments

SHAPES = ((2, 3, 1), (2, 2, 2), (3, 4, 1))  # D (eigenvalues D/5 to 1/5), number of heads, rank
TIGHT = {"method": "lm", "max_nfev": 100, "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}


def subset_row(subset: tuple[int, ...]) -> dict[str, float | str]:
    """Loss at M(S), its formula, and the largest force on heads that hold one direction of S each."""
    found, rows = modes(TURNED), list(subset)
    M, keys = fixed_point(found, subset), (NORMS[rows, None] * found.vectors[:, rows].T)[:, None]
    pull = SeparateHeads(v=NORMS[rows], K=keys, Q=keys).velocity(TURNED.gradient(M))
    force = max(np.abs(part).max(initial=0) for part in (pull.v, pull.K, pull.Q))
    name = "{" + ", ".join(str(mode + 1) for mode in subset) + "}"
    row = {"learned": name, "n_learned": len(rows), "loss": float(TURNED.loss(M))}
    return row | {"formula": fixed_point_loss(found, subset), "force": float(force)}


def search(d_x: int, n_heads: int, rank: int, n_starts: int) -> np.ndarray:
    """f_d and the largest off-diagonal entry of M at the end of each search, [end, D + 1]."""
    moments = population_moments(np.arange(d_x, 0, -1) / 5, context_length=LENGTH)
    found, rng, ends = modes(moments), np.random.default_rng(0), []
    zz, cuts = moments.zz.reshape(d_x**2, -1), n_heads * np.array([1, 1 + rank * d_x])

    def parts(flat: np.ndarray) -> tuple[np.ndarray, ...]:
        v, K, Q = np.split(flat, cuts)
        v, K, Q = v.repeat(rank)[:, None], K.reshape(-1, d_x), Q.reshape(-1, d_x)
        return v, K, Q, (v * K).T @ Q

    def pull(flat: np.ndarray) -> np.ndarray:
        v, K, Q, M = parts(flat)
        force = moments.yz - (zz @ M.ravel()).reshape(d_x, d_x)
        key, query = Q @ force.T, K @ force
        slopes = ((K * key).reshape(n_heads, -1).sum(1), v * key, v * query)
        return np.concatenate([one.ravel() for one in slopes])

    for _ in range(n_starts):
        start = rng.uniform(0.1, 2) * rng.standard_normal(n_heads * (1 + 2 * rank * d_x))
        end = least_squares(pull, start, **TIGHT)
        if np.abs(end.fun).max() < 1e-9:
            M = parts(end.x)[3]
            ends.append([*found.learned(M), np.abs(M - np.diag(np.diag(M))).max()])
    return np.array(ends)


def miss(ends: np.ndarray) -> float:
    """Largest distance of the search's ends from a function that holds a subset of directions."""
    learned = ends[:, :-1]
    off = np.minimum(np.abs(learned), np.abs(learned - 1))
    return float(max(off.max(), ends[:, -1].max()))


def measure(quick: bool) -> Measured:
    n_starts = 40 if quick else 300
    subsets = [subset for count in range(5) for subset in combinations(range(4), count)]
    data = pd.DataFrame([subset_row(subset) for subset in subsets])
    off = (data.loss - data.formula).abs()
    asked = {"levels": dict(zip(data.learned, off, strict=True))}
    asked["force"] = dict(zip(data.learned, data.force, strict=True))
    searched = {"functions": {}, "others": {}}
    for d, n_heads, rank in SHAPES:
        ends, name = search(d, n_heads, rank, n_starts), f"D = {d}, {n_heads} heads of rank {rank}"
        searched["functions"][name] = len(np.unique(ends[:, :-1].round(), axis=0)) / 2**d
        searched["others"][name] = miss(ends)
    claims = records("linear-4-", asked) + records("linear-4-", searched, over={"starts": n_starts})
    return Measured(data, claims=claims)
