"""Observations 1 and 2: accuracy of the pattern in every shipped model of both signs and of one
head; and pairs of heads that ended with one sign.

He et al. 2025, arXiv 2503.12734, section 3, which does not discuss pairs of one sign. Such a pair
is not one head split in two: its heads have QK_h = omega_h (I + A_h) on x with antisymmetric A_h
that cancel. The sum weighted by mu omega is the function of both together. Run: python -m analyses
softmax/patterns (two minutes; --quick fewer prompts)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import SETTING, Measured, Record, checkpoint, record, records
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.softmax import manifold_mu
from analyses.softmax.setting import BOTH_SIGNS, active, ends, gamma, label, paired, several, single
from mechinterp import TaskConfig, circuits
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.heads import predict


def head_rows(name: str) -> pd.DataFrame:
    """Heads of a model, with marks for strong and active ones."""
    found = label(name)
    marks = {"strong": active(name, 1.0), "active": active(name)}
    dummy = [label == "dummy" for label in found.labels]
    spread = found.circuits.omega[0].std(1) / abs(found.circuits.omega_mean[0])
    return found.to_frame().assign(model=name, spread=spread, dummy=dummy, **marks)


def sums(name: str) -> dict[str, float | str]:
    """Scales at the end of training, next to those of the solution manifold."""
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
    """Root mean square change of the predictions when the dummy heads are removed."""
    weights = checkpoint(name).weights
    kept = torch.tensor([one != "dummy" for one in label(name).labels])
    fewer = weights.of_heads({key: tensor[:, kept] for key, tensor in weights.tensors.items()})
    (prompts,) = prompt_chunks(TaskConfig(), 8192, seed=3)
    return float((predict(weights, prompts) - predict(fewer, prompts)).square().mean().sqrt())


def signs(name: str) -> float:
    """1.0 if omega and mu of every active head have the same sign."""
    found, heads = circuits(checkpoint(name)), active(name)
    return float((found.omega_mean[0] * found.mu[0, :, 0] > 0)[heads].all())


def twists(name: str) -> np.ndarray:
    """A_h: QK without its multiple of the identity, divided by that multiple, [head, x, x]."""
    found = circuits(checkpoint(name))
    omega = found.omega_mean[0, :, None, None]
    return found.QK[0, :, :5, :5] / omega - np.eye(5)


def of_one_sign(quick: bool) -> tuple[pd.DataFrame, list[Record]]:
    """Pairs that ended with one sign, whose antisymmetric parts cancel."""
    names = [n for n in several() if label(n).label == "kernel_regression"]
    n_prompts, rows = 2_000 if quick else 200_000, []
    for name in names:
        first, second = twists(name)
        sizes = np.linalg.norm([first, second], axis=(1, 2))
        found = circuits(checkpoint(name))
        weight = found.mu[0, :, 0] * found.omega_mean[0]
        remainder = np.linalg.norm((weight[:, None, None] * twists(name)).sum(0))
        (sign,) = set(label(name).labels)
        one = next(other for other in single() if label(other).labels == (sign,))
        models = {one: checkpoint(one), name: checkpoint(name)}
        losses = shared_losses(models, TaskConfig(), n_prompts=n_prompts, seed=1)
        row = {"model": name, "cosine": (first * second).sum() / sizes.prod()}
        row |= {
            "size_ratio": sizes.max() / sizes.min(),
            "left": remainder / (abs(weight) * sizes).sum(),
        }
        rows.append(row | {"gap": losses.gap[0, 1], "gap_sem": losses.gap_sem[0, 1]})
    data = pd.DataFrame(rows)
    values, over = data.set_index("model"), {"prompts": n_prompts}
    claims = [
        record("softmax-one-sign-opposite", values.cosine),
        record("softmax-one-sign-loss", values.gap, errors=values.gap_sem, over=over),
    ]
    return data, claims


def measure(quick: bool) -> Measured:
    names = single() + paired()
    heads = pd.concat([head_rows(name) for name in names])
    totals = pd.DataFrame([sums(name) for name in paired()]).set_index("model")
    over = {"selection": "seeds 8 to 11 of two heads were added to ship models that do not"}
    both = {name: float(label(name).label == "debiased_gd") for name in several()}
    dummies = heads[heads.dummy].groupby("model", sort=False)
    removed = {name: without_dummies(name) for name in dummies.groups}
    entry = heads[heads.strong].groupby("model", sort=False).ov_last_entry.min()
    asked = circuit_numbers(heads) | {"O1d-end": {name: signs(name) for name in names}}
    for id, scale in {"O1e-omega": "omega_mean", "O1e-mu": "mu_0"}.items():
        asked[id] = dummies[scale].apply(lambda values: abs(values).max())
    parts = {"homogeneous": "O2a", "zero_sum": "O2b-end", "eta": "O2c-step", "group": "O2c-group"}
    asked |= {id: totals[column] for column, id in parts.items()}
    claims = [
        record("softmax-both-signs", both, over=over),
        record("softmax-O1c-single", entry[single()]),
        record("softmax-O1e-removed", removed, over={"prompts": 8192} | BOTH_SIGNS),
        *records("softmax-", asked, over=BOTH_SIGNS),
    ]
    turned, more = of_one_sign(quick)
    data = pd.concat([heads.assign(part="heads"), turned.assign(part="one sign")])
    return Measured(data, claims=claims + more)


def circuit_numbers(heads: pd.DataFrame) -> dict[str, pd.Series]:
    """O1a to O1c, for strong and for weak heads."""
    strong = heads[heads.strong].groupby("model", sort=False)
    weak = heads[heads.active & ~heads.strong].groupby("model", sort=False)
    leak = strong.qk_y_leak.max()
    return {
        "O1a-strong": strong.qk_diagonal.min(),
        "O1a-weak": weak.qk_diagonal.min(),
        "O1a-spread": strong.spread.max(),
        "O1b": leak / [gamma(name) for name in leak.index],
        "O1c-strong": strong.ov_last_entry.min().drop(single()),
        "O1c-weak": weak.ov_last_entry.min(),
    }
