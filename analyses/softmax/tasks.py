"""What the scripts of figures 16 to 19 and table 2 share: two tasks on overlapping supports.

d_x 6, supports {0, 1, 2, 3} and {2, 3, 4, 5}, L 48. `two-tasks-*` have independent task vectors of
unit variance per entry and a query without noise, as the published code; `shared-tasks-*` one task
vector, as the paper's definition.
"""

import numpy as np

from analyses.lib.measured import checkpoint, shipped
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify

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
