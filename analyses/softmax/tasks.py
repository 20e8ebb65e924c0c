"""What the scripts of figures 16 to 19 and table 2 share: two tasks on overlapping supports.

d_x 6, supports {0, 1, 2, 3} and {2, 3, 4, 5}, L 48. `two-tasks-*` have independent task vectors of
unit variance per entry and a query without noise, as the published code; `shared-tasks-*` one task
vector, as the paper's definition.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib.measured import checkpoint, shipped
from analyses.lib.records import Bound, Record
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify

CONVENTIONS = ("two-tasks", "shared-tasks")
# The ids' suffixes, and what distinguishes the records' statements.
SUFFIX = {"two-tasks": "", "shared-tasks": "-shared"}
VECTORS = {"two-tasks": "a vector per task", "shared-tasks": "one vector for both tasks"}
ON = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=bool)
OVERLAP = np.array([0, 0, 1, 1, 0, 0], dtype=bool)


def labels(n_heads: int, convention: str) -> dict[str, Classification]:
    """Labels of all seeds."""
    return {name: classify(checkpoint(name)) for name in shipped(f"{convention}-h{n_heads}-s*")}


def eta(name: str) -> float:
    """Best debiased step on one support: 1 / (1 + (|S| + s^2 / beta_var) / L)."""
    task = checkpoint(name).config.task
    return 1 / (1 + (4 + task.noise_var / task.beta_variance) / task.context_length)


def overlap_ratio(omega: np.ndarray) -> float:
    """Mean |omega| where both supports lie over that elsewhere."""
    return float(abs(omega)[OVERLAP].mean() / abs(omega)[~OVERLAP].mean())


def clause(
    mode: str,
    n_heads: int,
    convention: str,
    name: str,
    statement: str,
    *,
    quantity: str = "",
    relation: str = "equal to",
    bound: Bound = 1,
    values: Mapping[str, float],
    tag: str = "paper",
) -> Record:
    """A clause of a mode, of the models with a number of heads."""
    heads = "" if mode != "M-III" or n_heads == 4 else f"-h{n_heads}"
    return Record(
        id=f"softmax-{mode}-{name}{heads}{SUFFIX[convention]}",
        statement=f"{VECTORS[convention]}, {n_heads} heads: {statement}",
        quantity=quantity,
        relation=relation,
        bound=bound,
        tag=tag,
        models=f"{convention}-h{n_heads}-*",
        values=values,
    )


def is_pattern(found: Mapping[str, Classification], pattern: str) -> dict[str, float]:
    """Which models are a pattern."""
    return {name: float(one.pattern == pattern) for name, one in found.items()}


def theta_clauses(
    mode: str, n_heads: int, convention: str, found: Mapping[str, Classification], *, off: float
) -> list[Record]:
    """theta_n = eta on the task's support, within 0.03, and less than `off` elsewhere."""
    steps = {name: abs(one.scales.theta[ON] - eta(name)).max() for name, one in found.items()}
    others = {name: abs(one.scales.theta[~ON]).max() for name, one in found.items()}
    of = (mode, n_heads, convention)
    small = {"relation": "below", "quantity": "largest difference"}
    return [
        clause(*of, "on", "theta_n is eta on its support", bound=0.03, values=steps, **small),
        clause(*of, "off", "theta_n is 0 off its support", bound=off, values=others, **small),
    ]


def table(n_heads: int) -> pd.DataFrame:
    """Heads, labels and losses of both conventions."""
    frames = []
    for convention in CONVENTIONS:
        for name, found in labels(n_heads, convention).items():
            loss = checkpoint(name).history["eval_loss"].iloc[-1]
            frame = found.to_frame().assign(model=name, pattern=found.pattern, eval_loss=loss)
            frames.append(frame)
    return pd.concat(frames)


def pages(n_heads: int) -> dict[str, go.Figure]:
    """Circuits of the first seed of each convention."""
    found = {}
    for convention in CONVENTIONS:
        name = f"{convention}-h{n_heads}-s0"
        heads = circuits(checkpoint(name))
        found[f"{name}-qk"] = heads.plot().update_layout(title_text=f"QK, {name}")
        found[f"{name}-ov"] = heads.plot_ov().update_layout(title_text=f"OV, {name}")
    return found
