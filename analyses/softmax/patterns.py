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
from analyses.lib.records import Record
from analyses.softmax.setting import BOTH_SIGNS, active, ends, gamma, label, paired, several, single
from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.heads import predict
from mechinterp.theory.softmax import debiased_step_size, manifold_mu

MODELS = "softmax-h1-s*, those of both signs"


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
    common = {"models": MODELS, "over": BOTH_SIGNS}
    return [
        Record(
            id="softmax-both-signs",
            statement="several heads end with both signs, as a debiased step",
            relation="equal to",
            bound=1,
            models="softmax-h2-s*, softmax-h3-s*, softmax-h4-s*, softmax-h8-s*",
            values=both,
            over={"selection": "seeds 8 to 11 of two heads were added to ship models that do not"},
        ),
        Record(
            id="softmax-O1a-strong",
            statement="QK is diagonal in heads of |mu| > 1",
            quantity="least cosine with its diagonal",
            relation="at least",
            bound=0.99,
            values=strong.qk_diagonal.min(),
            **common,
        ),
        Record(
            id="softmax-O1a-weak",
            statement="QK is diagonal in the other active heads",
            quantity="least cosine with its diagonal",
            relation="at least",
            bound=0.95,
            values=weak.qk_diagonal.min(),
            **common,
        ),
        Record(
            id="softmax-O1a-spread",
            statement="the diagonal is one number in heads of |mu| > 1",
            quantity="largest standard deviation over mean",
            relation="at most",
            bound=0.06,
            values=strong.spread.max(),
            **common,
        ),
        Record(
            id="softmax-O1b",
            statement="no query looks at a y",
            quantity="largest entry of heads of |mu| > 1, relative to gamma",
            relation="at most",
            bound=0.05,
            values=leak,
            **common,
        ),
        Record(
            id="softmax-O1c-strong",
            statement="only y is read, heads of |mu| > 1, two heads and more",
            quantity="least |mu| over the norm of OV",
            relation="at least",
            bound=0.999,
            models="those of both signs",
            values={name: value for name, value in entry.items() if name not in single()},
            over=BOTH_SIGNS,
        ),
        Record(
            id="softmax-O1c-weak",
            statement="the same in the other active heads",
            quantity="least |mu| over the norm of OV",
            relation="at least",
            bound=0.999,
            models="those of both signs",
            values=weak.ov_last_entry.min(),
            over=BOTH_SIGNS,
        ),
        Record(
            id="softmax-O1c-single",
            statement="only y is read, one head",
            quantity="|mu| over the norm of OV",
            relation="at least",
            bound=0.998,
            models="softmax-h1-s*",
            values={name: value for name, value in entry.items() if name in single()},
        ),
        Record(
            id="softmax-O1d-end",
            statement="omega and mu have one sign in every active head at the end",
            relation="equal to",
            bound=1,
            values={name: signs(name) for name in names},
            **common,
        ),
    ]


def dummy_records(heads: pd.DataFrame) -> list[Record]:
    dummies = heads[heads.dummy].groupby("model", sort=False)
    scales = {"omega": dummies.omega_mean, "mu": dummies.mu_0}
    common = {"models": "those of both signs with a dummy head", "over": BOTH_SIGNS}
    found = [
        Record(
            id=f"softmax-O1e-{name}",
            statement="dummy heads have no scales",
            quantity=f"largest |{name}|",
            relation="below",
            bound=0.02,
            values=values.apply(lambda one: abs(one).max()),
            **common,
        )
        for name, values in scales.items()
    ]
    removed = Record(
        id="softmax-O1e-removed",
        statement="dummy heads are not missed",
        quantity="change of predictions without them, rms (y)",
        relation="below",
        bound=0.01,
        values={name: without_dummies(name) for name in dummies.groups},
        models=common["models"],
        over={"prompts": 8192} | BOTH_SIGNS,
    )
    return [*found, removed]


def sum_records(totals: pd.DataFrame) -> list[Record]:
    eta = debiased_step_size(**SETTING)
    common = {"models": "those of both signs", "over": BOTH_SIGNS}
    return [
        Record(
            id="softmax-O2a",
            statement="|omega| is the same for all active heads",
            quantity="largest over least",
            relation="at most",
            bound=1.12,
            values=totals.homogeneous,
            **common,
        ),
        Record(
            id="softmax-O2b-end",
            statement="mu sums to zero at the end",
            quantity="|sum mu| / sum |mu|",
            relation="at most",
            bound=0.03,
            values=totals.zero_sum,
            **common,
        ),
        Record(
            id="softmax-O2c-step",
            statement="sum mu omega is the best step, 1/(1 + (1 + s^2) d/L), within 2%",
            relation="between",
            bound=(0.98 * eta, 1.02 * eta),
            paper=f"{eta:.4f}",
            values=totals.eta,
            **common,
        ),
        Record(
            id="softmax-O2c-group",
            statement="mu of the positive heads sum to that of the solution manifold, within 3%",
            quantity="relative difference",
            relation="between",
            bound=(-0.03, 0.03),
            values=totals.group,
            **common,
        ),
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
