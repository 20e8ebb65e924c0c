"""C10 of sparse regression: how trained models spread their work over the heads of each layer.

Heads are masked one at a time (zero ablation) and the rises of the excess risk normalised within
each layer; N_eff is exp of the entropy of these shares. A few prompts carry the mean rise of a head
without which the model breaks, so that the same is said by medians. "Layer 1" is the first, L0. A
head as wide as x can reach all of it, a narrower one not. Run: python analyses/sparse_heads.py (two
minutes; --quick seconds)
"""

from dataclasses import dataclass

import numpy as np
from measured import Measured, run
from records import Record, with_errors
from sparse_models import MODELS, NOTE, frames_of, groups, prompts_of, trained

from mechinterp.analysis.heads.ablation import HeadAblation, ablate_heads
from mechinterp.analysis.heads.pairs import halves
from mechinterp.icl.prompts import Prompts

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
    def first(self) -> tuple[float, float]:
        """Effective heads of the first layer, with the standard error."""
        return float(self.found.effective_heads[0]), float(self.found.effective_heads_sem[0])

    @property
    def beside_later(self) -> tuple[float, float]:
        """Those over the most of any later layer."""
        numbers, sems = self.found.effective_heads, self.found.effective_heads_sem
        most = 1 + numbers[1:].argmax()
        value = numbers[0] / numbers[most]
        relative = np.hypot(sems[0] / numbers[0], sems[most] / numbers[most])
        return float(value), float(value * relative)


def spread(name: str, prompts: Prompts) -> Spread:
    scored, measured = (ablate_heads(trained(name).model, half) for half in halves(prompts))
    best = scored.importance.argmax(1)[:, None]
    tops = np.take_along_axis(measured.importance, best, 1)[:, 0]
    return Spread(ablate_heads(trained(name).model, prompts), tops)


def records(found: dict[str, Spread], n_prompts: int, *, suffix: str = "", **more) -> list[Record]:
    """C10, by model."""
    chosen = {"prompts": n_prompts, "selection": "the best head chosen on half, measured on half"}
    over = {"prompts": n_prompts}
    return [
        Record(
            id=f"sparse-C10-{name}{suffix}",
            statement=statement,
            quantity=quantity,
            relation=relation,
            bound=bound,
            tag=tag,
            paper="one head dominates later layers",
            over=where,
            **measured,
            **more,
        )
        for name, statement, quantity, relation, bound, tag, where, measured in (
            (
                "several",
                "layer 1 uses several heads",
                "effective heads",
                "at least",
                2,
                "second hand",
                over,
                with_errors({name: one.first for name, one in found.items()}),
            ),
            (
                "several-medians",
                "the same by median rises",
                "effective heads",
                "at least",
                2,
                "ours",
                over,
                {
                    "values": {
                        n: one.found.effective_heads_of_medians[0] for n, one in found.items()
                    }
                },
            ),
            (
                "later",
                "and more than any later layer",
                "effective heads over the most of a later layer",
                "at least",
                1.5,
                "second hand",
                over,
                with_errors({name: one.beside_later for name, one in found.items()}),
            ),
            (
                "top-first",
                "no head dominates layer 1",
                "share of its best head",
                "at most",
                0.6,
                "second hand",
                chosen,
                {"values": {name: one.tops[0] for name, one in found.items()}},
            ),
            (
                "top-later",
                "one dominates later layers",
                "share of the best head, median over later layers",
                "at least",
                0.7,
                "second hand",
                chosen,
                {"values": {name: np.median(one.tops[1:]) for name, one in found.items()}},
            ),
        )
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
    claims = records(found, n_prompts, models=MODELS, note=NOTE)
    return Measured(frames_of(frames), pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
