"""C10 of sparse regression: how trained models spread their work over the heads of each layer.

Heads are masked one at a time (zero ablation) and the rises of the excess risk normalised within
each layer; N_eff is exp of the entropy of these shares. A few prompts carry the mean rise of a head
without which the model breaks, so that C10 is judged by medians. "Layer 1" is the first, L0. A
head as wide as x can reach all of it, a narrower one not. Run: python -m analyses.sparse.heads (two
minutes; --quick seconds)
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, record, run
from analyses.sparse.models import NOTE, frames_of, groups, prompts_of, trained
from analyses.sparse.questions import Numbers
from mechinterp import Prompts, ablate_heads
from mechinterp.analysis.ablation.pairs import halves
from mechinterp.analysis.ablation.single import HeadAblation

MEAN_PROMPTS = 1024


@dataclass(frozen=True)
class Spread:
    """How one model spreads its work over the heads of each layer."""

    found: HeadAblation
    """On all prompts."""
    tops: np.ndarray
    """The importance, on one half of the prompts, of the head of each layer that is the best on the
    other."""

    @property
    def means(self) -> tuple[float, float]:
        """Effective heads of the first layer by mean rises, with the standard error."""
        return float(self.found.effective_heads[0]), float(self.found.effective_heads_sem[0])

    def by_clause(self) -> dict[str, float]:
        """What C10 is judged by; of C11 and C12 nothing was measured here."""
        numbers = Numbers(self.found.effective_heads_of_medians, self.tops, *[np.nan] * 3)
        return {name: value for name, value in numbers.by_clause().items() if "C10" in name}


def spread(name: str, prompts: Prompts) -> Spread:
    scored, measured = (ablate_heads(trained(name).model, half) for half in halves(prompts))
    best = scored.importance.argmax(1)[:, None]
    tops = np.take_along_axis(measured.importance, best, 1)[:, 0]
    return Spread(ablate_heads(trained(name).model, prompts), tops)


def records(
    found: dict[str, Spread], n_prompts: int, *, note: str, suffix: str = ""
) -> list[Record]:
    """C10, by model, and the heads of layer 1 by mean rises."""
    chosen = {"prompts": n_prompts, "selection": "the best head chosen on half, measured on half"}
    over = {"prompts": n_prompts}
    clauses = pd.DataFrame({name: one.by_clause() for name, one in found.items()}).T
    asked = {f"{clause}{suffix}": clauses[clause] for clause in clauses}
    asked[f"C10-several-means{suffix}"] = {name: one.means for name, one in found.items()}
    return [
        record(f"sparse-{id}", values, over=chosen if "top" in id else over, note=note)
        for id, values in asked.items()
    ]


def measure(quick: bool) -> Measured:
    frames, found, pages, n_prompts = {}, {}, {}, 512 if quick else 4096
    for _, noise, names in groups():
        prompts = prompts_of(noise, n_prompts)
        for name in names.values():
            found[name] = spread(name, prompts)
            zero = found[name].found
            mean = ablate_heads(trained(name).model, prompts[:MEAN_PROMPTS], method="mean")
            both = {one.method: one.to_frame().merge(one.layer_frame()) for one in (zero, mean)}
            frames[name] = frames_of(both, "method")
            pages |= {f"{name}-rise": zero.plot(), f"{name}-importance": zero.plot_importance()}
    claims = records(found, n_prompts, note=NOTE)
    return Measured(frames_of(frames), pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
