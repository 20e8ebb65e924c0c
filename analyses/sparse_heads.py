"""C10 of sparse regression: how trained models spread their work over the heads of each layer.

Heads are masked one at a time (zero ablation) and the rises of the excess risk normalised within each layer; N_eff is exp
of the entropy of these shares. A few prompts carry the mean rise of a head without which the model breaks, so that the
same is said by medians. "Layer 1" is the first, L0. A head as wide as x can reach all of it, a narrower one not.
Run: python analyses/sparse_heads.py (two minutes; --quick seconds)
"""

import numpy as np
from measured import Claim, Measured, run
from sparse_models import frames_of, groups, named, over_seeds, prompts_of, trained, verdict
from sparse_setting import each

from mechinterp.analysis.heads.ablation import HeadAblation, ablate_heads

MEAN_PROMPTS = 1024


def layers(found: HeadAblation) -> str:
    """Effective number of heads of each layer, with its standard error."""
    pairs = zip(found.effective_heads, found.effective_heads_sem, strict=True)
    return each({f"L{layer}": (float(number), float(sem)) for layer, (number, sem) in enumerate(pairs)}, 2)  # fmt: skip


def claims(heads: int, noise: float, found: dict[str, HeadAblation]) -> list[Claim]:
    """Of the models of all seeds; `found` is by seed."""
    models, d_head = over_seeds(heads, noise), trained(named(heads, noise, 0)).config.d_head
    first = {seed: (float(one.effective_heads[0]), float(one.effective_heads_sem[0])) for seed, one in found.items()}  # fmt: skip
    numbers, shares = ([getattr(one, name) for one in found.values()] for name in ("effective_heads", "importance"))  # fmt: skip
    tops = [share.max(1) for share in shares]
    spread = "; ".join(f"{seed}: {layers(one)}" for seed, one in found.items())
    medians = "; ".join(f"{seed} {one.effective_heads_of_medians[0]:.2f}" for seed, one in found.items())  # fmt: skip
    text = "; ".join(f"{seed} {', '.join(f'{t:.2f}' for t in top)}" for seed, top in zip(found, tops, strict=True))  # fmt: skip
    return [
        Claim("C10", "layer 1 uses several heads: N_eff at least 2", f"{models}, d_head {d_head}", "several", f"{each(first, 2)}; by medians {medians}", verdict(n[0] >= 2 for n in numbers)),
        Claim("C10", "and at least 1.5 times as many as any later layer", models, "layer 1 only", spread, verdict(n[0] >= 1.5 * n[1:].max() for n in numbers)),
        Claim("C10", "the best head of layer 1 has at most 0.6 of its importance, that of later layers 0.7 (median)", models, "one dominates later layers", f"from L0 on: {text}", verdict(t[0] <= 0.6 and np.median(t[1:]) >= 0.7 for t in tops)),
    ]  # fmt: skip


def measure(quick: bool) -> Measured:
    frames, made, pages = {}, [], {}
    for heads, noise, names in groups():
        found, prompts = {}, prompts_of(noise, 512 if quick else 4096)
        for seed, name in names.items():
            zero = found[seed] = ablate_heads(trained(name).model, prompts)
            mean = ablate_heads(trained(name).model, prompts[:MEAN_PROMPTS], method="mean")
            both = {one.method: one.to_frame().merge(one.layer_frame()) for one in (zero, mean)}
            frames[name] = frames_of(both, "method")
            pages |= {f"{name}-rise": zero.plot(), f"{name}-importance": zero.plot_importance()}
        made += claims(heads, noise, found)
    return Measured(frames_of(frames), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
