"""Figure 14: merged heads trained on a mixture of in-context and in-weight sequences.

Zhang et al. 2025, arXiv 2501.16265, figure 14, in the setting of the published code: 8 heads with
all their weights, x ~ N(0, I/4), 5,000 sequences, full-batch descent at rate 0.0005 without 1/N,
weights from N(0, 1e-6^2). In-weight sequences share one task vector of norm 2. If no sequence is in
context, and in the in-weight test, their context labels are noise. The paper's numbers are read
from an image. Run: python -m analyses linear/figure_14_mixtures (half a minute; --quick 1 set)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, record
from analyses.lib.records import span
from analyses.linear.setting import page

FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
D, N, HEADS, SIZE, RATE, STEPS, EVERY = 4, 31, 8, 5000, 5e-4, 5000, 10
LOSSES = ("training", "in_context", "in_weight")
# Numbers read from the image by fraction in context, with the reading error.
READ = {
    "lowest in-weight loss": ({0.2: 0.26, 0.4: 0.35, 0.6: 0.46, 0.8: 0.64}, 0.02),
    "step of the lowest in-weight loss": ({0.2: 950, 0.4: 1200, 0.6: 1650, 0.8: 2250}, 50),
    "highest in-context loss": ({0.2: 1.25, 0.4: 1.09}, 0.02),
    "step at half of the drop in training": ({0.0: 750, 1.0: 2950}, 50),
    "training loss at the end": ({0.0: 0.06, 1.0: 0.14}, 0.02),
    "in-context loss at the end": ({0.0: 2.25, 0.2: 0.25, 1.0: 0.14}, 0.02),
    "in-weight loss at the end": ({0.0: 0.06, 0.6: 1.1, 1.0: 1.12}, 0.02),
}


def sequences(rng: np.random.Generator, fraction: float, *, noise: bool) -> tuple[np.ndarray, ...]:
    """Moments of a set: E y^2, E y phi and E phi phi^T with phi = X X^T (x) x_query; the first part
    is in context."""
    x, labels = rng.standard_normal((SIZE, N + 1, D)) / D**0.5, rng.standard_normal((SIZE, N))
    w, inside = rng.standard_normal((SIZE, D)), int(fraction * SIZE)
    w[inside:] = 2 * np.eye(D)[0]
    y = np.einsum("bnd,bd->bn", x, w)
    target, y[:, -1] = y[:, -1].copy(), 0
    if noise:
        y[inside:, :-1] = labels[inside:]
    X = np.concatenate([x, y[..., None]], 2)
    phi = np.einsum("bni,bnj,bk->bijk", X, X, x[:, -1], optimize=True).reshape(SIZE, -1)
    return np.mean(target**2), target @ phi / SIZE, phi.T @ phi / SIZE


def descent(fraction: float, seed: int) -> pd.DataFrame:
    """Losses of heads a_i^T X X^T B_i x_query, where a_i and B_i are all weights that affect the
    output."""
    rng, rows = np.random.default_rng(seed), []
    a, B = (1e-6 * rng.standard_normal((HEADS, *shape)) for shape in ((D + 1,), (D + 1, D)))
    train = sequences(rng, fraction, noise=fraction == 0)
    every = (train, *(sequences(rng, part, noise=True) for part in (1.0, 0.0)))
    for step in range(STEPS + 1):
        t = np.einsum("hi,hjk->ijk", a, B).ravel()
        if step % EVERY == 0:
            rows.append((step, *(yy - 2 * yphi @ t + t @ square @ t for yy, yphi, square in every)))
        pull = 2 * RATE * (train[1] - train[2] @ t).reshape(D + 1, D + 1, D)
        a, B = a + np.einsum("ijk,hjk->hi", pull, B), B + np.einsum("ijk,hi->hjk", pull, a)
    return pd.DataFrame(rows, columns=["step", *LOSSES])


def summary(one: pd.DataFrame) -> list[float]:
    """The numbers of READ for one run."""
    lowest, end = one.loc[one.in_weight.idxmin()], one.iloc[-1]
    half = one.step[(one.training < (one.training.iloc[0] + end.training) / 2).idxmax()]
    return [lowest.in_weight, lowest.step, one.in_context.max(), half, *end.iloc[1:]]


def measure(quick: bool) -> Measured:
    sets, claims = range(1 if quick else 10), []
    runs = {(part, seed): descent(part, seed) for part in FRACTIONS for seed in sets}
    found = pd.DataFrame([summary(one) for one in runs.values()], index=runs, columns=list(READ))
    for name, (read, error) in READ.items():
        ours = {part: found.loc[part, name] for part in read}
        away = {
            f"{part:.0%}": max(0.0, ours[part].min() - value, value - ours[part].max())
            for part, value in read.items()
        }
        show = ".0f" if error > 1 else ".2f"
        texts = [f"{read[part]:g} beside {span(one, show)}" for part, one in ours.items()]
        id = f"linear-mixture-{'-'.join(name.split())}"
        claims.append(record(id, away, text="; ".join(texts)))
    first = {part: runs[part, 0] for part in FRACTIONS}
    pages = {
        name: page(
            first[1.0].step.to_numpy(),
            {f"{part:.0%} in context": one[name].to_numpy() for part, one in first.items()},
            f"{name.replace('_', '-').capitalize()} loss of merged heads on mixtures",
            x_title="step",
            levels=(),
        )
        for name in LOSSES
    }
    return Measured(found.rename_axis(["in_context_part", "set"]).reset_index(), pages, claims)
