"""C10 of sparse regression: distribution of the work of trained models over the heads of each
layer.

Heads are masked one at a time (zero ablation), and the rises of the excess risk are normalised
within each layer; N_eff is exp of the entropy of these shares. C10 is decided by medians, because a
few prompts dominate the mean rise of a head without which the model breaks. "Layer 1" is the first,
L0. A head as wide as x can attend by all of it; a narrower head cannot.
Run: python -m analyses sparse/heads (two minutes; --quick seconds)"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, record
from analyses.sparse import questions as ask
from analyses.sparse import setting as at
from analyses.sparse.questions import Numbers
from mechinterp import Prompts, ablate
from mechinterp.analysis.ablation.ablation import Ablation
from mechinterp.analysis.ablation.shares import effective_number
from mechinterp.analysis.stats import halves

MEAN_PROMPTS, SAMPLES = 1024, 100


@dataclass(frozen=True)
class Spread:
    """Distribution of one model's work over the heads of each layer."""

    found: Ablation
    """Ablation of single heads, on all prompts."""
    effective: ask.EffectiveHeads
    tops: np.ndarray
    """Importance, on one half of the prompts, of the head of each layer that is best on the other
    half."""
    drawn: np.ndarray
    """Bootstrap samples of the effective heads by medians, [sample, layer]."""

    @property
    def means(self) -> at.Pair:
        """Effective heads of the first layer by mean rises, with standard error."""
        return float(self.effective.number[0]), float(self.effective.sem[0])

    def by_clause(self) -> dict[str, float | at.Pair]:
        """Numbers that decide C10; those of C11 and C12 are not measured here."""
        numbers = Numbers(self.effective.of_medians, self.tops, *[np.nan] * 3)
        found = {name: one for name, one in numbers.by_clause().items() if "C10" in name}
        samples = [Numbers(row, self.tops, *[np.nan] * 3).by_clause() for row in self.drawn]
        for name in ("C10-several", "C10-later"):
            found[name] = found[name], np.std([one[name] for one in samples], ddof=1)
        return found


def drawn(rises: np.ndarray) -> np.ndarray:
    """Effective heads by medians for bootstrap samples of the prompts, [sample, layer]."""
    rows = np.random.default_rng(0).integers(len(rises), size=(SAMPLES, len(rises)))
    return np.array([effective_number(np.median(rises[row], axis=0)) for row in rows])


def spread(name: str, prompts: Prompts) -> Spread:
    model = at.trained(name).model
    scored, measured = halves(prompts)
    _, tops = ask.spread(model, ask.rises(model, scored), measured)
    rises = ask.rises_of(model, prompts)
    return Spread(
        ablate(model, prompts, what="heads"), ask.effective_heads(rises), tops, drawn(rises)
    )


def heads_frame(found: Spread) -> pd.DataFrame:
    """One row per head, with the effective heads of its layer."""
    return found.found.to_frame().merge(found.effective.to_frame())


def spread_records(
    found: dict[str, Spread], n_prompts: int, *, note: str, suffix: str = ""
) -> list[Record]:
    """C10 by model, and the effective heads of layer 1 by mean rises."""
    chosen = {"prompts": n_prompts, "selection": "the best head chosen on half, measured on half"}
    over = {"prompts": n_prompts}
    asked = {"C10-several-means": {name: one.means for name, one in found.items()}}
    for name, one in found.items():
        for clause, value in one.by_clause().items():
            asked.setdefault(clause, {})[name] = value
    return [
        record(f"sparse-{id}{suffix}", values, over=chosen if "top" in id else over, note=note)
        for id, values in asked.items()
    ]


def measure(quick: bool) -> Measured:
    frames, found, pages, n_prompts = {}, {}, {}, 512 if quick else 4096
    for noise in at.NOISES:
        prompts = at.prompts_of(noise, n_prompts)
        for name in at.shipped(noise, at.SEVERAL).values():
            found[name] = spread(name, prompts)
            zero = found[name].found
            mean = ablate(
                at.trained(name).model, prompts[:MEAN_PROMPTS], what="heads", method="mean"
            )
            frames_by_method = {"zero": heads_frame(found[name]), "mean": mean.to_frame()}
            frames[name] = at.frames_of(frames_by_method, "method")
            pages |= {f"{name}-rise": zero.plot(), f"{name}-importance": zero.plot_importance()}
    claims = spread_records(found, n_prompts, note=at.NOTE)
    return Measured(at.frames_of(frames), pages, claims)
