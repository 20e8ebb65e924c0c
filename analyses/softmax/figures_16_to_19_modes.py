"""Figures 16 to 19: one to five heads for two tasks, Modes I to IV.

He et al. 2025, arXiv 2503.12734, figures 16 to 19. Mode I is one head for both tasks, II a pair for
both, III a pair for each, IV three heads in superposition. Run: python -m
analyses.softmax.figures_16_to_19_modes (seconds)
"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import Record, record
from analyses.softmax.tasks import CONVENTIONS, ON, eta, labels, overlap_ratio
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classification import Classification

SUFFIX = {"two-tasks": "", "shared-tasks": "-shared"}
"""Of the ids of claims."""
GROUPS = ([0, 1], [2, 3], [4, 5])
Found = Mapping[str, Classification]
Measure = Callable[[Classification], float]


def both_signs(found: Classification) -> float:
    """Whether some head has entries of both signs in omega (of its groups) or in mu."""
    omega = np.stack([found.circuits.omega[:, group].mean(1) for group in GROUPS], 1)
    rows = (*omega, *found.circuits.mu)
    return float(any(row.min() < 0 < row.max() for row in rows))


def group_spread(found: Classification) -> float:
    """Largest range of a head's omega inside a group of coordinates."""
    return max(float(np.ptp(found.circuits.omega[:, group], axis=1).max()) for group in GROUPS)


def is_pattern(pattern: str) -> Measure:
    return lambda found: float(found.pattern == pattern)


ASKED: dict[tuple[str, int], dict[str, Measure]] = {
    ("M-I", 1): {
        "smoother": is_pattern("kernel_regression"),
        "mu": lambda found: abs(found.circuits.mu[0, 0] / found.circuits.mu[0, 1] - 1),
        "omega": lambda found: overlap_ratio(found.circuits.omega[0]),
    },
    ("M-II", 2): {
        "pair": is_pattern("weighted_preconditioned_gd"),
        "zero-sum": lambda found: found.scales.zero_sum,
    },
    **{
        ("M-III", n_heads): {
            "pairs": is_pattern("task_heads"),
            "zero-sum": lambda found: abs(found.circuits.mu.sum(0)).max(),
        }
        for n_heads in (4, 5)
    },
    ("M-IV", 3): {
        "superposition": is_pattern("superposition"),
        "mu": lambda found: abs(found.circuits.mu).min(),
        "signs": both_signs,
        "groups": group_spread,
    },
}
"""What is measured of each model, by mode and number of heads."""


def theta(found: Found) -> dict[str, dict[str, float]]:
    """How far theta_n is from eta on the task's support, and from 0 elsewhere."""
    steps = {name: abs(one.scales.theta[ON] - eta(name)).max() for name, one in found.items()}
    others = {name: abs(one.scales.theta[~ON]).max() for name, one in found.items()}
    return {"on": steps, "off": others}


def records(mode: str, n_heads: int, convention: str, found: Found) -> list[Record]:
    values = {
        name: {model: how(one) for model, one in found.items()}
        for name, how in ASKED[mode, n_heads].items()
    }
    if mode in ("M-III", "M-IV"):
        values |= theta(found)
    if mode == "M-II":
        values["omega"] = {
            f"{model}, head {head}": overlap_ratio(omega)
            for model, one in found.items()
            for head, omega in enumerate(one.circuits.omega)
        }
    heads = "-h5" if n_heads == 5 else ""
    return [
        record(f"softmax-{mode}-{name}{heads}{SUFFIX[convention]}", one)
        for name, one in values.items()
    ]


def losses(convention: str) -> Record:
    """The best seed's loss by number of heads."""
    best = []
    for n_heads in range(1, 5):
        names = shipped(f"{convention}-h{n_heads}-s*")
        best.append(np.min([checkpoint(n).history["eval_loss"].iloc[-1] for n in names]))
    return record(
        f"softmax-M-loss{SUFFIX[convention]}",
        {f"{n} to {n + 1} heads": best[n - 1] - best[n] for n in range(1, 4)},
        over={"selection": "best of three seeds"},
    )


def pages(convention: str, n_heads: int) -> dict[str, go.Figure]:
    """Circuits of the first seed."""
    name = f"{convention}-h{n_heads}-s0"
    heads = circuits(checkpoint(name))
    return {
        f"{name}-qk": heads.plot().update_layout(title_text=f"QK, {name}"),
        f"{name}-ov": heads.plot_ov().update_layout(title_text=f"OV, {name}"),
    }


def measure(quick: bool) -> Measured:
    made, frames, shown = [], [], {}
    for mode, n_heads in ASKED:
        for convention in CONVENTIONS:
            found = labels(n_heads, convention)
            made += records(mode, n_heads, convention, found)
            shown |= pages(convention, n_heads)
            for name, one in found.items():
                loss = checkpoint(name).history["eval_loss"].iloc[-1]
                frame = one.to_frame().assign(model=name, pattern=one.pattern, eval_loss=loss)
                frames.append(frame.assign(mode=mode))
    made += [losses(convention) for convention in CONVENTIONS]
    return Measured(pd.concat(frames), shown, made)


if __name__ == "__main__":
    run(measure, __file__)
