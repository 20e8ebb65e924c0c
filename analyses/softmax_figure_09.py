"""Figure 9: circuits of two-head models with other score functions.

He et al. 2025, arXiv 2503.12734, figure 9: attention weights f(s_i) / sum_j f(s_j).
Run: python analyses/softmax_figure_09.py (seconds)
"""

import pandas as pd
from measured import Claim, Measured, checkpoint, numbers, run, shipped

from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.analysis.circuits.patterns import classify

PATTERNS = ("tanh-h2-s*", "affine-*-h2-s*", "square-*-h2-s*")


def measure(quick: bool) -> Measured:
    names = [name for pattern in PATTERNS for name in shipped(pattern)]
    labels = {name: classify(checkpoint(name)) for name in names}
    paired = [name for name in names if labels[name].pattern == "debiased_gd"]
    diagonal = [value for name in paired for value in labels[name].circuits.qk_diagonal]
    claims = [
        Claim(
            "",
            "a positive and a negative head for every score function",
            ", ".join(PATTERNS),
            "always",
            f"{len(paired)} of {len(names)} models",
            len(paired) == len(names),
        ),
        Claim(
            "",
            "QK is diagonal for every score function",
            "those of both signs",
            "always",
            f"cosine {numbers(diagonal)}",
            min(diagonal) > 0.95,
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
