"""Methods of other libraries by adapters of a few lines, for environments that have them (`make test-peers`)."""

import numpy as np
import torch
from torch import Tensor

from analyses.known.gradients import FINE_STEPS, Answer, moved_heads, pair_of
from mechinterp.known import Entry


def captum_integrated(entry: Entry, *, steps: int = FINE_STEPS) -> Answer:
    """Integrated gradients of heads by captum: its internal influence of z, the mean gradient along the path, times the
    change of z."""
    from captum.attr import InternalInfluence

    pair = pair_of(entry)
    model, read = pair.hooked.model, pair.hooked.read

    def closeness(tokens: Tensor, target: Tensor) -> Tensor:
        return -(read(model(tokens)) - target).square().sum(-1)

    with torch.no_grad():
        target = read(model(pair.clean))
    heads = []
    for block, moved in zip(model.blocks, moved_heads(pair), strict=True):
        influence = InternalInfluence(closeness, block.attn.hook_z)
        mean = influence.attribute(
            pair.clean,
            baselines=pair.corrupted,
            additional_forward_args=target,
            n_steps=steps,
            method="riemann_middle",
        )
        heads.append((mean * moved).sum((1, 3)).mean(0).numpy(force=True))
    return {"heads": np.stack(heads)}
