"""Figure 11: losses of models with other score functions over the context length, beside debiased GD.

He et al. 2025, arXiv 2503.12734, figure 11. Debiased GD takes each model's own step, 2 C0 omega mu, or the best one. All
share 20,000 prompts per length. Run: python analyses/softmax_figure_11.py (a minute; --quick 1,000 prompts)
"""

from functools import partial

from measured import SETTING, Claim, Measured, checkpoint, run

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd
from mechinterp.theory.softmax import debiased_step_size

NAMES = ("softmax-h2-s0", "affine-1.0-h2-s0", "tanh-h2-s0", "square-1.0-h2-s0")
LENGTHS = tuple(range(10, 101, 10))


def measure(quick: bool) -> Measured:
    models = {name: checkpoint(name) for name in NAMES}
    steps = {name: float(classify(model).scales.eta[0]) for name, model in models.items()}
    learners = {
        f"debiased GD, step of {name}": partial(debiased_gd, eta=eta) for name, eta in steps.items()
    }
    learners["debiased GD, best step"] = partial(debiased_gd, eta=debiased_step_size(**SETTING))
    found = shared_losses(
        models | learners,
        TaskConfig(),
        context_lengths=LENGTHS,
        n_prompts=1000 if quick else 20_000,
    )
    loss = dict(zip(found.models, found.loss[LENGTHS.index(40)], strict=True))
    best, claims = loss["debiased GD, best step"], []
    for name, eta in steps.items():
        own = loss[name] / loss[f"debiased GD, step of {name}"] - 1
        claims.append(
            Claim(
                "",
                f"the curve is that of debiased GD with the model's own step ({eta:.3f})",
                name,
                "coincide",
                f"loss at L = 40 {own:+.1%} from it, {loss[name] / best - 1:+.1%} from the best step's",
                bool(abs(own) < 0.01),
            )
        )
    return Measured(found.to_frame(), {"losses": found.plot()}, claims)


if __name__ == "__main__":
    run(measure, __file__)
