"""What the scripts of figures 16 to 19 and table 2 share: two tasks on overlapping supports.

d_x 6, supports {0, 1, 2, 3} and {2, 3, 4, 5}, L 48. `two-tasks-*` have independent task vectors of unit variance per
entry and a query without noise, as the published code; `shared-tasks-*` one task vector, as the paper's definition.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from measured import checkpoint, shipped

from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.analysis.circuits.patterns import Classification, classify

CONVENTIONS = ("two-tasks", "shared-tasks")
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
        found[f"{name}-qk"] = circuits(checkpoint(name)).plot().update_layout(title_text=f"QK, {name}")  # fmt: skip
        found[f"{name}-ov"] = circuits(checkpoint(name)).plot_ov().update_layout(title_text=f"OV, {name}")  # fmt: skip
    return found
