"""Responses of shipped models, measured without a label, and the use of sparsity by models of sparse tasks.

results/response_shipped.csv, the table of docs/response.md; `python -m analyses.response.figure` draws the figure of README.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analyses.lib.measured import ROOT, Measured, shipped
from mechinterp import load, response
from mechinterp.analysis.response import reading
from mechinterp.analysis.response.frames import Frames

MODELS = (
    *("softmax-h1-s0", "softmax-h2-s0", "kms-0.5-h2-s0", "tanh-h2-s0", "two-tasks-h4-s0"),
    *(
        "linear-merged-s0",
        "garg-tiny-s0",
        "garg-gpt2",
        "pool-gpt2-none-s0",
        "pool-gpt2-m16-long-s0",
    ),
    *("pool-linear-m4-s0", "pool-linear-m16-s0", "pool-linear-m64-s0"),
)
SPARSE = ("sparse-h*-s0", "sparse-wide-s0", "d4s1-*", "d8s2-*")
"""Models of the third paper's tasks whose weights are shipped, first seeds."""
TRIMMED = {"pool-linear-m64-s0": 0.05}
"""Models of heavy tails: fraction of the prompts left out, those with the largest x."""
N_PROMPTS, QUICK = 1024, 256


def row_of(name: str, found: Frames) -> Mapping[str, object]:
    """One line of the table for the first response of a model."""
    rotation = found.of_output(found.symmetries).set_index("symmetry").loc["rotation of x"]
    left = found.of_output(found.left).set_index("columns")
    numbers = {
        column: found.scalar(scalar) if scalar in set(found.scalars.name) else (np.nan, np.nan)
        for column, scalar in {
            "c": "c",
            "c_bayes": "c of Bayes",
            "mean_of_x": "mean of x",
            "even": "even in y",
            "distance": "squared distance to Bayes",
            "share": "share of it in the filter",
            "disagreement": "disagreement",
        }.items()
    }
    flat = {
        f"{column}{end}": v
        for column, pair in numbers.items()
        for end, v in zip(("", "_sem"), pair, strict=True)
    }
    last = left["left"].idxmin()
    return {
        "model": name,
        "reading": reading.kind(found),
        "form": reading.form(found),
        "prompts": found.n_prompts,
        **flat,
        "left": left["left"]["filter"],
        "left_sem": left["left_sem"]["filter"],
        "least": left["left"][last],
        "least_sem": left["left_sem"][last],
        "coordinates": found.coordinates is not None,
        "rotation": rotation.mismatch,
        "rotation_sem": rotation.mismatch_sem,
        "rotation_bayes": rotation.bayes,
        "uses_sparsity": found.uses_sparsity,
        "against_bayes": "; ".join(reading.bayes_sentences(found)),
    }


def measure(quick: bool) -> Measured:
    """Response of each model on prompts of its own task, seed 0."""
    sparse = [name for pattern in SPARSE for name in shipped(pattern)]
    names = ("softmax-h2-s0", "garg-tiny-s0") if quick else (*MODELS, *sparse)
    rows = []
    for name in names:
        number = QUICK if quick else N_PROMPTS
        trim = TRIMMED.get(name, 0.0)
        found = response(load(ROOT / "checkpoints" / name), n_prompts=number, trim=trim)
        rows.append({**row_of(name, found), "trim": trim})
    return Measured(pd.DataFrame(rows))
