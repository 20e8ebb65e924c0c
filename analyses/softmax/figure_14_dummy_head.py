"""Figure 14: circuits of a model with a dummy head at snapshots of its training.

He et al. 2025, arXiv 2503.12734, figure 14. Run: python -m analyses.softmax.figure_14_dummy_head (seconds)
"""

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from analyses.softmax.figure_5_early_pattern import sequence
from mechinterp.analysis.one_layer.classify import classify


def measure(quick: bool) -> Measured:
    labels = {name: classify(checkpoint(name)).labels for name in shipped("softmax-h[348]-s*")}
    with_dummy = [name for name, heads in labels.items() if "dummy" in heads]
    data, pages = sequence(with_dummy[0])
    claim = record("softmax-O1e-some", {"models": len(with_dummy)})
    return Measured(data, pages, [claim])


if __name__ == "__main__":
    run(measure, __file__)
