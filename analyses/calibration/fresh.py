"""Fresh calibration of the labels of one layer: other sizes, two responses, wide covariances, mixtures, and models
trained by plain PyTorch.

    python -m analyses.calibration.fresh           (some minutes on one core); writes calibration_fresh_*.csv
    python -m analyses.calibration.fresh --second  (built models alone); writes calibration_second_*.csv

The first set was drawn once, after the rules on descent and on steps that are too long, and its labels were looked at
once. Since more than 2% of its names were wrong, the rule on weights of coordinates was mended and the second set drawn.
Built models have noise on their circuits, relative to the norm of each. Near misses have no pattern. The truth of a
trained model comes from its predictions, by the fits below, which share no code with the classifier: a learner is
the truth if it explains R² 0.98 on prompts that nothing was fitted to, and a step must descend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest
from torch import Tensor

from analyses.calibration.errors import labelled
from analyses.calibration.models import NONE, Case, disturbed
from analyses.calibration.plain_training import SETTINGS, TRAINED, Setting, drawn
from analyses.lib.measured import parsed, parser_of, provenance
from analyses.lib.records import save
from mechinterp import TaskConfig, sample_prompts
from mechinterp.config import CovarianceConfig
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.models.constructions.one_layer import diagonal_heads, from_circuits
from mechinterp.models.heads import head_outputs
from mechinterp.models.weights import Weights

SEED, SECOND = 20_261_129, 20_261_130
SIZES = ((2, 5), (3, 30), (4, 16), (8, 64), (12, 50), (24, 100))
TWO_SIZES = ((3, 24), (8, 60))
NOISE = (0.0, 0.1, 0.4)
PER_CELL = 3
CLOSE = 0.98
"""Smallest R² of the learner that is the truth of a trained model."""
ALIKE = 0.9
"""Smallest cosine of a step's matrix with a multiple of the identity, or with a diagonal, that may be called so."""

Random = np.random.Generator
Mixture = Callable[[TaskConfig, Random], Weights]


def tasks(d_x: int, length: int) -> tuple[TaskConfig, TaskConfig]:
    """Task with the identity as its covariance, and one with variances from 1 to 10."""
    values = np.geomspace(1, 10, d_x)
    spread = CovarianceConfig(
        kind="eigenvalues", eigenvalues=tuple((values / values.mean()).tolist())
    )
    own = TaskConfig(d_x=d_x, context_length=length, covariance=CovarianceConfig())
    return own, replace(own, covariance=spread)


def with_blocks(blocks: Tensor, mu: list[float], **law: object) -> Weights:
    """Heads of one response with these QK x blocks."""
    d_x = blocks.shape[-1]
    OV = torch.nn.functional.pad(torch.tensor(mu, dtype=torch.float64)[:, None], (d_x, 0))
    return from_circuits(torch.nn.functional.pad(blocks, (0, 1, 0, 1)), OV[:, :, None], **law)


def pair(matrix: np.ndarray, task: TaskConfig, random: Random) -> Weights:
    """Two opposite softmax heads whose step is 0.5 to 0.9 times the matrix; the scores stay small."""
    Sigma = covariance_matrix(task.covariance, task.d_x)
    # Scores x_l^T M x have the variance tr(M Sigma M^T Sigma).
    size = np.trace(matrix @ Sigma @ matrix.T @ Sigma) ** 0.5
    omega = random.uniform(0.1, 0.3) / size
    mu = random.uniform(0.5, 0.9) / (2 * omega)
    block = torch.from_numpy(omega * matrix)
    return with_blocks(torch.stack([block, -block]), [mu, -mu])


def best_step(task: TaskConfig) -> np.ndarray:
    Sigma = covariance_matrix(task.covariance, task.d_x)
    added = (np.trace(Sigma) + task.d_x * task.noise_var) / task.context_length
    return np.linalg.inv(Sigma + added * np.eye(task.d_x))


def kernel(task: TaskConfig, random: Random) -> Weights:
    sign = random.choice([-1.0, 1.0])
    omega = sign * random.uniform(0.4, 1.0) / task.d_x**0.5
    return diagonal_heads([omega], [sign * random.uniform(0.8, 1.5)], d_x=task.d_x)


