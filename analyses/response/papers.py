"""Figures of two papers' pages, from the weights of the pairs alone: docs/papers/one_step.svg, docs/papers/directions.svg.

python -m analyses.response.papers    (half a minute; needs a browser)
"""

from dataclasses import replace
from functools import partial

import numpy as np
import plotly.graph_objects as go

from analyses.lib.measured import ROOT, checkpoint
from mechinterp import figures, response, sample_prompts
from mechinterp.analysis.response.pair_weights import function_of, pair_weights
from mechinterp.icl.predictors import debiased_gd
from mechinterp.icl.prompts import Prompts

PAGES = ROOT / "docs" / "papers"
WIDTH, HEIGHT = 760, 400
SOFTMAX = {"one head": "softmax-h1-s0", "two heads": "softmax-h2-s0"}
LINEAR = "linear-separate-s0"
N_PROMPTS = 256


def one_step() -> go.Figure:
    """Filter of one and of two softmax heads, of a step of debiased gradient descent, and of the Bayes learner."""
    found = {name: response(checkpoint(model)) for name, model in SOFTMAX.items()}
    task = checkpoint(SOFTMAX["two heads"]).task
    step = partial(debiased_gd, eta=float(found["two heads"].filter.phi.median()))
    found["a step of debiased descent"] = response(step, task=task)
    frames = {name: each.filter for name, each in found.items()}
    curves = {
        name: (frame.phi.to_numpy(), frame.phi_sem.to_numpy()) for name, frame in frames.items()
    }
    bayes = frames["two heads"]
    curves["Bayes learner"] = (bayes.bayes.to_numpy(), np.zeros(len(bayes)))
    return figures.lines(
        bayes.s.to_numpy(),
        curves,
        title="",
        x_title="eigenvalue s of XᵀX/L",
        y_title="filter φ(s)",
        log_x=True,
        log_y=True,
    ).update_yaxes(dtick="D2")


def weight_matrix(weights: np.ndarray, prompts: Prompts) -> np.ndarray:
    """The M [d_x, d_x] that is nearest to a_j = x_j^T M q / L, by least squares over prompts and pairs."""
    x, query = prompts.x.double().numpy(), prompts.x_query.double().numpy()
    d_x = x.shape[-1]
    columns = np.einsum("nji,nk->njik", x, query).reshape(-1, d_x * d_x) / x.shape[1]
    return np.linalg.lstsq(columns, weights.ravel())[0].reshape(d_x, d_x)


def directions() -> go.Figure:
    """Weight of each eigenvector of the covariance over the training of linear attention with separate key and query."""
    model = checkpoint(LINEAR)
    prompts = sample_prompts(model, N_PROMPTS)
    steps = np.array(model.steps[1:])  # step 0 has no place on a logarithmic axis
    matrices = [
        weight_matrix(
            pair_weights(function_of(replace(model, weights=model.snapshots[step])), prompts),
            prompts,
        )
        for step in steps
    ]
    diagonals = np.array([np.diag(each) for each in matrices])
    spread = np.array(model.task.covariance.eigenvalues)
    rests = 1 / (
        spread * (1 + 1 / model.task.context_length) + spread.sum() / model.task.context_length
    )
    curves = {
        f"direction of variance {variance:g}": diagonals[:, n] for n, variance in enumerate(spread)
    }
    return figures.lines(
        steps,
        curves,
        levels=rests,
        title="",
        x_title="training step",
        y_title="weight of the direction",
        log_x=True,
    )


def main() -> None:
    for name, figure in (("one_step", one_step()), ("directions", directions())):
        figure.update_layout(width=WIDTH, height=HEIGHT, paper_bgcolor="white", font_size=14)
        figure.update_xaxes(dtick="D2")
        figure.update_layout(margin={"t": 20, "l": 70, "r": 10, "b": 50})
        figure.write_image(PAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
