"""Figure 12: correlated covariates: QK circuits beside the inverse covariance and the best
preconditioner.

He et al. 2025, arXiv 2503.12734, figure 12. Run: python -m analyses.softmax.figure_12_preconditioned_pair
(half a minute)
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run
from analyses.lib.records import Record, record
from analyses.softmax.covariance import SETTING, pairs
from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.preconditioning import debiased_preconditioner


def measure(quick: bool) -> Measured:
    data, pages = pairs(quick), {}
    stepped = data[data.pattern == "preconditioned_gd"]
    records = [
        record(
            "softmax-N1-preconditioned",
            {row.model: float(row.pattern == "preconditioned_gd") for row in data.itertuples()},
        )
    ]
    for rho, group in stepped.groupby("rho"):
        records += pair_records(rho, group.set_index("model"))
        model = checkpoint(f"kms-{rho}-h2-s0")
        sigma = covariance_matrix(model.config.task.covariance, 5)
        forms = [np.linalg.inv(sigma), debiased_preconditioner(sigma, **SETTING)]
        axis = [f"x{i}" for i in range(5)]
        pages[f"qk-{rho}"] = circuits(model).plot().update_layout(title_text=f"QK, rho {rho}")
        for title, form in zip(
            ("inverse of Sigma", "best debiased preconditioner"), forms, strict=True
        ):
            pages[f"{title}-{rho}"] = figures.heatmap(
                form, title=f"{title}, rho {rho}", rows=axis, columns=axis
            )
    return Measured(data, pages, records)


def pair_records(rho: float, pairs: pd.DataFrame) -> list[Record]:
    """The clauses of N1 and N2, for the pairs of one covariance that became a preconditioned
    step."""
    over = {"selection": "pairs labelled preconditioned_gd"}
    columns = {
        "off-tridiagonal": "off_tridiagonal",
        "ov": "ov_last_entry",
        "opposite": "opposite",
        "debiased": "to_debiased",
        "vanilla": "to_vanilla",
        "inverse": "times_nearer",
    }
    found = [
        record(f"softmax-N1-{name}-rho{rho}", pairs[column], over=over)
        for name, column in columns.items()
    ]
    loss = record(
        f"softmax-N2-rho{rho}", pairs.loss, errors=pairs.loss_sem, over={"prompts": 200_000} | over
    )
    return [*found, loss]


if __name__ == "__main__":
    run(measure, __file__)
