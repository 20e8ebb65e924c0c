"""C14 of sparse regression: what a linear probe reads from each layer of trained models, and what the first one writes.

Of the first layer two things are asked: R x with the correlations r, as Algorithm 1 has it, and (S - 1) x with the
context's covariance S, as descent with a better condition would have it. Pruned models keep one head per later layer.
Run: python analyses/sparse_probes.py (a minute; --quick seconds)
"""

import numpy as np
import torch
from measured import Claim, Measured, run
from sparse_models import SEVERAL, SINGLE, named, prompts_of, trained
from sparse_setting import each

from mechinterp import figures
from mechinterp.analysis.probes import LayerProbes, probe_layers, reweighted
from mechinterp.analysis.pruning import prune
from mechinterp.icl.prompts import Prompts

MODELS = (SINGLE, *SEVERAL)


def spread(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Each position's (S - 1) x with S = (1/L) sum_l x_l x_l^T."""
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    target = x @ (prompts.x.mT @ prompts.x / prompts.x.shape[1]) - x
    return target, target


def falls(probes: LayerProbes) -> bool:
    """Whether the probe's risk never rises by more than 5% from layer to layer."""
    risk = probes.risk[:, -1]
    return bool((risk[1:] <= 1.05 * risk[:-1]).all())


def explained(probes: LayerProbes, layer: int) -> tuple[float, float]:
    """R^2 after some layers, with its standard error."""
    return float(probes.r2[layer, -1]), float(probes.r2_sem[layer, -1])


def measure(quick: bool) -> Measured:
    prompts = prompts_of(256 if quick else 4096)
    models = {name: trained(name).model for name in MODELS}
    found = {name: probe_layers(model, prompts) for name, model in models.items()}
    for name in SEVERAL:
        gone = prune(models[name], prompts).pruned_heads
        found[f"{name}, pruned"] = probe_layers(models[name], prompts, heads=gone)
    targets = {"R x": reweighted, "(S - 1) x": spread}
    written = {what: {name: probe_layers(model, prompts, target=target) for name, model in models.items()} for what, target in targets.items()}  # fmt: skip
    claims = []
    for name, probes in found.items():
        text = ", ".join(f"{risk:.3f} ± {sem:.3f}" for risk, sem in zip(probes.risk[:, -1], probes.risk_sem[:, -1], strict=True))  # fmt: skip
        claims.append(Claim("C14", "probes get better from layer to layer, or worse by 5% at most", name, "shown (second hand)", text, falls(probes)))  # fmt: skip
    apart = max(abs(found[n].risk[1, -1] - found[f"{n}, pruned"].risk[1, -1]) for n in SEVERAL)
    claims.append(Claim("C14", "after layer 1, which is not pruned, both read the same: within 1e-6", "sparse-h[48]-noise0.1-s0", "by construction", f"within {apart:.0e}", bool(apart <= 1e-6)))  # fmt: skip
    for what, probes in written.items():
        why = "what it does (inferred)" if what == "R x" else "not asked"
        for name, probe in probes.items():
            values = {"after it": explained(probe, 1), "before": explained(probe, 0)}
            claims.append(Claim("", f"layer 1 writes {what}: a linear map of it explains at least 0.9, of the input nothing", name, why, f"R² {each(values)}", values["after it"][0] >= 0.9 and values["before"][0] < 0.05))  # fmt: skip
    curves, layers = {name: probes.risk[:, -1] for name, probes in found.items()}, np.arange(5)
    errors = {name: probes.risk_sem[:, -1] for name, probes in found.items()}
    figure = figures.lines(layers, curves, errors=errors, title="What a linear probe of the query's stream gets wrong", x_title="layers run", y_title="excess risk (y²)", log_y=True)  # fmt: skip
    frames = {"response": named({name: probes.to_frame() for name, probes in found.items()})}
    frames |= {what: named({n: p.to_frame() for n, p in probes.items()}) for what, probes in written.items()}  # fmt: skip
    return Measured(named(frames, "target"), {"probes": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
