"""Table 2: omega on the three groups of coordinates, and mu, of a three-head model for two tasks.

He et al. 2025, arXiv 2503.12734, table 2. Run: python -m analyses softmax/table_2_three_head_groups
(seconds)
"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, records
from analyses.softmax.figures_16_to_19_modes import labels

GROUPS = {"omega_first": [0, 1], "omega_second": [4, 5], "omega_shared": [2, 3]}
# The published table: omega on {0, 1}, {4, 5}, {2, 3}, then mu of both tasks, per head.
PAPER = np.array(
    [
        [-0.0316, -0.0689, -0.0893, -3.9911, -7.0742],
        [0.0779, 0.0000, 0.0870, 6.9204, 2.3371],
        [-0.0837, 0.0927, 0.0152, -2.8739, 4.7399],
    ]
)


def conditions(rows: np.ndarray) -> np.ndarray:
    """sum_h mu_n omega_g, [response, group]."""
    return rows[:, 3:].T @ rows[:, :3]


def measure(quick: bool) -> Measured:
    frames, ours = [pd.DataFrame(PAPER).assign(model="paper")], {}
    for name, found in labels(3, "two-tasks").items():
        omega = found.circuits.omega
        means = np.stack([omega[:, group].mean(1) for group in GROUPS.values()], 1)
        rows = np.hstack([means, found.circuits.mu])
        ours[name] = conditions(rows)
        frames.append(pd.DataFrame(rows).assign(model=name))
    data = pd.concat(frames)
    data.columns = [*GROUPS, "mu_0", "mu_1", "model"]
    own = ([0, 0, 1, 1], [0, 2, 1, 2])
    asked = {"on": {name: abs(one[own] - 0.915).max() for name, one in ours.items()}}
    asked["off"] = {name: max(abs(one[0, 1]), abs(one[1, 0])) for name, one in ours.items()}
    return Measured(data, {}, records("softmax-table-2-", asked))
