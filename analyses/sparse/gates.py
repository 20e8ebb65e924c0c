"""Learned gates on the heads of a trained model of sparse regression, as a check of the masks. Not
part of C1 to C16.

Masking the only active head of layer 1 gives later layers input that they were not trained for.
Gates of all heads are fitted together, so that later layers can be turned down as layer 1 closes.
Risks are on prompts that were not fitted.
Run: python -m analyses sparse/gates (three minutes; --quick half a minute)"""

from functools import partial

import numpy as np
import torch

from analyses.lib import Measured, record
from analyses.lib.gates import learn_gates
from analyses.sparse.setting import named, prompts_of, ratio, trained
from mechinterp import Prompts
from mechinterp.analysis.stats import halves
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.hooked.masks import z_name

NOISE = 0.1
NAME = named(4, NOISE, 0)


def gated(gates: np.ndarray, prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt with every head's output multiplied by its gate."""

    def gate(z, hook, *, row):
        return z * row.to(z)[:, None]

    model, rows = trained(NAME).model, prompts.x.new_tensor(gates)
    hooks = [(z_name(layer), partial(gate, row=row)) for layer, row in enumerate(rows)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return excess_risk(model.predict(prompts), prompts).double().numpy()


def measure(quick: bool) -> Measured:
    prompts = prompts_of(NOISE, 512 if quick else 2048)
    found = learn_gates(trained(NAME).model, prompts, steps=20 if quick else 150)
    measured = halves(prompts)[1]
    full = gated(np.ones_like(found.free), measured)
    without = found.closed * (np.arange(len(found.closed)) > 0)[:, None]
    gates = {"gates": found.closed, "gates, layer 1 at zero": without}
    values = {what: ratio(gated(one, measured), full) for what, one in gates.items()}
    open_heads = (found.closed > 0.5).sum(1)
    text = "open gates: " + ", ".join(f"L{layer} {n}" for layer, n in enumerate(open_heads))
    over = {"prompts": len(measured), "selection": "gates fitted to other prompts"}
    claims = [
        record("sparse-gates-open", {NAME: open_heads[0]}, text=text),
        record("sparse-gates-risk", values, over=over),
    ]
    return Measured(found.to_frame(), {"gates": found.plot()}, claims)
