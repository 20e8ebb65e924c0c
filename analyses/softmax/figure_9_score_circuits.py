"""Figure 9: circuits of two-head models with other score functions.

He et al. 2025, arXiv 2503.12734, figure 9: attention weights f(s_i) / sum_j f(s_j).
Run: python -m analyses.softmax.figure_9_score_circuits (seconds)
"""

import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify

PATTERNS = ("tanh-h2-s*", "affine-*-h2-s*", "square-*-h2-s*")


def measure(quick: bool) -> Measured:
    names = [name for pattern in PATTERNS for name in shipped(pattern)]
    labels = {name: classify(checkpoint(name)) for name in names}
    paired = {name: one for name, one in labels.items() if one.pattern == "debiased_gd"}
    claims = [
        record("softmax-scores-signs", {name: float(name in paired) for name in names}),
        record(
            "softmax-scores-diagonal",
            {name: one.circuits.qk_diagonal.min() for name, one in paired.items()},
            over={"selection": "models of both signs"},
        ),
    ]
    pages = {
        name: circuits(checkpoint(name)).plot().update_layout(title_text=f"QK circuits, {name}")
        for name in names
        if name.endswith("s0")
    }
    data = pd.concat(
        [
            found.to_frame().assign(model=name, pattern=found.pattern)
            for name, found in labels.items()
        ]
    )
    return Measured(data, pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
