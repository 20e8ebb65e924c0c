"""Figure 12: correlated covariates: QK circuits beside the inverse covariance and the best preconditioner.

He et al. 2025, arXiv 2503.12734, figure 12. Run: python analyses/softmax_figure_12.py (half a minute)
"""

import numpy as np
from measured import Claim, Measured, checkpoint, numbers, run
from softmax_covariance import SETTING, pairs

from mechinterp import figures
from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.preconditioning import debiased_preconditioner


def measure(quick: bool) -> Measured:
    data, pages = pairs(quick), {}
    stepped = data[data.pattern == "preconditioned_gd"]
    ended = f"{len(stepped)} of {len(data)}; {', '.join(set(data.model) - set(stepped.model))} is {', '.join(set(data.pattern) - set(stepped.pattern))}"
    claims = [Claim("N1", "two heads become a preconditioned debiased step", "kms-*-h2-*", "always", ended, len(stepped) == len(data))]  # fmt: skip
    for rho, group in stepped.groupby("rho"):
        name = f"kms-{rho}-h2-*"
        near = bool(
            (group.to_debiased <= 0.04).all() and (group.to_inverse > 3 * group.to_debiased).all()
        )
        loss = ", ".join(f"{row.loss:.4f} ± {row.loss_sem:.4f}" for row in group.itertuples())
        gap = (group.loss - group.best).max()
        claims += [
            Claim("N1", f"rho {rho}: the step is the best debiased one, not Sigma^-1", name, "shown", f"{numbers(100 * group.to_debiased, 1)}% from it, {numbers(100 * group.to_vanilla, 1)}% from the vanilla one, {numbers(100 * group.to_inverse, 0)}% from Sigma^-1", near),
            Claim("N1", f"rho {rho}: the two QK are opposite", name, "shown", f"within {numbers(100 * group.opposite, 1)}%", bool((group.opposite < 0.06).all())),
            Claim("N2", f"rho {rho}: the loss is that of the best debiased step", name, f"{group.best.iloc[0]:.4f} (exact)", loss, bool(gap < 0.003)),
        ]  # fmt: skip
        model = checkpoint(f"kms-{rho}-h2-s0")
        sigma = covariance_matrix(model.config.task.covariance, 5)
        forms = [np.linalg.inv(sigma), debiased_preconditioner(sigma, **SETTING)]
        axis = [f"x{i}" for i in range(5)]
        pages[f"qk-{rho}"] = circuits(model).plot().update_layout(title_text=f"QK, rho {rho}")
        for title, form in zip(
            ("inverse of Sigma", "best debiased preconditioner"), forms, strict=True
        ):
            pages[f"{title}-{rho}"] = figures.heatmap(form, title=f"{title}, rho {rho}", rows=axis, columns=axis)  # fmt: skip
    return Measured(data, pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
