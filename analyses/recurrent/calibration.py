"""Error rates of the labels of learners along the pairs, on functions whose right label is known.

    python -m analyses.recurrent.calibration  (ten minutes on one core)

Members of each label, members with noise of weights, near misses, and plain learners whose pairs are a set, with random
scalars and tasks. The rules were settled before these functions were drawn. A member must get its label, and its scalars that
have a finite error to 0.1%; with noise of weights it may stay undetermined. Functions that analyses/results/recurrent/calibration_models.csv
already has are skipped. Writes calibration_{models,rates}.csv there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import process_time

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.lib.measured import RESULTS, parsed, parser_of
from analyses.recurrent import learners as make
from analyses.recurrent.learners import Learner
from mechinterp import CovarianceConfig, Prompts, TaskConfig, name_algorithm
from mechinterp.icl.predictors import kalman, nadaraya_watson, ridge, vanilla_gd

Random = np.random.Generator
FOLDER = RESULTS / "recurrent"
SEED = 74
"""First number of the seeds of all functions; 71 to 73 for the first three draws, whose results are
calibration_{first,second,third}_*.csv."""
PER_FAMILY = {"member": 4, "noisy": 2, "near miss": 2, "plain": 2}
"""Number of functions of each family, by kind."""
SCALARS = 1e-3
"""Largest error of a member's scalars, relative to 1 or to the scalar if it is larger."""
NAMELESS = ("undetermined", "unstructured")


@dataclass(frozen=True)
class Case:
    """A function with its right label."""

    learner: Learner
    task: TaskConfig
    truth: str = "none"
    scalars: tuple[float, ...] = ()


def drawn_task(random: Random) -> TaskConfig:
    """A task of random size, noise and drift."""
    task = TaskConfig(
        d_x=int(random.integers(3, 9)),
        context_length=int(random.integers(12, 41)),
        noise_var=float(10 ** random.uniform(-2, -0.3)),
    )
    if random.random() < 0.2:
        task = replace(task, covariance=CovarianceConfig("kms", rho=0.5))
    return replace(task, drift=float(random.uniform(0.9, 0.99))) if random.random() < 0.3 else task


def uniform(random: Random, low: float, high: float) -> float:
    return float(random.uniform(low, high))


def step_of(task: TaskConfig, alpha: float, random: Random) -> float:
    """Step of descent with forgetting that does its task."""
    n_effective = (1 - alpha**task.context_length) / (1 - alpha)
    return uniform(random, 0.7, 1.1) * task.context_length / (n_effective + task.d_x + 1)


def forgetting(random: Random) -> Case:
    task, alpha = drawn_task(random), uniform(random, 0.85, 0.98)
    eta = step_of(task, alpha, random)
    return Case(make.forgetting(eta, alpha), task, "forgetting_gd", (eta, alpha))


def lms(random: Random) -> Case:
    task = drawn_task(random)
    eta = uniform(random, 0.3, 0.9) / (task.d_x + 2)
    return Case(make.lms(eta), task, "online_gd", (eta, 1.0, 0.0))


def normed(random: Random) -> Case:
    task, eta, c = drawn_task(random), uniform(random, 0.3, 1.0), uniform(random, 0.5, 4)
    return Case(make.normed(eta, c), task, "online_gd", (eta / c, 1.0, 1 / c))


def gated(random: Random) -> Case:
    task, gate = drawn_task(random), uniform(random, 0.9, 0.995)
    eta = uniform(random, 0.3, 0.9) / (task.d_x + 2)
    return Case(make.gated(eta, gate), task, "online_gd", (eta, gate, 0.0))


def gated_normed(random: Random) -> Case:
    task, eta, c = drawn_task(random), uniform(random, 0.3, 1.0), uniform(random, 0.5, 4)
    gate = uniform(random, 0.9, 0.995)
    return Case(make.normed(eta, c, gate), task, "online_gd", (eta / c, gate, 1 / c))


def recursive(random: Random) -> Case:
    task, alpha = drawn_task(random), uniform(random, 0.85, 0.99)
    penalty = float(10 ** random.uniform(-1, 0.7))
    return Case(make.recursive(alpha, penalty), task, "recursive_least_squares", (alpha, penalty))


def textbook(random: Random) -> Case:
    task, alpha = drawn_task(random), uniform(random, 0.85, 0.99)
    penalty = float(10 ** random.uniform(-0.5, 1))
    scalars = (alpha, alpha**task.context_length * penalty)
    return Case(make.textbook(alpha, penalty), task, "recursive_least_squares", scalars)


def next_pair(member: Callable[[Random], Case]) -> Callable[[Random], Case]:
    """A member on a task that drifts, whose estimate is multiplied by rho."""

    def build(random: Random) -> Case:
        while (case := member(random)).task.drift == 1:
            pass
        return replace(case, learner=make.times(case.learner, case.task.drift))

    return build


