"""What the scripts about trained models of sparse regression share: the shipped models, their
prompts, and verdicts over seeds.

Linear scores, 4 layers, width 64, 50,000 steps on prompts of 8 to 40 pairs, d_x 16, 4 entries
+-1/2; 1, 4 and 8 heads at noise variances 0.1 and 0.4, two seeds. `sweeps/sparse.json` remakes
them.
"""

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from analyses.lib.measured import ROOT
from analyses.sparse import questions as ask
from mechinterp import Prompts, ablate_heads
from mechinterp.analysis.ablation.pruning import best_head_later
from mechinterp.checkpoints.checkpoint import Checkpoint, load

SEVERAL = (4, 8)


def named(n_heads: int, noise: float, seed: int) -> str:
    """The model's name.

    Example:
        >>> named(4, 0.1, 0)
        'sparse-h4-noise0.1-s0'
    """
    return f"sparse-h{n_heads}-noise{noise}-s{seed}"


def seeds(noise: float) -> list[int]:
    """Seeds of which the models of 1, 4 and 8 heads are shipped."""
    there = {file.parent.name for file in (ROOT / "checkpoints").glob("sparse-h*/config.json")}
    return [s for s in range(9) if {named(h, noise, s) for h in (1, *SEVERAL)} <= there]


NOISES = tuple(noise for noise in (0.1, 0.4, 0.8) if seeds(noise))
"""Noise variances of which models are shipped."""


def single_of(name: str) -> str:
    """The model of one head of the same noise and seed.

    Example:
        >>> single_of("sparse-h4-noise0.1-s1")
        'sparse-h1-noise0.1-s1'
    """
    return re.sub("-h[0-9]+-", "-h1-", name)


def shipped(noise: float, heads: tuple[int, ...] = (1, *SEVERAL)) -> dict[str, str]:
    """Names of the models of a noise variance, by number of heads and seed: "h4 s0"."""
    return {f"h{h} s{seed}": named(h, noise, seed) for h in heads for seed in seeds(noise)}


NOTE = "two seeds, three asked"
"""What the verdicts of C9 to C16 have to be read with."""


def trained(name: str) -> Checkpoint:
    """A shipped model."""
    return load(ROOT / "checkpoints" / name)


def prompts_of(noise: float, n_prompts: int, *, context_length: int | None = None) -> Prompts:
    """Prompts of the task that all models of a noise variance have, none of which they were trained
    or followed on."""
    task = trained(named(1, noise, 0)).config.task
    return ask.prompts_of(task, n_prompts, length=context_length)


def frames_of(frames: Mapping[str, pd.DataFrame], column: str = "model") -> pd.DataFrame:
    """Frames below each other, each with the name of what it is of."""
    return pd.concat([frame.assign(**{column: name}) for name, frame in frames.items()])


def best_later_on(name: str, scored: Prompts) -> np.ndarray:
    """All heads of the first layer and the best of each later one, chosen on these prompts
    alone."""
    return best_head_later(ablate_heads(trained(name).model, scored).rise)
