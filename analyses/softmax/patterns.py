"""Observations 1 and 2: how exact the pattern is in every shipped model of both signs, and of one
head.

He et al. 2025, arXiv 2503.12734, section 3. Run: python -m analyses.softmax.patterns (half a
minute)
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from analyses.lib.measured import SETTING, Measured, checkpoint, run
from analyses.lib.records import Record, record
from analyses.softmax.setting import BOTH_SIGNS, active, ends, gamma, label, paired, several, single
from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.heads import predict
from mechinterp.theory.softmax import manifold_mu


def head_rows(name: str) -> pd.DataFrame:
    """The heads of a model, strong and active ones marked."""
    found = label(name)
    marks = {"strong": active(name, 1.0), "active": active(name)}
    dummy = [label == "dummy" for label in found.labels]
    spread = found.circuits.omega.std(1) / abs(found.circuits.omega_mean)
    return found.to_frame().assign(model=name, spread=spread, dummy=dummy, **marks)


def sums(name: str) -> dict[str, float | str]:
    """Scales at the end, beside those of the solution manifold."""
    omega, mu = ends(name)
    used = abs(omega[active(name)])
    return {
        "model": name,
        "homogeneous": used.max() / used.min(),
        "zero_sum": abs(mu.sum()) / abs(mu).sum(),
        "eta": mu @ omega,
        "group": mu.clip(min=0).sum() / manifold_mu(gamma(name), **SETTING) - 1,
    }


def without_dummies(name: str) -> float:
    """Root mean square by which predictions change if the dummy heads are removed."""
    weights = checkpoint(name).weights.circuits
    kept = torch.tensor([one != "dummy" for one in label(name).labels])
    fewer = weights.with_tensors({key: tensor[kept] for key, tensor in weights.tensors.items()})
    (prompts,) = prompt_chunks(TaskConfig(), 8192, seed=3)
    return float((predict(weights, prompts) - predict(fewer, prompts)).square().mean().sqrt())


def signs(name: str) -> float:
    """Whether omega and mu of every active head have one sign."""
    found, heads = circuits(checkpoint(name)), active(name)
    return float((found.omega_mean * found.mu[:, 0] > 0)[heads].all())


def measure(quick: bool) -> Measured:
    names = single() + paired()
    heads = pd.concat([head_rows(name) for name in names])
    totals = pd.DataFrame([sums(name) for name in paired()]).set_index("model")
    return Measured(
        heads,
        {"metrics": page(heads)},
        [*circuit_records(heads, names), *dummy_records(heads), *sum_records(totals)],
    )


def circuit_records(heads: pd.DataFrame, names: list[str]) -> list[Record]:
    strong = heads[heads.strong].groupby("model", sort=False)
    weak = heads[heads.active & ~heads.strong].groupby("model", sort=False)
    leak = strong.qk_y_leak.max()
    leak = {name: leak[name] / gamma(name) for name in leak.index}
    entry = strong.ov_last_entry.min()
    both = {name: float(label(name).pattern == "debiased_gd") for name in several()}
    over = BOTH_SIGNS
    return [
        record(
            "softmax-both-signs",
            both,
            over={"selection": "seeds 8 to 11 of two heads were added to ship models that do not"},
        ),
        record("softmax-O1a-strong", strong.qk_diagonal.min(), over=over),
        record("softmax-O1a-weak", weak.qk_diagonal.min(), over=over),
        record("softmax-O1a-spread", strong.spread.max(), over=over),
        record("softmax-O1b", leak, over=over),
        record(
            "softmax-O1c-strong",
            {name: value for name, value in entry.items() if name not in single()},
            over=BOTH_SIGNS,
        ),
        record("softmax-O1c-weak", weak.ov_last_entry.min(), over=BOTH_SIGNS),
        record(
            "softmax-O1c-single", {name: value for name, value in entry.items() if name in single()}
        ),
        record("softmax-O1d-end", {name: signs(name) for name in names}, over=over),
    ]


def dummy_records(heads: pd.DataFrame) -> list[Record]:
    dummies = heads[heads.dummy].groupby("model", sort=False)
    scales = {"omega": dummies.omega_mean, "mu": dummies.mu_0}
    over = BOTH_SIGNS
    found = [
        record(f"softmax-O1e-{name}", values.apply(lambda one: abs(one).max()), over=over)
        for name, values in scales.items()
    ]
    removed = record(
        "softmax-O1e-removed",
        {name: without_dummies(name) for name in dummies.groups},
        over={"prompts": 8192} | BOTH_SIGNS,
    )
    return [*found, removed]


def sum_records(totals: pd.DataFrame) -> list[Record]:
    over = BOTH_SIGNS
    return [
        record("softmax-O2a", totals.homogeneous, over=over),
        record("softmax-O2b-end", totals.zero_sum, over=over),
        record("softmax-O2c-step", totals.eta, over=over),
        record("softmax-O2c-group", totals.group, over=over),
    ]


def page(heads: pd.DataFrame) -> go.Figure:
    means = heads[heads.active].groupby("model", sort=False)[["qk_diagonal", "ov_last_entry"]].min()
    bars = {
        "QK diagonal": means.qk_diagonal.to_numpy(),
        "OV last entry": means.ov_last_entry.to_numpy(),
    }
    return figures.bars(
        list(means.index),
        bars,
        title="Least cosine of an active head with the pattern",
        y_title="part of the norm",
        errors={name: np.zeros(len(means)) for name in bars},
    )


if __name__ == "__main__":
    run(measure, __file__)
