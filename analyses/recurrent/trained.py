"""Error rates of labels and readings of trained layers along the pairs.

    python -m analyses.recurrent.trained --layers FOLDER  (ten minutes on one core)

The layers are those of analyses/recurrent/layers.py. The truth about a layer comes from its predictions, by fits of five
learners that are written as loops (analyses/recurrent/learners.py) and share no code with the rules of names. A label is
right if all three hold. On tasks that drift, each learner also counts times rho, as a prediction with the next task vector.
Since the fourth draw a factor within 5% of 1 or rho is fitted too, as in the rules of names, and fits have three starts:

- its learner explains R² 0.98 on fresh prompts of the layer's task, and 0.95 on prompts with another drift;
- no other of the five explains more by 0.005 on either;
- if it contains a smaller learner, that one explains less by more than two standard errors on one of the two, or at double
  length, where the formula of the layer says which sums grow with the length.

Its scalars are right if alpha is within 0.01 of the gate in the weights, and the others within 10% of theirs; this is asked
of layers of one head with constant gates, and of scalars whose stated error is finite. The right class of `response` follows from finite differences of the predictions; in the first
draw it was that of the layer's formula, which is another where keys read y. Layers that the file already has, and
those that are not trained yet, are skipped. Writes analyses/results/recurrent/calibration_trained.csv for the fourth draw; those of
the first three, under earlier rules, are calibration_trained_{first,second,third}.csv.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torch import Tensor

from analyses.lib.measured import parsed, parser_of
from analyses.recurrent import learners as make
from analyses.recurrent.calibration import FOLDER, NAMELESS
from analyses.recurrent.layers import FOLDER as LAYERS
from analyses.recurrent.layers import configs
from analyses.recurrent.learners import Learner
from analyses.recurrent.weights import LEARNER, loss_over_bayes, said_by_weights
from mechinterp import Checkpoint, Prompts, TaskConfig, load, name_algorithm, response
from mechinterp.analysis.response import reading
from mechinterp.icl.prompts import draw_prompts

DRAW = "fourth"
"""Draw of the layers that are named."""
FILE = "calibration_trained.csv"
N_FITTED, N_SCORED = 256, 2048
FITTED, SCORED = 7101, 7102
"""Seeds of the prompts of fits and of scores."""
OWN, OTHER = 0.98, 0.95
"""Smallest R² of a right label's learner, on prompts of the task and with another drift."""
READ_OUT = 0.05
"""Largest distance from 1 of a fitted factor on predictions."""
STARTS = (0.2, 0.05, 0.01)
"""First forgetting per pair, -log of the factor, of the fits."""
LEAD = 0.005
ERRORS = 2
"""Standard errors by which a smaller learner must be worse than one that contains it."""
ALPHA, RELATIVE = 0.01, 0.1
"""Largest error of alpha, and relative error of the other scalars, against the weights."""
EVEN, MARGIN = 0.15, 0.02
"""Part of the squared predictions that is even in y above which a learner is no linear map, and room for either answer."""
CONTAINS = {"forgetting_gd": "gradient_descent", "recursive_least_squares": "ridge_like"}
FORGETS, STILL, ONLINE = 0.1, 0.01, 0.01
"""Limits of docs/response.md: fall of a weight over the prompt from which on it counts as forgetting; effect of a pair on a
weight below which pairs do not interact; part of the effect of later pairs below which earlier ones have none."""
MOST = 3
"""Factor from a limit within which either answer is right."""
N_CLASSED, N_REPLACED = 64, 6
"""Prompts, and replaced pairs, for the class of a layer."""


@dataclass(frozen=True)
class Truth:
    """A learner that may be the truth, as a function of its scalars."""

    build: Callable[..., Learner]
    start: tuple[float, ...]
    factor: int | None = None
    """Place of the scalar that is a factor per pair, at most 1."""
    scaled: bool = False
    """True: a factor on the predictions near 1 is fitted too. False: the step is such a factor."""


def candidates(length: int | None) -> dict[str, Truth]:
    """The five learners by label; with a length, steps of descent are divided by it instead of the number of pairs."""
    step = partial(make.forgetting, length=length)
    return {
        "gradient_descent": Truth(lambda eta: step(eta, 1.0), (0.7,)),
        "forgetting_gd": Truth(step, (1.0, 0.95), 1),
        "online_gd": Truth(
            lambda eta, gate, c: make.online(lambda _, square: eta / (1 + c * square), gate=gate),
            (0.1, 0.98, 0.02),
            1,
            scaled=True,
        ),
        "ridge_like": Truth(lambda penalty: make.recursive(1.0, penalty), (0.5,), scaled=True),
        "recursive_least_squares": Truth(make.recursive, (0.95, 0.5), 0, scaled=True),
    }


def fitted(
    truth: Truth, prompts: Prompts, target: Tensor, factors: tuple[float, ...] = (1.0,)
) -> Learner:
    """The learner with the scalars of least squared error, times the best of some factors."""
    fits = [_fitted(truth, prompts, target / factor) for factor in factors]
    learners = [make.times(fit, factor) for fit, factor in zip(fits, factors, strict=True)]
    return min(learners, key=lambda each: float((each(prompts) - target).square().mean()))