def adaptive(random: Random, *, in_task: bool) -> Case:
    """Two noise levels; the prompts have both of them, or a level of their own."""
    task = replace(drawn_task(random), drift=1.0)
    low = float(10 ** random.uniform(-2.3, -1))
    high = low * float(10 ** random.uniform(1, 2))
    weight = uniform(random, 0.2, 0.8)
    levels = ((low, weight), (high, 1 - weight))
    task = replace(task, noise_var=levels) if in_task else task
    var = task.beta_variance
    scalars = (low / var, high / low, weight / (1 - weight), var)
    return Case(make.mixed(levels, var), task, "adaptive_ridge", scalars)


def noisy(member: Callable[[Random], Case]) -> Callable[[Random], Case]:
    """A member whose keys and queries are x times matrices with 1 to 3% noise."""

    def build(random: Random) -> Case:
        case = member(random)
        d_x = case.task.d_x
        size = uniform(random, 0.01, 0.03)
        matrices = [
            torch.from_numpy(np.eye(d_x) + size * random.normal(size=(d_x, d_x)) / d_x**0.5)
            for _ in range(2)
        ]

        def learner(prompts: Prompts) -> torch.Tensor:
            x, x_query = prompts.x.double() @ matrices[0], prompts.x_query.double() @ matrices[1]
            return case.learner(replace(prompts, x=x, x_query=x_query))

        return Case(learner, case.task, case.truth)

    return build


def near(build: Callable[[Random, TaskConfig], Learner]) -> Callable[[Random], Case]:
    """A learner without a label on a random task."""

    def case(random: Random) -> Case:
        task = drawn_task(random)
        return Case(build(random, task), task)

    return case


def rate(random: Random, task: TaskConfig) -> float:
    """Step of LMS that does its task."""
    return uniform(random, 0.3, 0.9) / (task.d_x + 2)


def another_factor(random: Random, task: TaskConfig) -> Learner:
    """A learner along the pairs whose predictions are multiplied by a number that is neither 1 nor rho."""
    gate = uniform(random, 0.9, 0.99)
    learner = make.gated(rate(random, task), gate)
    if random.random() < 0.5:
        learner = make.recursive(gate, uniform(random, 0.1, 2))
    factor = uniform(random, 0.6, 0.88) if random.random() < 0.7 else uniform(random, 1.1, 1.3)
    return make.times(learner, factor * task.drift)


def two_forgetting(random: Random, task: TaskConfig) -> Learner:
    slow, fast = uniform(random, 0.95, 0.99), uniform(random, 0.75, 0.88)
    parts = [make.forgetting(step_of(task, alpha, random), alpha) for alpha in (slow, fast)]
    return make.two_decays(*parts, uniform(random, 0.3, 0.7))


def two_recursive(random: Random, task: TaskConfig) -> Learner:
    slow, fast = uniform(random, 0.97, 0.99), uniform(random, 0.85, 0.92)
    parts = [make.recursive(alpha, uniform(random, 0.1, 2)) for alpha in (slow, fast)]
    return make.two_decays(*parts, uniform(random, 0.3, 0.7))


def three_levels(random: Random, task: TaskConfig) -> Learner:
    low = float(10 ** random.uniform(-2.3, -1.3))
    levels = tuple((low * factor, weight) for factor, weight in ((1, 0.3), (10, 0.4), (200, 0.3)))
    return make.mixed(levels, task.beta_variance)


NEAR = {
    "momentum": lambda r, t: make.momentum(rate(r, t) / 2, uniform(r, 0.2, 0.6)),
    "heavy ball": lambda r, t: make.heavy_ball(0.5, uniform(r, 0.2, 0.6), int(r.integers(2, 6))),
    "averaged lms": lambda r, t: make.averaged(rate(r, t) * 1.2),
    "falling steps": lambda r, t: make.falling(2 * rate(r, t), uniform(r, 0.2, 0.8)),
    "conjugate gradients": lambda r, t: make.conjugate_gradients(
        # Least squares are as many steps as coordinates.
        int(r.integers(2, min(4, t.d_x)))
    ),
    "window of ridge": lambda r, t: make.sliding(
        int(t.context_length * uniform(r, 0.6, 0.9)), uniform(r, 0.1, 2)
    ),
    "window of a step": lambda r, t: make.sliding_step(
        uniform(r, 0.6, 0.9), int(t.context_length * uniform(r, 0.6, 0.9))
    ),
    "two decays": two_forgetting,
    "two decays of rls": two_recursive,
    "gate of x": lambda r, t: make.gate_of_x(
        step_of(t, 0.93, r), uniform(r, 2, 4), uniform(r, 0.3, 1.5)
    ),
    "two chunks": lambda r, t: make.two_chunks(uniform(r, 0.4, 0.9)),
    "another factor": another_factor,
}


def three(random: Random) -> Case:
    """Three noise levels, on a task without drift: with it the responses are too far from every line for the lowest level."""
    task = replace(drawn_task(random), drift=1.0)
    return Case(three_levels(random, task), task)


