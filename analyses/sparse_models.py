"""What the scripts about trained models of sparse regression share: the shipped models and their prompts.

Linear scores, 4 layers, width 64, 50,000 steps on prompts of 8 to 40 pairs, d_x 16, 4 entries +-1/2, noise variance 0.1.
`sweeps/sparse.json` names 13 models; those of 1, 4 and 8 heads at noise variance 0.1, one seed each, are shipped.
"""

from collections.abc import Mapping

import pandas as pd
from measured import ROOT

from mechinterp.checkpoints.deep import DeepCheckpoint, load_saved
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts

SINGLE = "sparse-h1-noise0.1-s0"
SEVERAL = ("sparse-h4-noise0.1-s0", "sparse-h8-noise0.1-s0")


def trained(name: str) -> DeepCheckpoint:
    """A shipped model."""
    found = load_saved(ROOT / "checkpoints" / name)
    assert isinstance(found, DeepCheckpoint)
    return found


def prompts_of(n_prompts: int, *, context_length: int | None = None) -> Prompts:
    """Prompts of the task that all shipped models have, none of which they were trained or followed on."""
    task, generator = trained(SINGLE).config.task, generator_for(1, "eval", 0)
    return sample_prompts(task, n_prompts, generator=generator, context_length=context_length)


def named(frames: Mapping[str, pd.DataFrame], column: str = "model") -> pd.DataFrame:
    """Frames below each other, each with the name of what it is of."""
    return pd.concat([frame.assign(**{column: name}) for name, frame in frames.items()])