def _fitted(truth: Truth, prompts: Prompts, target: Tensor) -> Learner:
    """The learner with the scalars of least squared error, from three starts.

    No scalar has a bound, at which the search would stay: a factor per pair is exp(-exp u), and the others are exp u.
    """

    def built(u: np.ndarray) -> Learner:
        values = np.exp(np.clip(u[: len(truth.start)], -30, 5))
        if truth.factor is not None:
            values[truth.factor] = np.exp(-values[truth.factor])
        learner = truth.build(*values)
        return make.times(learner, 1 + READ_OUT * np.tanh(u[-1])) if truth.scaled else learner

    def error(u: np.ndarray) -> float:
        return float((built(u)(prompts) - target).square().mean())

    options = {"xatol": 1e-4, "fatol": 1e-9, "maxiter": 600}
    found = []
    for forgetting in STARTS:
        start = np.log(truth.start)
        if truth.factor is not None:
            start[truth.factor] = np.log(forgetting)
        start = np.append(start, 0.0) if truth.scaled else start
        found.append(minimize(error, start, method="Nelder-Mead", options=options))
    return built(min(found, key=lambda each: each.fun).x)


def laws(task: TaskConfig) -> dict[str, TaskConfig]:
    """Laws of the prompts on which learners are scored."""
    return {
        "own": task,
        "drift": replace(task, drift=0.9 if task.drift == 1 else 1.0),
        "double": replace(task, context_length=2 * task.context_length),
    }


def explained(checkpoint: Checkpoint) -> dict[str, pd.DataFrame]:
    """Squared errors of the five fitted learners by prompt, relative to the mean squared prediction, for each law."""
    task = checkpoint.task
    divides = checkpoint.config.model.score == "linear/L"
    prompts = draw_prompts(task, N_FITTED, seed=FITTED, dtype=torch.float64)
    target = predicted(checkpoint, prompts)
    built = {
        label: fitted(truth, prompts, target, (1.0, task.drift))
        for label, truth in candidates(None if divides else task.context_length).items()
    }
    found = {}
    for name, law in laws(task).items():
        drawn = draw_prompts(law, N_SCORED, seed=SCORED, dtype=torch.float64)
        own = predicted(checkpoint, drawn)
        left = {
            label: (learner(drawn) - own).square().sum(1) / own.square().sum(1).mean()
            for label, learner in built.items()
        }
        found[name] = pd.DataFrame({label: each.numpy() for label, each in left.items()})
    return found


def predicted(checkpoint: Checkpoint, prompts: Prompts) -> Tensor:
    """Predictions of a layer in float64."""
    return checkpoint.predictor.predict(prompts.to(torch.float32)).double()


def is_right(label: str, left: Mapping[str, pd.DataFrame]) -> bool:
    """True if the label keeps the three rules of the first lines of this file."""
    if label not in left["own"]:
        return False
    mean = {name: each.mean() for name, each in left.items()}
    if 1 - mean["own"][label] < OWN or 1 - mean["drift"][label] < OTHER:
        return False
    if any(mean[law][label] - mean[law].min() > LEAD for law in ("own", "drift")):
        return False
    smaller = CONTAINS.get(label)
    if smaller is None:
        return True
    gains = [each[smaller] - each[label] for each in left.values()]
    return any(gain.mean() > ERRORS * gain.std() / len(gain) ** 0.5 for gain in gains)


def right_readings(checkpoint: Checkpoint) -> frozenset[str]:
    """Right classes of `response`, by finite differences of the predictions; several where a number is near to a limit."""
    prompts = draw_prompts(checkpoint.task, N_CLASSED, seed=SCORED, dtype=torch.float64)
    own = predicted(checkpoint, prompts)
    turned, doubled = (predicted(checkpoint, replace(prompts, y=c * prompts.y)) for c in (-1, 2))
    size = own.square().mean()
    even = ((own + turned) / 2).square().mean() / size
    part = max(float(even), float((doubled - 2 * own).square().mean() / (8 * size)))
    if part > EVEN + MARGIN:
        return frozenset({"no linear map"})
    linear = {"no linear map"} if part > EVEN - MARGIN else set()
    later, earlier, fall = effects(checkpoint, prompts)
    forgets = {
        each
        for each, bound in ((True, fall > FORGETS - MARGIN), (False, fall < FORGETS + MARGIN))
        if bound
    }
    classes = set()
    if max(later, earlier) < MOST * STILL:
        classes |= {
            "no interaction with forgetting" if each else "no interaction" for each in forgets
        }
    if later > STILL / MOST and earlier < MOST * ONLINE * later:
        classes |= {"online"}
    if later > STILL / MOST and earlier > ONLINE * later / MOST:
        classes |= {"recursive least squares" if each else "batch" for each in forgets}
    return frozenset(classes | linear)


