"""Figure 14: circuits of a model with a dummy head at snapshots of its training.

He et al. 2025, arXiv 2503.12734, figure 14. Run: python analyses/softmax_figure_14.py (seconds)
"""

from measured import Claim, Measured, checkpoint, run, shipped
from softmax_figure_05 import sequence

from mechinterp.analysis.circuits.patterns import classify


def measure(quick: bool) -> Measured:
    labels = {name: classify(checkpoint(name)).labels for name in shipped("softmax-h[348]-s*")}
    with_dummy = [name for name, heads in labels.items() if "dummy" in heads]
    data, pages = sequence(with_dummy[0])
    claim = Claim("", "a head becomes a dummy for some seeds", "softmax-h{3,4,8}-*", "seed 1029 of four heads", f"{len(with_dummy)} of {len(labels)} models", bool(with_dummy))  # fmt: skip
    return Measured(data, pages, [claim])


if __name__ == "__main__":
    run(measure, __file__)