def linear(task: TaskConfig, random: Random) -> Weights:
    noise = random.normal(size=(task.d_x, task.d_x)) / task.d_x**0.5
    step = best_step(task) @ (np.eye(task.d_x) + 0.2 * noise)
    return with_blocks(
        torch.from_numpy(step)[None], [0.9], score="linear", score_slope=1 / task.context_length
    )


def ascending(kind: str, task: TaskConfig, random: Random) -> np.ndarray:
    """A matrix that does not descend in every direction."""
    d_x = task.d_x
    rotation, _ = np.linalg.qr(random.normal(size=(d_x, d_x)))
    if kind == "shift":
        return np.roll(np.eye(d_x), 1, axis=0)
    if kind == "free":
        M = random.normal(size=(d_x, d_x))
        return M - np.trace(M) / d_x * np.eye(d_x)
    if kind == "turned":
        # Two coordinates are turned by 100 to 180 degrees.
        angle, turned = random.uniform(1.75, np.pi), np.eye(d_x)
        turned[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        return turned
    part = max(1, round(0.4 * d_x))
    values = random.uniform(0.8, 1.2, d_x)
    values[:part] = 0 if kind == "half" else -random.uniform(0.2, 0.6, part)
    return (rotation * values) @ rotation.T


def mixture(task: TaskConfig, random: Random) -> Weights:
    """A debiased pair and a kernel head that adds as much."""
    own, other = pair(np.eye(task.d_x), task, random), kernel(task, random)
    QK = torch.cat([own.QK, other.QK])
    return from_circuits(QK, torch.cat([own.OV / 2, other.OV / 2]))


def even_mixture(task: TaskConfig, random: Random) -> Weights:
    """A debiased pair and a kernel head whose output has the same variance; those of the first set added little."""
    own, other = pair(np.eye(task.d_x), task, random), kernel(task, random)
    prompts = sample_prompts(task, 512, seed=1).to(torch.float64)
    sizes = [head_outputs(each, prompts).sum(1).std() for each in (own, other)]
    QK = torch.cat([own.QK, other.QK])
    return from_circuits(QK, torch.cat([own.OV / 2, other.OV * sizes[0] / sizes[1] / 2]))


def two_matrices(task: TaskConfig, random: Random) -> Weights:
    """Heads of both signs with different matrices."""
    first, second = (
        np.diag(random.uniform(0.1, 2.0, task.d_x)) + 0.4 * random.normal(size=(task.d_x,) * 2)
        for _ in range(2)
    )
    blocks = torch.from_numpy(np.stack([first, -second])) * 0.1 / task.d_x**0.5
    return with_blocks(blocks, [3.0, -3.0])


def one_response(random: Random, mixed: Mixture = mixture) -> Iterator[Case]:
    for d_x, length in SIZES:
        for wide, task in enumerate(tasks(d_x, length)):
            truths = {"linear_gd": linear, "preconditioned_gd": None}
            truths |= {} if wide else {"kernel_regression": kernel, "debiased_gd": None}
            for truth, build in truths.items():
                if truth == "preconditioned_gd" and not wide:
                    continue
                for size in NOISE:
                    for _ in range(PER_CELL):
                        if build is None:
                            matrix = best_step(task) if wide else np.eye(d_x)
                            weights = pair(matrix, task, random)
                        else:
                            weights = build(task, random)
                        demand = "must" if size <= 0.1 else "may"
                        weights = disturbed(weights, size, random)
                        yield Case("built + noise", truth, weights, task, size, demand)
            for kind in ("shift", "free", "turned", "half", "up"):
                for size in (0.0, 0.1):
                    for _ in range(PER_CELL):
                        weights = pair(ascending(kind, task, random), task, random)
                        weights = disturbed(weights, size, random)
                        yield Case("common matrix, no descent", NONE, weights, task, size, "none")
            for build in (mixed, two_matrices):
                for _ in range(PER_CELL):
                    yield Case("mixtures", NONE, build(task, random), task, 0.0, "none")


def two_responses(random: Random) -> Iterator[Case]:
    for d_x, length in TWO_SIZES:
        task = TaskConfig(d_x=d_x, d_y=2, context_length=length, covariance=CovarianceConfig())
        for _ in range(2 * PER_CELL):
            for size in NOISE:
                demand = "must" if size <= 0.1 else "may"
                gamma = random.uniform(0.1, 0.3) / d_x**0.5
                even, rows = np.full(d_x, gamma), gamma * random.uniform(0.7, 1.3, d_x)
                rows[0], rows[-1] = 0.7 * gamma, 1.3 * gamma
                mu = random.uniform(0.5, 0.9) / (2 * gamma)
                for truth, row in (("debiased_gd", even), ("weighted_preconditioned_gd", rows)):
                    omega, reads = [row.tolist(), (-row).tolist()], [[mu, mu], [-mu, -mu]]
                    weights = diagonal_heads(omega, reads, d_x=d_x, d_y=2)
                    weights = disturbed(weights, size, random)
                    yield Case("built + noise", truth, weights, task, size, demand)
                other = gamma * random.uniform(1.2, 1.6)
                omega = [[s * o] * d_x for o in (gamma, other) for s in (1, -1)]
                reads = [[mu, 0], [-mu, 0], [0, mu], [0, -mu]]
                weights = disturbed(diagonal_heads(omega, reads, d_x=d_x, d_y=2), size, random)
                yield Case("built + noise", "task_heads", weights, task, size, demand)
            up = rows.copy()
            up[: max(1, d_x // 3)] *= -random.uniform(0.08, 0.24)
            omega, reads = [up.tolist(), (-up).tolist()], [[mu, mu], [-mu, -mu]]
            weights = diagonal_heads(omega, reads, d_x=d_x, d_y=2)
            yield Case("two responses, no descent", NONE, weights, task, 0.0, "none")


def task_of(setting: Setting) -> TaskConfig:
    """The law of a training, as a task of the package."""
    covariance = CovarianceConfig()
    if setting.spread > 1:
        values = tuple(setting.variances.tolist())
        covariance = CovarianceConfig(kind="eigenvalues", eigenvalues=values)
    return TaskConfig(
        d_x=setting.d_x,
        d_y=setting.d_y,
        context_length=setting.length,
        noise_var=setting.noise,
        beta_var=1 / int(setting.mask.sum(0)[0]),
        covariance=covariance,
        supports=setting.supports or None,
    )


def explained(features: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """R² of a linear fit on the half of the prompts that it was not fitted to, and the coefficients."""
    half = len(target) // 2
    found = torch.linalg.lstsq(features[:half], target[:half], driver="gelsd").solution
    rest = target[half:] - features[half:] @ found
    return float(1 - rest.square().sum() / target[half:].square().sum()), found


def truths(setting: Setting, QK: Tensor, OV: Tensor) -> tuple[str, ...]:
    """Names that the predictions of a trained model allow; none if no learner explains them, or if the step ascends."""
    d_x, linear_scores = setting.d_x, setting.score == "linear"
    tokens, _ = drawn(setting, 4096, torch.Generator().manual_seed(SEED))
    tokens = tokens.double()
    pairs, query = tokens[:, :-1], tokens[:, -1]

    def predicted(QK: Tensor, OV: Tensor) -> Tensor:
        scores = torch.einsum("bi,hij,blj->bhl", query, QK, pairs)
        pattern = scores / setting.length if linear_scores else scores.softmax(2)
        return torch.einsum("bhl,bli,hin->bhn", pattern, pairs, OV)

    heads = predicted(QK, OV)
    target = heads.sum(1)
    x, y = pairs.split([d_x, setting.d_y], 2)
    x = x if linear_scores else x - x.mean(1, keepdim=True)
    b = torch.einsum("bli,bln->bin", x, y) / setting.length
    r2, steps = [], []
    for n in range(setting.d_y):
        features = torch.einsum("bi,bj->bij", query[:, :d_x], b[..., n]).flatten(1)
        own, found = explained(features, target[:, n : n + 1])
        r2.append(own)
        steps.append(found.reshape(d_x, d_x))
    only_x, only_y = QK.clone(), OV.clone()
    only_x[:, d_x:], only_x[:, :, d_x:], only_y[:, :d_x] = 0, 0, 0
    kept = predicted(only_x, only_y).sum(1)
    averages = float(1 - (target - kept).square().sum() / target.square().sum())
    active = heads.square().mean((0, 2)).sqrt()
    active = active > 0.01 * active.sum()
    mu = OV[active, d_x:].diagonal(dim1=1, dim2=2).mean(1)
    if not linear_scores and averages >= CLOSE and (mu > 0).all() | (mu < 0).all():
        return ("kernel_regression",)
    if min(r2) < CLOSE:
        return ()
    root = setting.variances.sqrt()
    names = {"linear_gd"} if linear_scores else set()
    for n, step in enumerate(steps):
        live = setting.mask[:, n] > 0
        whitened = (root[:, None] * step * root)[live][:, live]
        values = torch.linalg.eigvalsh((whitened + whitened.T) / 2)
        if values[0] < (-0.05 if linear_scores or setting.d_y > 1 else 0.05) * values.abs().max():
            return ()
    if linear_scores:
        return tuple(names)
    if setting.d_y > 1:
        diagonal = min(float(s.diagonal().norm() / s.norm()) for s in steps)
        served = "task_heads", "superposition", "weighted_preconditioned_gd", "debiased_gd"
        return served if diagonal >= ALIKE else ()
    (step,) = steps
    even = float(step.trace() / d_x**0.5 / step.norm())
    return ("debiased_gd", "preconditioned_gd") if even >= ALIKE else ("preconditioned_gd",)


def trained() -> Iterator[Case]:
    """Models of plain_training.py; several names that are right are joined by "|"."""
    tensors = load_file(TRAINED)
    for setting in SETTINGS:
        if f"{setting.name}/QK" not in tensors:
            continue
        law = {"score": setting.score} | (
            {"score_slope": 1 / setting.length} if setting.score == "linear" else {}
        )
        for QK, OV in zip(
            *(tensors[f"{setting.name}/{name}"].double() for name in ("QK", "OV")), strict=True
        ):
            names = truths(setting, QK, OV)
            truth, demand = ("|".join(names), "may") if names else (NONE, "none")
            source = f"trained, {setting.score}"
            weights = from_circuits(QK, OV, **law)
            yield Case(source, truth, weights, task_of(setting), float("nan"), demand)


def models(*, second: bool = False) -> list[Case]:
    """Models of the first set, or of the second, which has no trained ones."""
    random = np.random.default_rng(SECOND if second else SEED)
    if second:
        return [*one_response(random, even_mixture), *two_responses(random)]
    return [*one_response(random), *two_responses(random), *trained()]


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Verdicts by source, all models last, with Clopper and Pearson's interval of the wrong among the named."""
    by_us = frame[frame.source.str.startswith("trained")]
    groups = [*frame.groupby("source"), *([("trained", by_us)] if len(by_us) else [])]
    rows = []
    for source, group in [*groups, ("all", frame)]:
        count = group.verdict.value_counts()
        row: dict[str, object] = {"source": source, "models": len(group)}
        row |= {
            name: int(count.get(name, 0)) for name in ("right", "undetermined", "missed", "wrong")
        }
        named = int(row["right"]) + int(row["wrong"])
        if named:
            interval = binomtest(int(row["wrong"]), named).proportion_ci(method="exact")
            row |= {"named": named, "low": interval.low, "high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def errors_table(results: Path, name: str = "fresh") -> str:
    """Table of error rates on the pages, of the first set or of the "second"."""
    table = pd.read_csv(results / f"calibration_{name}_errors.csv")
    lines = ["| source | models | named | wrong | 95% interval | missed | not named |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in table.itertuples():
        named = row.right + row.wrong
        interval = f"{row.low:.1%} to {row.high:.1%}" if named else ""
        lines.append(
            f"| {row.source} | {row.models} | {named} | {row.wrong} | {interval} | {row.missed} | {row.undetermined} |"
        )
    return "\n".join(lines)


def second_table(results: Path) -> str:
    """Table of the second set."""
    return errors_table(results, "second")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--second", action="store_true", help="the second set")
    arguments = parsed(parser)
    torch.set_num_threads(1)
    frame = labelled(models(second=arguments.second))
    which = "second" if arguments.second else "fresh"
    for name, table in (("models", frame), ("errors", errors(frame))):
        file = arguments.out / f"calibration_{which}_{name}.csv"
        table.to_csv(file, index=False, float_format="%.6g")
    save(arguments.out, "calibration_fresh", [], provenance(errors(frame), [], None))
    print(errors(frame).to_string())
    print(frame[frame.verdict.isin(["wrong", "missed"])].to_string())


if __name__ == "__main__":
    main()