def effects(checkpoint: Checkpoint, prompts: Prompts) -> tuple[float, float, float]:
    """Effect of later and of earlier pairs on the weight of a pair, L^2 E (change)^2 / (2 E weight^2) over pairs, and the fall
    of the mean weight per similarity from the newest pair to the oldest."""
    n = prompts.x.shape[1]
    weights = weights_of(checkpoint, prompts)
    similarity = (prompts.x @ prompts.x_query[..., None])[..., 0]
    by_place = (weights * similarity).mean(0) / similarity.square().mean(0)
    fall = 1 - float(by_place[0] / by_place[-1])
    later, earlier = [], []
    for place in np.linspace(0, n - 1, N_REPLACED).round().astype(int):
        x, y = prompts.x.clone(), prompts.y.clone()
        x[:, place], y[:, place] = x[:, place].roll(1, 0), y[:, place].roll(1, 0)
        change = (weights_of(checkpoint, replace(prompts, x=x, y=y)) - weights).square().mean(0)
        size = n**2 * change / (2 * weights.square().mean()) / n
        later.append(size[:place])
        earlier.append(size[place + 1 :])
    return float(torch.cat(later).mean()), float(torch.cat(earlier).mean()), fall


def weights_of(checkpoint: Checkpoint, prompts: Prompts) -> Tensor:
    """Derivative of the prediction with respect to each y, [batch, L], by central differences."""
    step = float(prompts.y.std()) / 10
    columns = []
    for place in range(prompts.x.shape[1]):
        moved = torch.zeros_like(prompts.y)
        moved[:, place] = step
        up, down = (
            predicted(checkpoint, replace(prompts, y=prompts.y + sign * moved)) for sign in (1, -1)
        )
        columns.append((up - down)[:, 0] / (2 * step))
    return torch.stack(columns, 1)


def says_scalars(checkpoint: Checkpoint) -> bool:
    """True for one head with constant gates, whose weights say the scalars."""
    model = checkpoint.config.model
    return model.n_heads == 1 and model.gates != "token" and model.score in LEARNER


def scalars_right(checkpoint: Checkpoint, label: str, scalars: Mapping[str, float]) -> bool | None:
    """True if the scalars of a label are those of the weights; None where the weights do not say them.

    Args:
        scalars: Values by name, without those whose error is infinite.
    """
    if not says_scalars(checkpoint) or LEARNER[checkpoint.config.model.score] != label:
        return None
    said = said_by_weights(checkpoint.weights)
    alpha = scalars.get("gate" if label == "online_gd" else "alpha", said["alpha"])
    second = "penalty" if label == "recursive_least_squares" else "eta"
    there = said[second] * (checkpoint.task.context_length if label == "forgetting_gd" else 1)
    off = abs(scalars.get(second, there) / there - 1)
    return bool(abs(alpha - said["alpha"]) <= ALPHA and off <= RELATIVE)


def row_of(name: str, checkpoint: Checkpoint) -> dict[str, object]:
    """Label, class and verdicts of one layer."""
    left = explained(checkpoint)
    found, seen = name_algorithm(checkpoint), response(checkpoint)
    label, own, drift = found.label, left["own"].mean(), left["drift"].mean()
    verdict = "undetermined"
    scalars = None
    if label not in NAMELESS:
        verdict = "right" if is_right(label, left) else "wrong"
        values = found.scalar_frame()
        values = values[np.isfinite(values["sem"])]
        scalars = scalars_right(
            checkpoint, label, dict(zip(values.scalar, values.value, strict=True))
        )
    loss = checkpoint.history.groupby("step").eval_loss.first().dropna()
    half = loss[loss.index >= checkpoint.config.train.steps // 2].iloc[0]
    classes = right_readings(checkpoint)
    read = reading.kind(seen)
    return {
        "layer": name,
        "family": name.rpartition("-")[0],
        "task": checkpoint.task.in_words.partition(";")[0],
        "drift": checkpoint.task.drift,
        "loss_half": half,
        "loss": loss.iloc[-1],
        **loss_over_bayes(checkpoint),
        "label": label,
        "verdict": verdict,
        "scalars_right": scalars,
        "gate": said_by_weights(checkpoint.weights)["alpha"] if says_scalars(checkpoint) else None,
        "best": own.idxmin(),
        "best_r2": 1 - own.min(),
        "r2": 1 - own.get(label, np.nan),
        "drift_r2": 1 - drift.get(label, np.nan),
        "reading": read,
        "right_readings": " or ".join(sorted(classes)),
        "reading_verdict": "right" if read in classes else "wrong",
        "reason": found.reason.partition("; next")[0],
    }


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER)
    parser.add_argument("--layers", type=Path, default=LAYERS)
    given = parsed(parser)
    file = given.out / FILE
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    known = {row["layer"] for row in rows}
    for name in configs(DRAW):
        if name not in known and (given.layers / name / "config.json").exists():
            rows.append(row_of(name, load(given.layers / name)))
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
