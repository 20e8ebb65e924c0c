"""Figure 12: correlated covariates: QK circuits beside the inverse covariance and the best
preconditioner.

He et al. 2025, arXiv 2503.12734, figure 12. Run: python -m analyses.softmax.figure_12_preconditioned_pair
(half a minute)
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run
from analyses.lib.records import Record
from analyses.softmax.covariance import SETTING, pairs
from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.preconditioning import debiased_preconditioner


def measure(quick: bool) -> Measured:
    data, pages = pairs(quick), {}
    stepped = data[data.pattern == "preconditioned_gd"]
    records = [
        Record(
            id="softmax-N1-preconditioned",
            statement="two heads become a preconditioned debiased step",
            relation="equal to",
            bound=1,
            models="kms-*-h2-*",
            values={
                row.model: float(row.pattern == "preconditioned_gd") for row in data.itertuples()
            },
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
    common = {
        "models": f"kms-{rho}-h2-*",
        "over": {"selection": "pairs labelled preconditioned_gd"},
    }
    clauses = (
        (
            "off-tridiagonal",
            "QK has entries off its three diagonals, beyond Adam's 0.003",
            "largest such entry",
            "off_tridiagonal",
            "above",
            0.003,
        ),
        (
            "ov",
            "only y is read",
            "least |mu| over the norm of OV",
            "ov_last_entry",
            "at least",
            0.999,
        ),
        (
            "opposite",
            "the two QK are opposite within 5%",
            "relative distance",
            "opposite",
            "at most",
            0.05,
        ),
        (
            "debiased",
            "the step is the best debiased one",
            "relative distance",
            "to_debiased",
            "at most",
            0.04,
        ),
        (
            "vanilla",
            "the step is near the best vanilla one",
            "relative distance",
            "to_vanilla",
            "at most",
            0.06,
        ),
        (
            "inverse",
            "the step is three times nearer to it than to Sigma^-1",
            "ratio of distances",
            "times_nearer",
            "at least",
            3,
        ),
    )
    found = [
        Record(
            id=f"softmax-N1-{name}-rho{rho}",
            statement=f"rho {rho}: {text}",
            quantity=quantity,
            relation=relation,
            bound=bound,
            values=pairs[column],
            **common,
        )
        for name, text, quantity, column, relation, bound in clauses
    ]
    best = pairs.best.iloc[0]
    # There are numbers for rho 0.5 alone; 1.3% above the exact loss is as wide for the others.
    bound = (0.237, 0.24) if rho == 0.5 else (0.9873 * best, 1.0127 * best)
    loss = Record(
        id=f"softmax-N2-rho{rho}",
        statement=f"rho {rho}: the loss is that of the best debiased step",
        quantity="loss at L = 40 (y²)",
        relation="between",
        bound=bound,
        tag="paper" if rho == 0.5 else "ours",
        paper=f"{best:.4f} (exact)",
        values=pairs.loss,
        errors=pairs.loss_sem,
        models=common["models"],
        over={"prompts": 200_000} | common["over"],
    )
    return [*found, loss]


if __name__ == "__main__":
    run(measure, __file__)
