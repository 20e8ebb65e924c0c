"""Figures 16 to 19 and table 2: one to five heads for two tasks, modes I to IV.

He et al. 2025, arXiv 2503.12734, figures 16 to 19, and table 2: omega on the three groups of
coordinates, and mu, of a three-head model. Mode I is one head for both tasks, II a pair for both,
III a pair for each, IV three heads in superposition. d_x 6, supports {0, 1, 2, 3} and {2, 3, 4, 5},
L 48. `two-tasks-*` have independent task vectors with unit variance per entry and a query without
noise, as in the published code; `shared-tasks-*` have one task vector, as in the paper's
definition.
Run: python -m analyses softmax/figures_16_to_19_modes (seconds)"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, checkpoint, record, records, trained
from analyses.softmax.setting import circuit_pages
from mechinterp import classify
from mechinterp.analysis.one_layer.classification import Classification

ON = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=bool)
OVERLAP = np.array([0, 0, 1, 1, 0, 0], dtype=bool)
SUFFIX = {"two-tasks": "", "shared-tasks": "-shared"}
"""Suffix of the ids of claims."""
GROUPS = {"omega_first": [0, 1], "omega_second": [4, 5], "omega_shared": [2, 3]}
# Published table 2, per head: omega on {0, 1}, {4, 5} and {2, 3}, then mu of both tasks.
PAPER = np.array(
    [
        [-0.0316, -0.0689, -0.0893, -3.9911, -7.0742],
        [0.0779, 0.0000, 0.0870, 6.9204, 2.3371],
        [-0.0837, 0.0927, 0.0152, -2.8739, 4.7399],
    ]
)
Found = Mapping[str, Classification]
Measure = Callable[[Classification], float]


def labels(n_heads: int, convention: str) -> dict[str, Classification]:
    """Classifications of all seeds."""
    return {name: classify(checkpoint(name)) for name in trained(f"{convention}-h{n_heads}-s*")}


def eta(name: str) -> float:
    """Best debiased step on one support: 1 / (1 + (|S| + s^2 / beta_var) / L)."""
    task = checkpoint(name).config.task
    return 1 / (1 + (4 + task.noise_var / task.beta_variance) / task.context_length)


def overlap_ratio(omega: np.ndarray) -> float:
    """Mean |omega| on the overlap of the supports, divided by the mean elsewhere."""
    return float(abs(omega)[OVERLAP].mean() / abs(omega)[~OVERLAP].mean())


def group_means(found: Classification) -> np.ndarray:
    """Mean omega of every group, [head, group]."""
    return np.stack([found.circuits.omega[0][:, one].mean(1) for one in GROUPS.values()], 1)


def both_signs(found: Classification) -> float:
    """1.0 if some head has entries of both signs in omega (over groups) or in mu."""
    rows = (*group_means(found), *found.circuits.mu[0])
    return float(any(row.min() < 0 < row.max() for row in rows))


def group_spread(found: Classification) -> float:
    """Largest range of a head's omega within a group of coordinates."""
    return max(
        float(np.ptp(found.circuits.omega[0][:, group], axis=1).max()) for group in GROUPS.values()
    )


def is_pattern(pattern: str) -> Measure:
    return lambda found: float(found.label == pattern)


ASKED: dict[tuple[str, int], dict[str, Measure]] = {
    ("M-I", 1): {
        "smoother": is_pattern("kernel_regression"),
        "mu": lambda found: abs(found.circuits.mu[0, 0, 0] / found.circuits.mu[0, 0, 1] - 1),
        "omega": lambda found: overlap_ratio(found.circuits.omega[0, 0]),
    },
    ("M-II", 2): {
        "pair": is_pattern("weighted_preconditioned_gd"),
        "zero-sum": lambda found: found.scales.zero_sum,
    },
    **{
        ("M-III", n_heads): {
            "pairs": is_pattern("task_heads"),
            "zero-sum": lambda found: abs(found.circuits.mu[0].sum(0)).max(),
        }
        for n_heads in (4, 5)
    },
    ("M-IV", 3): {
        "superposition": is_pattern("superposition"),
        "mu": lambda found: abs(found.circuits.mu).min(),
        "signs": both_signs,
        "groups": group_spread,
    },
}
"""Quantities that are measured for each model, by mode and number of heads."""


def theta(found: Found) -> dict[str, dict[str, float]]:
    """Distance of theta_n from eta on the task's support, and from 0 elsewhere."""
    steps = {name: abs(one.scales.theta[ON] - eta(name)).max() for name, one in found.items()}
    others = {name: abs(one.scales.theta[~ON]).max() for name, one in found.items()}
    return {"on": steps, "off": others}


def of_mode(mode: str, n_heads: int, convention: str, found: Found) -> list[Record]:
    values = {
        name: {model: how(one) for model, one in found.items()}
        for name, how in ASKED[mode, n_heads].items()
    }
    if mode in ("M-III", "M-IV"):
        values |= theta(found)
    if mode == "M-II":
        values["omega"] = {
            f"{model}, head {head}": overlap_ratio(omega)
            for model, one in found.items()
            for head, omega in enumerate(one.circuits.omega[0])
        }
    end = ("-h5" if n_heads == 5 else "") + SUFFIX[convention]
    return records(f"softmax-{mode}-", {f"{name}{end}": one for name, one in values.items()})


def table_2() -> tuple[pd.DataFrame, list[Record]]:
    """Three heads next to the published ones; sum_h mu_n omega_g on the tasks' groups and off them."""
    rows, own = {"paper": PAPER}, ([0, 0, 1, 1], [0, 2, 1, 2])
    for name, found in labels(3, "two-tasks").items():
        rows[name] = np.hstack([group_means(found), found.circuits.mu[0]])
    sums = {name: one[:, 3:].T @ one[:, :3] for name, one in rows.items() if name != "paper"}
    asked = {"on": {name: abs(one[own] - 0.915).max() for name, one in sums.items()}}
    asked["off"] = {name: max(abs(one[0, 1]), abs(one[1, 0])) for name, one in sums.items()}
    columns = [*GROUPS, "mu_0", "mu_1"]
    frames = [pd.DataFrame(one, columns=columns).assign(model=n) for n, one in rows.items()]
    return pd.concat(frames).assign(mode="table 2"), records("softmax-table-2-", asked)


def losses(convention: str) -> Record:
    """Loss of the best seed by number of heads."""
    best = []
    for n_heads in range(1, 5):
        names = trained(f"{convention}-h{n_heads}-s*")
        best.append(np.min([checkpoint(n).history["eval_loss"].iloc[-1] for n in names]))
    return record(
        f"softmax-M-loss{SUFFIX[convention]}",
        {f"{n} to {n + 1} heads": best[n - 1] - best[n] for n in range(1, 4)},
        over={"selection": "best of three seeds"},
    )


def measure(quick: bool) -> Measured:
    made, frames, shown = [], [], {}
    for mode, n_heads in ASKED:
        for convention in SUFFIX:
            found = labels(n_heads, convention)
            made += of_mode(mode, n_heads, convention, found)
            shown |= circuit_pages(f"{convention}-h{n_heads}-s0")
            for name, one in found.items():
                loss = checkpoint(name).history["eval_loss"].iloc[-1]
                frame = one.to_frame().assign(model=name, pattern=one.label, eval_loss=loss)
                frames.append(frame.assign(mode=mode))
    made += [losses(convention) for convention in SUFFIX]
    table, more = table_2()
    return Measured(pd.concat([*frames, table]), shown, made + more)
