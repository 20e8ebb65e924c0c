"""Figure 20: concentration of attention: norm of softmax(s <x_l, x_query>) by scale, length and
dimension.

He et al. 2025, arXiv 2503.12734, figure 20; 10,000 draws each.
Run: python -m analyses softmax/figure_20_concentration (seconds)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured, record
from mechinterp import TaskConfig, figures
from mechinterp.icl.prompts import prompt_chunks

PANELS = {
    "scale 0.5, more pairs": (0.5, ((40, 5), (100, 5), (500, 5))),
    "scale 0.5, L = 8 d": (0.5, ((40, 5), (200, 25), (800, 100))),
    "scale 0.35, L = 8 d": (0.35, ((40, 5), (200, 25), (800, 100))),
}


def norms(scale: float, context_length: int, d_x: int, n_prompts: int) -> np.ndarray:
    """||softmax(scale X x_query)|| for every prompt."""
    task = TaskConfig(d_x=d_x, context_length=context_length)
    found = []
    for prompts in prompt_chunks(task, n_prompts, seed=0, size=500):
        scores = scale * torch.einsum("blx,bx->bl", prompts.x, prompts.x_query)
        found.append(scores.softmax(1).norm(dim=1))
    return torch.cat(found).numpy()


def measure(quick: bool) -> Measured:
    n_prompts = 500 if quick else 10_000
    edges = np.linspace(0, 1, 51)
    centres, frames, pages, modes = (edges[1:] + edges[:-1]) / 2, [], {}, {}
    for title, (scale, sizes) in PANELS.items():
        curves = {}
        for context_length, d_x in sizes:
            drawn = norms(scale, context_length, d_x, n_prompts)
            density = np.histogram(drawn, edges, density=True)[0]
            curves[f"L = {context_length}, d = {d_x}"] = density
            modes[scale, context_length, d_x] = centres[density.argmax()], np.mean(drawn > 0.8)
            row = {"scale": scale, "context_length": context_length, "d_x": d_x}
            frames.append(pd.DataFrame(row | {"norm": centres, "density": density}))
        shown = {"title": f"Norm of the attention pattern, {title}", "x_title": "norm"}
        pages[title] = figures.lines(centres, curves, y_title="density", **shown)
    first = [modes[0.5, length, 5][0] for length in (40, 100, 500)]
    concentrated = {scale: modes[scale, 800, 100][1] for scale in (0.5, 0.35)}
    sems = {scale: (part * (1 - part) / n_prompts) ** 0.5 for scale, part in concentrated.items()}
    falls = {"100 of 40 pairs": first[1] / first[0], "500 of 100": first[2] / first[1]}
    more = concentrated[0.35] - concentrated[0.5], float(np.hypot(*sems.values()))
    claims = [record("softmax-norm-falls", falls)]
    over = {"prompts": n_prompts}
    claims.append(record("softmax-norm-concentrates", {"d = 100": more}, over=over))
    return Measured(pd.concat(frames), pages, claims)
