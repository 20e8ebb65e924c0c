"""Figure 19: three heads for two tasks, superposition (Mode IV).

He et al. 2025, arXiv 2503.12734, figure 19. Run: python -m analyses.softmax.mode_4 (seconds)
"""

import numpy as np

from analyses.lib.measured import Measured, run
from analyses.softmax.tasks import (
    CONVENTIONS,
    clause,
    is_pattern,
    labels,
    pages,
    table,
    theta_clauses,
)
from mechinterp.analysis.one_layer.classification import Classification

GROUPS = ([0, 1], [2, 3], [4, 5])


def both_signs(found: Classification) -> bool:
    """Whether some head has entries of both signs in omega (of its groups) or in mu."""
    omega = np.stack([found.circuits.omega[:, group].mean(1) for group in GROUPS], 1)
    rows = (*omega, *found.circuits.mu)
    return any(row.min() < 0 < row.max() for row in rows)


def group_spread(found: Classification) -> float:
    """Largest range of a head's omega inside a group of coordinates."""
    return max(float(np.ptp(found.circuits.omega[:, group], axis=1).max()) for group in GROUPS)


def measure(quick: bool) -> Measured:
    records = []
    for convention in CONVENTIONS:
        found, of = labels(3, convention), ("M-IV", 3, convention)
        superposed = is_pattern(found, "superposition")
        records += [
            clause(*of, "superposition", "heads serve both tasks", values=superposed),
            *theta_clauses(*of, found, off=0.08),
            clause(
                *of,
                "mu",
                "no mu is zero",
                quantity="least |mu|",
                relation="at least",
                bound=0.02,
                values={name: abs(one.circuits.mu).min() for name, one in found.items()},
            ),
            clause(
                *of,
                "signs",
                "a head has both signs in omega or in mu",
                values={name: float(both_signs(one)) for name, one in found.items()},
            ),
            clause(
                *of,
                "groups",
                "omega is the same inside a group of coordinates",
                quantity="largest range",
                relation="below",
                bound=0.01,
                values={name: group_spread(one) for name, one in found.items()},
            ),
        ]
    return Measured(table(3), pages(3), records)


if __name__ == "__main__":
    run(measure, __file__)
