"""Figure 11: heads of rank R learn R neighbouring directions each, with one value weight and
orthogonal keys.

Zhang et al. 2025, arXiv 2501.16265, figure 11: 9 heads in eight dimensions, as figure 4. Rows of K
and Q are defined up to a common rotation. The structure is therefore read from norms and from v K^T
Q, a head's share in every direction.
Run: python -m analyses linear/figure_11_rank_structure (half a minute; --quick 1 seed)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, record
from analyses.lib.plateaus import crossings
from analyses.lib.theory.linear_jumps import residence_in_head, settled_head
from analyses.linear.figure_4_ranks import EIGHT, MODES
from analyses.linear.setting import FOUND, INITS, named, trained
from mechinterp import heatmaps
from mechinterp.theory.linear import separate_heads

RANKS, INIT = (2, 4, 8), 1e-3


def weights(rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys at the end of training in the eigenbasis, [head, rank, mode], and shares of heads in
    directions.

    Two more columns of shares are the errors of |v| and of |K e_d| and |Q e_d|, relative to the
    values that follow from these shares."""
    heads = trained(separate_heads(9, 8, std=INIT, seed=seed, rank=rank), EIGHT).heads
    v, K, Q = heads.v[-1], heads.K[-1] @ MODES.vectors, heads.Q[-1] @ MODES.vectors
    share, off = v[:, None] * (K * Q).sum(1) / MODES.targets, np.zeros((9, 2))
    for head in np.flatnonzero((share > 0.5).any(1)):
        held = share[head] > 0.1
        size, norms = settled_head((share[head] * MODES.targets)[held])
        found = [np.linalg.norm(part[head], axis=0)[held] for part in (K, Q)]
        off[head] = abs(abs(v[head]) / size - 1), np.abs(np.array(found) / norms - 1).max()
    return K, np.concatenate([share, off], axis=1)


def neighbours(share: np.ndarray, rank: int) -> bool:
    """True if the heads hold directions 1 to R, R + 1 to 2 R and so on, with a share above 0.9
    each."""
    blocks = sorted(tuple(np.flatnonzero(row > 0.9)) for row in share if (row > 0.9).any())
    return blocks == [tuple(range(first, first + rank)) for first in range(0, 8, rank)]


def stays(seed: int) -> np.ndarray:
    """Residence times at the levels, [init, level], in four dimensions with three heads of rank
    two."""
    runs = [trained(separate_heads(3, 4, std=init, seed=seed, rank=2)) for init in INITS]
    return np.array([np.diff(crossings(one, FOUND.levels), prepend=0.0) for one in runs])


def measure(quick: bool) -> Measured:
    seeds, claims, frames = range(1 if quick else 5), [], []
    pages, names = {}, [f"direction {m}" for m in range(1, 9)]
    for rank in RANKS:
        every = [weights(rank, seed) for seed in seeds]
        shares = np.array([share for _, share in every])
        off = np.array([share[:, 8:].max() for share in shares])
        blocks = np.array([float(neighbours(share[:, :8], rank)) for share in shares])
        claims += [
            record(f"linear-rank{rank}-neighbours", named(blocks, "seed")),
            record(f"linear-rank{rank}-norms", named(off, "seed")),
        ]
        frames += [
            pd.DataFrame(share[:, :8], columns=names).assign(rank=rank, seed=seed, head=range(9))
            for seed, (_, share) in zip(seeds, every, strict=True)
        ]
        active = np.flatnonzero((shares[0, :, :8] > 0.5).any(1))
        rows = [f"head {head}, row {row}" for head in active for row in range(1, rank + 1)]
        keys, title = every[0][0][active], f"Keys of the rank-{rank} heads that hold a direction"
        keys = keys.reshape(-1, 8)
        pages[title] = heatmaps.heatmap(keys, title=title, rows=rows, columns=names)
        title = f"Share of rank-{rank} heads in every direction"
        heads = [f"head {h}" for h in range(9)]
        pages[title] = heatmaps.heatmap(shares[0, :, :8], title=title, rows=heads, columns=names)
    slow, fast = np.moveaxis(np.array([stays(seed) for seed in seeds]), 1, 0)[::-1]
    ratio, rise = slow / fast, slow - fast
    waits = [[residence_in_head(FOUND, a, a + 1, scale=s) for s in INITS] for a in (0, 2)]
    expected = np.diff(waits)[:, 0]
    miss = np.abs(rise[:, [1, 3]] / expected - 1)
    claims += [
        record("linear-16-ten-four-dimensions", named(ratio[:, [0, 2]], "seed", "level")),
        record("linear-16-constant", named(miss, "seed", "level")),
    ]
    return Measured(pd.concat(frames), pages, claims)
