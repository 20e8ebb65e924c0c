"""Tables of docs/recurrent.md and docs/results/recurrent.md, from results/recurrent_weights.csv and results/recurrent."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from analyses.lib.result_tables import markdown
from mechinterp.analysis.number_format import narrow_cell

CLOSE = 0.98
"""R² from which on a learner explains a layer."""
CLOSE_GATE = 0.002
"""Difference of a gate from rho up to which it counts as rho."""
SCALARS = {"gated": "eta", "gated_delta": "eta", "mesa": "penalty"}
"""Scalar of a rule beside alpha."""
NAMELESS = ("undetermined", "unstructured")
FUNCTIONS = {
    "first": "calibration_first_models",
    "second": "calibration_second_models",
    "third": "calibration_third_models",
    "fourth": "calibration_models",
}
LAYERS = {
    "first": "calibration_trained_first",
    "second": "calibration_trained_second",
    "third": "calibration_trained_third",
    "fourth": "calibration_trained",
}
"""Files of the draws of the calibration along the pairs."""


def functions(results: Path) -> str:
    """Counts of each draw of functions, with the exact interval of the wrong labels among the named."""
    rows = []
    for draw, name in FUNCTIONS.items():
        table = pd.read_csv(results / "recurrent" / f"{name}.csv")
        named = table[~table.label.isin(NAMELESS)]
        members = table[table.kind == "member"]
        near = table[table.kind == "near miss"]
        rows.append(
            (
                draw,
                str(len(table)),
                str(len(named)),
                _wrong(int((named.verdict == "wrong").sum()), len(named)),
                str((named.verdict == "wrong scalars").sum()),
                f"{(members.verdict == 'missed').sum()} of {len(members)}",
                f"{(~near.label.isin(NAMELESS)).sum()} of {len(near)}",
            )
        )
    header = ("Draw", "Functions", "Named", "Wrong label (95% interval)")
    last = ("Right label, wrong scalars", "Members without label", "Near misses named")
    return markdown((*header, *last), rows)


def gates(results: Path) -> str:
    """Sentence on the gates of gated delta layers that drift, in all draws and among the shipped models."""
    tables = [pd.read_csv(results / "recurrent" / f"{name}.csv") for name in LAYERS.values()]
    drawn = pd.concat(tables).query("family == 'gated-delta' and drift < 1")[["drift", "gate"]]
    shipped = _rows(results).query("score == 'gated_delta' and drift < 1")
    shipped = shipped.rename(columns={"weights_alpha": "gate"})[["drift", "gate"]]
    layers = pd.concat([drawn, shipped])
    near = (layers.gate - layers.drift).abs() <= CLOSE_GATE
    low, high = layers.drift.min(), layers.drift.max()
    return (
        f"Gated delta layers forget by ρ: of {len(layers)} that were trained on tasks of ρ {low:.3f} to {high:.3f}, {near.sum()} have a "
        f"gate within {CLOSE_GATE} of ρ."
    )


def ends(results: Path) -> str:
    """Sentence on how far the trainings of the draws were from their end."""
    texts = []
    for draw, name in LAYERS.items():
        table = pd.read_csv(results / "recurrent" / f"{name}.csv")
        longer = (100 * (table.loss_half / table.loss - 1)).round(1) + 0.0  # no -0.0
        texts.append(f"{longer.min():.1f}% to {longer.max():.1f}% ({draw})")
    return f"After half of the updates the loss was larger by {', '.join(texts)}."


def layers(results: Path) -> str:
    """Counts of each draw of trained layers."""
    rows = []
    for draw, name in LAYERS.items():
        table = pd.read_csv(results / "recurrent" / f"{name}.csv")
        named = table[~table.label.isin(NAMELESS)]
        asked = named.scalars_right.dropna()
        read = (table.reading_verdict == "wrong").sum()
        rows.append(
            (
                draw,
                str(len(table)),
                str(len(named)),
                _wrong(int((named.verdict == "wrong").sum()), len(named)),
                f"{(~asked.astype(bool)).sum()} of {len(asked)}",
                str((table[table.label.isin(NAMELESS)].best_r2 >= CLOSE).sum()),
                _wrong(int(read), len(table)),
            )
        )
    header = ("Draw", "Layers", "Named", "Wrong label (95% interval)", "Scalars not of the weights")
    last = ("Without label though a learner explains 0.98", "Wrong class of `response`")
    return markdown((*header, *last), rows)


def _wrong(wrong: int, of: int) -> str:
    interval = binomtest(wrong, of).proportion_ci(method="exact")
    return f"{wrong} ({interval.low:.1%} to {interval.high:.1%})"


def _rows(results: Path) -> pd.DataFrame:
    return pd.read_csv(results / "recurrent_weights.csv")


def named(results: Path) -> str:
    """Label of each model, and its excess risk over the Bayes learner's."""
    rows = [
        (
            row.model,
            f"{row.drift:g}",
            f"`{row.label}`",
            row.reading,
            f"{row.r2:.4f}",
            narrow_cell(row.over_bayes, row.over_bayes_sem),
            f"{100 * (row.loss_half / row.loss - 1):.2f}%",
        )
        for row in _rows(results).itertuples()
    ]
    header = ("model", "rho", "`name_algorithm`", "class of `response`", "R² of its rule")
    return markdown((*header, "excess risk / Bayes", "loss at half the steps"), rows)


def scalars(results: Path) -> str:
    """Scalars by the weights, by the fit to predictions, and by the response."""
    rows = [_scalars(row) for row in _rows(results).itertuples()]
    header = ("model", "alpha: weights", "fit", "`response`", "second scalar", "weights", "fit")
    return markdown((*header, "`response`", "factor: weights", "fit"), rows)


def _scalars(row: Any) -> tuple[str, ...]:
    second = SCALARS[row.score]
    alpha = "gate" if row.score == "gated_delta" else "alpha"
    seen = narrow_cell(getattr(row, f"response_{alpha}"), getattr(row, f"response_{alpha}_sem"))
    step = "–"
    if row.score == "gated_delta":
        step = narrow_cell(row.response_eta, row.response_eta_sem)
    return (
        row.model,
        f"{row.weights_alpha:.4f}",
        f"{row.named_alpha:.4f}",
        seen,
        second,
        f"{getattr(row, f'weights_{second}'):.4f}",
        f"{getattr(row, f'named_{second}'):.4f}",
        step,
        "1" if np.isnan(row.weights_factor) else f"{row.weights_factor:.3f}",
        f"{row.named_factor:.3f}",
    )
