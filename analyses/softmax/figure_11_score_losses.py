"""Figure 11: losses of models with other score functions over the context length, beside debiased
GD.

He et al. 2025, arXiv 2503.12734, figure 11. Debiased GD takes each model's own step, 2 C0 omega mu,
or the best one. All share 20,000 prompts per length. Run: python -m analyses.softmax.figure_11_score_losses
(a minute; --quick 1,000 prompts)
"""

from functools import partial

from analyses.lib.measured import SETTING, Measured, checkpoint, run
from analyses.lib.records import record
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.classify import classify
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
    at = LENGTHS.index(40)
    loss = dict(zip(found.models, found.loss[at], strict=True))
    own = {name: loss[name] / loss[f"debiased GD, step of {name}"] - 1 for name in steps}
    exact = ("softmax-", "affine-")
    claims = [
        record(
            f"softmax-A1-nominal-{family}",
            {name: abs(own[name]) for name in kept},
            over={"prompts": 1000 if quick else 20_000},
        )
        for family, kept in (
            ("first-order", [n for n in NAMES if n.startswith(exact)]),
            ("others", [n for n in NAMES if not n.startswith(exact)]),
        )
    ]
    others = [name for name in NAMES if not name.startswith(exact)]
    claims.append(
        record(
            "softmax-A1-nominal-below",
            {name: own[name] for name in others},
            over={"prompts": 1000 if quick else 20_000},
        )
    )
    return Measured(found.to_frame(), {"losses": found.plot()}, claims)


if __name__ == "__main__":
    run(measure, __file__)
