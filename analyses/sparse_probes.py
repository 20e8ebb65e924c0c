"""C14 of sparse regression: what a linear probe reads from each layer of trained models, and what the first one writes.

Of the first layer two things are asked: R x with the correlations r, as Algorithm 1 has it, and (S - 1) x with the
context's covariance S, as descent with a better condition would have it. Pruned models keep one head per later layer.
Run: python analyses/sparse_probes.py (two minutes; --quick seconds)
"""

from itertools import product

from measured import Claim, Measured, run
from sparse_models import (  # fmt: skip
    NOISES,
    SEVERAL,
    best_later_on,
    frames_of,
    named,
    over_seeds,
    prompts_of,
    seeds,
    trained,
    verdict,
)
from sparse_setting import TARGETS, each

from mechinterp.analysis.heads.choices import masked_by
from mechinterp.analysis.heads.pairs import halves
from mechinterp.analysis.probing.probes import LayerProbes, probe_layers

ROUNDING = 1e-6


def falls(probes: LayerProbes) -> bool:
    """Whether the probe's risk never rises by more than 5% from layer to layer."""
    risk = probes.risk[:, -1]
    return bool((risk[1:] <= 1.05 * risk[:-1]).all())


def told(found: dict[str, LayerProbes]) -> str:
    """Risks layer by layer, by seed."""
    rows = {seed: zip(one.risk[:, -1], one.risk_sem[:, -1], strict=True) for seed, one in found.items()}  # fmt: skip
    return "; ".join(f"{seed} " + ", ".join(f"{r:.3f} ± {sem:.3f}" for r, sem in row) for seed, row in rows.items())  # fmt: skip


def explained(found: dict[str, LayerProbes], layer: int, when: str) -> dict[str, tuple[float, float]]:  # fmt: skip
    """R^2 after some layers, with its standard error, by seed."""
    return {f"{seed} {when}": (float(one.r2[layer, -1]), float(one.r2_sem[layer, -1])) for seed, one in found.items()}  # fmt: skip


def claims(models: str, found: dict[str, dict[str, LayerProbes]]) -> list[Claim]:
    """Of the models of all seeds; `found` is by what is probed, and by seed."""
    text = "probes get better from layer to layer, or worse by 5% at most"
    made = [Claim("C14", text, models if what == "response" else f"{models}, {what}", "shown (second hand)", told(found[what]), verdict(map(falls, found[what].values()))) for what in ("response", "pruned") if what in found]  # fmt: skip
    if "pruned" in found:
        pairs = [(found["response"][seed], found["pruned"][seed]) for seed in found["pruned"]]
        apart = max(abs(one.risk[1, -1] - other.risk[1, -1]) for one, other in pairs)
        shown = f"within {apart:.0e}" if apart else "equal"
        made.append(Claim("C14", "after layer 1, which is not pruned, both read the same: within 1e-6", models, "by construction", shown, bool(apart <= ROUNDING)))  # fmt: skip
    for what in TARGETS:
        why = "what it does (inferred)" if what == "R x" else "not asked"
        after, before = explained(found[what], 1, "after it"), explained(found[what], 0, "before")
        held = [a >= 0.9 and b < 0.05 for (a, _), (b, _) in zip(after.values(), before.values(), strict=True)]  # fmt: skip
        made.append(Claim("", f"layer 1 writes {what}: a linear map of it explains at least 0.9, of the input nothing", models, why, f"R² {each(after | before)}", verdict(held)))  # fmt: skip
    return made


def measure(quick: bool) -> Measured:
    frames, made, pages = {}, [], {}
    for noise, heads in product(NOISES, (1, *SEVERAL)):
        prompts, found = prompts_of(noise, 256 if quick else 4096), {}
        for seed in seeds(noise):
            name = named(heads, noise, seed)
            model = trained(name).model
            one = {"response": probe_layers(model, prompts)}
            if heads > 1:
                gone = masked_by(best_later_on(name, halves(prompts)[0]))
                one["pruned"] = probe_layers(model, prompts, heads=gone)
            one |= {what: probe_layers(model, prompts, target=target) for what, target in TARGETS.items()}  # fmt: skip
            for what, probes in one.items():
                found.setdefault(what, {})[f"s{seed}"] = probes
            frames[name] = frames_of({what: probes.to_frame() for what, probes in one.items()}, "target")  # fmt: skip
            pages[name] = one["response"].plot()
        made += claims(over_seeds(heads, noise), found)
    return Measured(frames_of(frames), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
