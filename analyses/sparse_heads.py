"""C10 of sparse regression: how trained models spread their work over the heads of each layer.

Heads are masked one at a time (zero ablation) and the rises of the excess risk normalised within each layer; N_eff is exp
of the entropy of these shares. "Layer 1" is the first, L0. A head as wide as x can reach all of it, a narrower one not.
Run: python analyses/sparse_heads.py (two minutes; --quick seconds)
"""

import numpy as np
from measured import Claim, Measured, run
from sparse_models import SEVERAL, named, prompts_of, trained
from sparse_setting import each

from mechinterp.analysis.heads import HeadAblation, ablate_heads

METHODS = ("zero", "mean")


def layers(found: HeadAblation) -> dict[str, tuple[float, float]]:
    """Effective number of heads of each layer, with its standard error."""
    pairs = zip(found.effective_heads, found.effective_heads_sem, strict=True)
    return {f"L{layer}": (float(number), float(sem)) for layer, (number, sem) in enumerate(pairs)}


def measure(quick: bool) -> Measured:
    prompts, frames, claims, pages = prompts_of(512 if quick else 4096), {}, [], {}
    for name in SEVERAL:
        found = {m: ablate_heads(trained(name).model, prompts, method=m) for m in METHODS}
        zero = found["zero"]
        number, sem, share = zero.effective_heads, zero.effective_heads_sem, zero.importance.max(1)
        d_head = trained(name).config.d_head
        shares = ", ".join(f"{s:.2f}" for s in share)
        claims += [
            Claim("C10", "layer 1 uses several heads: N_eff at least 2", f"{name}, d_head {d_head}", "several", each({"L0": (number[0], sem[0])}, 2), bool(number[0] >= 2)),
            Claim("C10", "and at least 1.5 times as many as any later layer", name, "layer 1 only", each(layers(zero), 2), bool(number[0] >= 1.5 * number[1:].max())),
            Claim("C10", "the best head of layer 1 has at most 0.6 of its importance, that of later layers 0.7 (median)", name, "one dominates later layers", f"{shares} from L0 on", bool(share[0] <= 0.6 and np.median(share[1:]) >= 0.7)),
        ]  # fmt: skip
        frames[name] = named({m: f.to_frame().merge(f.layer_frame()) for m, f in found.items()}, "method")  # fmt: skip
        pages |= {f"{name}-rise": zero.plot(), f"{name}-importance": zero.plot_importance()}
    return Measured(named(frames), pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
