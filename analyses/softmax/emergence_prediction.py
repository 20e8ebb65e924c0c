"""Prediction of the outcome of two heads from their initial weights, fitted on half of the seeds
and tested on the other.

Run: python -m analyses softmax/emergence_prediction (seconds; --quick changes nothing). Reads
    results/softmax_emergence_seeds.csv and recomputes the initial weights from the seeds. Near zero
    a head grows along g = mu + c omega, with its sign; two heads whose g have the same sign are at
    risk. The weight c is chosen on the even seeds. The odd seeds measure how well sign(g_0 g_1) and
    the product itself predict which pairs keep one sign."""

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from analyses.lib import RESULTS, Measured, record
from mechinterp import override, preset
from mechinterp.training.one_layer.step import initial_weights

WEIGHTS = np.geomspace(0.1, 100, 61)


def growth(seeds: np.ndarray, weight: float) -> np.ndarray:
    """g = mu + weight * omega of both heads, [seed, head]."""
    configs = [override(preset("softmax-h2"), f"seed={seed}") for seed in seeds]
    models = [initial_weights(config) for config in configs]
    return np.array([(m.mu[:, 0] + weight * m.omega.mean(1)).tolist() for m in models])


def measure(quick: bool) -> Measured:
    rows = pd.read_csv(RESULTS / "softmax_emergence_seeds.csv")
    rows = rows[(rows.arm == "adam") & (rows.n_heads == 2)]
    last = rows[rows.step == rows.step.max()].sort_values("seed")
    seeds, stuck = last.seed.to_numpy(), last.one_sign.to_numpy()
    omega, mu = growth(seeds, 1.0) - growth(seeds, 0.0), growth(seeds, 0.0)
    fitted, tried = seeds % 2 == 0, seeds % 2 == 1
    areas = [roc_auc_score(stuck[fitted], (mu + c * omega).prod(1)[fitted]) for c in WEIGHTS]
    weight = float(WEIGHTS[np.argmax(areas)])
    g = mu + weight * omega
    product = (g.prod(1) / np.abs(g.prod(1)).mean())[:, None]
    model = LogisticRegression().fit(product[fitted], stuck[fitted])
    found = {
        "weight": weight,
        "auc_fitted": max(areas),
        "auc": roc_auc_score(stuck[tried], product[tried]),
        "accuracy": model.score(product[tried], stuck[tried]),
        "accuracy_of_never": 1 - stuck[tried].mean(),
    }
    for name, chosen in (("same", g.prod(1) > 0), ("opposite", g.prod(1) < 0)):
        there = stuck[tried & chosen]
        interval = binomtest(int(there.sum()), len(there)).proportion_ci(method="wilson")
        found |= {f"{name}_seeds": len(there), f"{name}_stuck": int(there.sum())}
        found |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    foretold = record(
        "softmax-emergence-foretold",
        {"odd seeds": found["auc"]},
        over={"seeds": int(tried.sum()), "selection": "weight chosen on the even seeds"},
    )
    table = pd.DataFrame(found.items(), columns=["number", "value"])
    return Measured(table, claims=[foretold])
