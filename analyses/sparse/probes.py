"""C14 of sparse regression: linear probes of each layer of trained models, and the output of the
first layer.

Two targets are tried for the first layer: R x with the correlations r, as in Algorithm 1, and (S -
1) x with the context's covariance S, as for descent with a better condition number. Pruned models
keep one head per later layer.
Run: python -m analyses sparse/probes (two minutes; --quick seconds)"""

import numpy as np

from analyses.lib import Measured, Record, records
from analyses.sparse import setting as at
from analyses.sparse.setting import TARGETS
from mechinterp import probe
from mechinterp.analysis.ablation.pruning_rules import masked_by
from mechinterp.analysis.probing.probe import LayerProbes
from mechinterp.analysis.stats import halves


def largest_rise(probes: LayerProbes) -> float:
    """Largest factor on the probe's risk from one layer to the next."""
    risk = probes.risk[:, -1]
    return float((risk[1:] / risk[:-1]).max())


def explained(probes: LayerProbes, layer: int) -> tuple[float, float]:
    """R^2 after a number of layers, with its standard error."""
    return float(probes.r2[layer, -1]), float(probes.r2_sem[layer, -1])


def written(found: dict[str, dict[str, LayerProbes]], *, suffix: str = "") -> list[Record]:
    """Records of how well a linear map of the output of layer 1 explains the two targets, by model."""
    asked = {
        f"{name}-{when}{suffix}": {m: explained(one[what], layer) for m, one in found.items()}
        for what, name in (("R x", "correlations"), ("(S - 1) x", "covariance"))
        for when, layer in (("after", 1), ("before", 0))
    }
    return records("sparse-writes-", asked)


def claims_of(found: dict[str, dict[str, LayerProbes]], n_prompts: int) -> list[Record]:
    """C14 and the output of layer 1, by model; `found` is by model and by target."""
    chosen = {"prompts": n_prompts // 2, "selection": "heads chosen on other prompts"}
    several = {model: one for model, one in found.items() if "pruned" in one}
    firsts = {m: [one[w].risk[1, -1] for w in ("response", "pruned")] for m, one in several.items()}
    asked = {
        "full": {model: largest_rise(one["response"]) for model, one in found.items()},
        "pruned": {model: largest_rise(one["pruned"]) for model, one in several.items()},
        "first-layer": {model: np.abs(full - pruned) for model, (full, pruned) in firsts.items()},
    }
    return records("sparse-C14-", asked, over=chosen, note=at.NOTE) + written(found)


def measure(quick: bool) -> Measured:
    frames, found, pages, n_prompts = {}, {}, {}, 256 if quick else 4096
    for noise in at.NOISES:
        prompts = at.prompts_of(noise, n_prompts)
        scored, measured = halves(prompts)
        for name in at.shipped(noise).values():
            model = at.trained(name).model
            one = {"response": probe(model, measured, targets="y").probes["y"]}
            if name != at.single_of(name):
                gone = masked_by(at.best_later_on(name, scored))
                masked = probe(model, measured, targets="y", heads=gone)
                one["pruned"] = masked.probes["y"]
            one |= probe(model, prompts, targets=TARGETS).probes
            found[name] = one
            frames[name] = at.frames_of({what: p.to_frame() for what, p in one.items()}, "target")
            pages[name] = one["response"].plot()
    return Measured(at.frames_of(frames), pages, claims_of(found, n_prompts))
