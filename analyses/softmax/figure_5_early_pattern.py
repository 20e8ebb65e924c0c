"""Figure 5: circuits of a two-head model at snapshots of its training.

He et al. 2025, arXiv 2503.12734, figure 5. Run: python -m analyses.softmax.figure_5_early_pattern (seconds)
"""

import pandas as pd
import plotly.graph_objects as go

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from mechinterp.analysis.one_layer.circuits import circuits

STEPS = (0, 1_000, 2_000, 10_000, 100_000, 500_000)


def sequence(name: str) -> tuple[pd.DataFrame, dict[str, go.Figure]]:
    """Circuits of a checkpoint at STEPS, as numbers and as heatmaps."""
    frames, pages = [], {}
    for step in STEPS:
        found = circuits(checkpoint(name).snapshots[step])
        frames.append(found.to_frame().assign(step=step))
        pages[f"{step}"] = found.plot().update_layout(title_text=f"QK circuits at step {step:,}")
        pages[f"{step}-ov"] = found.plot_ov().update_layout(
            title_text=f"OV circuits at step {step:,}"
        )
    return pd.concat(frames), pages


def measure(quick: bool) -> Measured:
    data, pages = sequence("softmax-h2-s0")
    early = {name: circuits(checkpoint(name).snapshots[2000]) for name in shipped("softmax-h2-s*")}
    clear = record(
        "softmax-early-pattern", {name: found.qk_diagonal.min() for name, found in early.items()}
    )
    return Measured(data, pages, [clear])


if __name__ == "__main__":
    run(measure, __file__)
