"""Figure 15: the inverse of a pair's step is the covariance plus a multiple of the identity.

He et al. 2025, arXiv 2503.12734, figure 15. Run: python -m analyses.softmax.figure_15_inverse_step (half a
minute)
"""

import numpy as np

from analyses.lib.measured import Measured, checkpoint, run
from analyses.lib.records import record
from analyses.softmax.covariance import RHOS, pairs
from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.icl.prompts import covariance_matrix


def measure(quick: bool) -> Measured:
    data = pairs(quick)[["model", "pattern", "rho", "inverse_gap"]]
    stepped = data[data.pattern == "preconditioned_gd"]
    records = [
        record(
            f"softmax-N3-rho{rho}",
            group.set_index("model").inverse_gap,
            over={"selection": "pairs labelled preconditioned_gd"},
        )
        for rho, group in stepped.groupby("rho")
    ]
    axis, pages = [f"x{i}" for i in range(5)], {}
    for rho in RHOS:
        model = checkpoint(f"kms-{rho}-h2-s0")
        found = circuits(model)
        step = np.einsum("h,hij->ij", found.mu[:, 0], found.QK[:, :5, :5])
        sigma = covariance_matrix(model.config.task.covariance, 5) + 5.5 / 40 * np.eye(5)
        both = {"inverse of sum mu QK": np.linalg.inv(step), "Sigma + (tr Sigma + d s²)/L I": sigma}
        for title, matrix in both.items():
            pages[f"{title}-{rho}"] = figures.heatmap(
                matrix, title=f"{title}, rho {rho}", rows=axis, columns=axis
            )
    return Measured(data, pages, records)


if __name__ == "__main__":
    run(measure, __file__)