def filtered(random: Random) -> Case:
    """The Kalman filter of its own task that drifts."""
    task = replace(drawn_task(random), drift=uniform(random, 0.9, 0.99))
    return Case(lambda prompts: kalman(prompts, task=task), task)


def plain_ridge(random: Random) -> Case:
    task, penalty = drawn_task(random), float(10 ** random.uniform(-1, 0.7))
    return Case(lambda prompts: ridge(prompts, penalty=penalty), task, "ridge_like", (penalty,))


def plain_step(random: Random) -> Case:
    task, eta = drawn_task(random), uniform(random, 0.6, 0.9)
    return Case(lambda prompts: vanilla_gd(prompts, eta=eta), task, "gradient_descent")


def smoother(random: Random) -> Case:
    task, omega = drawn_task(random), uniform(random, 0.3, 0.8)
    return Case(lambda prompts: nadaraya_watson(prompts, omega=omega, mu=2.0), task)


MEMBERS: dict[str, Callable[[Random], Case]] = {
    "descent with forgetting": forgetting,
    "lms": lms,
    "normed lms": normed,
    "gated delta rule": gated,
    "gated and normed": gated_normed,
    "recursive least squares": recursive,
    "recursion of textbooks": textbook,
    "gated delta rule, next pair": next_pair(gated),
    "recursive least squares, next pair": next_pair(recursive),
    "two levels, in the task": lambda random: adaptive(random, in_task=True),
    "two levels, other task": lambda random: adaptive(random, in_task=False),
}
NOISY = {
    f"{name}, noise of weights": noisy(MEMBERS[name])
    for name in (
        *("descent with forgetting", "lms", "gated delta rule"),
        *("recursive least squares", "two levels, in the task"),
    )
}
FAMILIES = {
    "member": MEMBERS,
    "noisy": NOISY,
    "near miss": {
        **{name: near(build) for name, build in NEAR.items()},
        "kalman": filtered,
        "three noise levels": three,
    },
    "plain": {"ridge": plain_ridge, "one step": plain_step, "kernel smoother": smoother},
}


def verdict(kind: str, case: Case, label: str, error: float) -> str:
    """right, wrong, missed (a member without its label) or undetermined."""
    if label in NAMELESS:
        must = kind == "member" or case.truth == "ridge_like"
        return "missed" if must else "undetermined"
    if label != case.truth:
        return "wrong"
    return "right" if not case.scalars or error <= SCALARS else "wrong scalars"


def row_of(kind: str, family: str, number: int) -> dict[str, object]:
    """Label and verdict of one function."""
    index = list(FAMILIES).index(kind), list(FAMILIES[kind]).index(family)
    case = FAMILIES[kind][family](np.random.default_rng([SEED, *index, number]))
    start = process_time()
    found = name_algorithm(case.learner, task=case.task)
    error = np.nan
    if found.label == case.truth and case.scalars:
        true = np.array(case.scalars)
        difference = np.abs(found.scalars(found.label) - true)
        measured = np.isfinite(found.measured.sems[found.label])
        error = float((difference / np.maximum(np.abs(true), 1))[measured].max())
    return {
        "kind": kind,
        "family": family,
        "number": number,
        "task": case.task.in_words.partition(";")[0],
        "truth": case.truth,
        "label": found.label,
        "verdict": verdict(kind, case, found.label, error),
        "scalar_error": error,
        "seconds": process_time() - start,
        "reason": found.reason.partition("; next")[0],
    }


def rates(models: pd.DataFrame) -> pd.DataFrame:
    """Counts by kind and by label, with exact 95% intervals of the wrong ones among the named."""
    groups = [(kind, models[models.kind == kind]) for kind in FAMILIES]
    named = models[~models.label.isin(NAMELESS)]
    groups += [*named.groupby("label"), ("all named", named)]
    rows = []
    for name, group in groups:
        of = group[~group.label.isin(NAMELESS)]
        wrong = int(of.verdict.str.startswith("wrong").sum())
        row = {"group": name, "functions": len(group), "named": len(of), "wrong": wrong}
        row["missed"] = int((group.verdict == "missed").sum())
        if len(of):
            interval = binomtest(wrong, len(of)).proportion_ci(method="exact")
            row |= {"low": interval.low, "high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    given = parsed(parser_of(__doc__, out=FOLDER))
    file = given.out / "calibration_models.csv"
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    known = {(row["kind"], row["family"], row["number"]) for row in rows}
    for number in range(max(PER_FAMILY.values())):
        for kind, families in FAMILIES.items():
            for family in families if number < PER_FAMILY[kind] else ():
                if (kind, family, number) in known:
                    continue
                rows.append(row_of(kind, family, number))
                pd.DataFrame(rows).to_csv(file, index=False, float_format="%.6g")
    rates(pd.DataFrame(rows)).to_csv(given.out / "calibration_rates.csv", index=False)


if __name__ == "__main__":
    main()
