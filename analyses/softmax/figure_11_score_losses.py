"""Figure 11: losses of models with other score functions over the context length, beside debiased
GD.

He et al. 2025, arXiv 2503.12734, figure 11. Debiased GD takes each model's own step, 2 C0 omega mu,
or the best one. All share 20,000 prompts per length. Run: python -m analyses softmax/figure_11_score_losses
(a minute; --quick 1,000 prompts)
"""

from functools import partial

from analyses.lib import SETTING, Measured, checkpoint, records
from mechinterp import TaskConfig, classify
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.icl.predictors import debiased_gd
from mechinterp.theory.softmax import debiased_step_size

# Of the first two the step is exact to first order.
NAMES = ("softmax-h2-s0", "affine-1.0-h2-s0", "tanh-h2-s0", "square-1.0-h2-s0")
LENGTHS = tuple(range(10, 101, 10))


def measure(quick: bool) -> Measured:
    models = {name: checkpoint(name) for name in NAMES}
    steps = {name: float(classify(model).scales.eta[0]) for name, model in models.items()}
    own = {f"debiased GD, step of {name}": eta for name, eta in steps.items()}
    own["debiased GD, best step"] = debiased_step_size(**SETTING)
    models |= {name: partial(debiased_gd, eta=eta) for name, eta in own.items()}
    n_prompts = 1000 if quick else 20_000
    found = shared_losses(models, TaskConfig(), context_lengths=LENGTHS, n_prompts=n_prompts)
    at = LENGTHS.index(40)
    loss = dict(zip(found.models, found.loss[at], strict=True))
    own = {name: loss[name] / loss[f"debiased GD, step of {name}"] - 1 for name in steps}
    exact, others = NAMES[:2], NAMES[2:]
    asked = {
        "first-order": {name: abs(own[name]) for name in exact},
        "others": {name: abs(own[name]) for name in others},
        "below": {name: own[name] for name in others},
    }
    claims = records("softmax-A1-nominal-", asked, over={"prompts": n_prompts})
    return Measured(found.to_frame(), {"losses": found.plot()}, claims)
