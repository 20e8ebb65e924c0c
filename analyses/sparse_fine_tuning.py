"""What trained models of sparse regression win back when they are trained further with one head in each later layer.

Kept are all heads of layer 1 and the best of each later one, as in sparse_pruning.py. They and the full model, as a control,
are trained for another tenth of their training, with its step size, prompts of its lengths and its half cosine.
Run: python analyses/sparse_fine_tuning.py (a quarter of an hour; --quick one minute)
"""

from measured import Claim, Measured, run
from sparse_models import (  # fmt: skip
    best_later_on,
    frames_of,
    groups,
    over_seeds,
    prompts_of,
    single_of,
    trained,
    verdict,
)
from sparse_setting import each, ratio

from mechinterp.analysis.heads.errors import masked_errors
from mechinterp.analysis.heads.fine_tuning import MODELS, FineTuning, fine_tune
from mechinterp.analysis.heads.pairs import halves
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.deep import predict_deep

STEPS = 5000


def to_single(name: str, tuned: FineTuning, measured: Prompts) -> tuple[float, float]:
    """Risk of the pruned model in the end, over that of the single head of the same seed."""
    pruned = excess_risk(predict_deep(tuned.weights.stack, measured), measured).double().numpy()
    single = masked_errors(trained(single_of(name)).model, measured, [[]])[:, 0]
    return ratio(pruned, single)


def claims(models: str, found: dict[str, FineTuning], single: dict[str, tuple[float, float]]) -> list[Claim]:  # fmt: skip
    """Of the models of all seeds; `found` and `single` are by seed."""
    ends = {f"{seed}, {which}": (float(one.ratio[row, -1]), float(one.ratio_sem[row, -1])) for seed, one in found.items() for row, which in enumerate(MODELS)}  # fmt: skip
    held = verdict(one.ratio[0, -1] <= 1.25 for one in found.values())
    text = "one head in each later layer will do, trained for a tenth longer: at most 1.25 times the risk of the full model as it was"  # fmt: skip
    return [
        Claim("", text, models, "not asked", each(ends, 2), held),
        Claim("C13", "pruned and trained for a tenth longer it beats the single head of the same seed: at most 0.95 of its risk", models, "shown (second hand)", each(single, 2), verdict(value <= 0.95 for value, _ in single.values())),
    ]  # fmt: skip


def measure(quick: bool) -> Measured:
    frames, made, pages, steps = {}, [], {}, 40 if quick else STEPS
    for heads, noise, names in groups():
        prompts, found, single = prompts_of(noise, 256 if quick else 4096), {}, {}
        scored, measured = halves(prompts)
        for seed, name in names.items():
            kept = best_later_on(name, scored)
            found[seed] = fine_tune(trained(name), kept, measured, steps=steps)
            single[seed] = to_single(name, found[seed], measured)
            frames[name] = found[seed].to_frame().rename(columns={"model": "heads"})
            pages[name] = found[seed].plot()
        made += claims(over_seeds(heads, noise), found, single)
    return Measured(frames_of(frames), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
