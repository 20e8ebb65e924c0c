"""Error rate of the readings of `response`, on learners whose class is known.

    python -m analyses.response.calibration  (200 functions and 88 trained models; an hour on one core)

Functions are those of families.py, ten seeds each. 48 models of one layer are trained by plain PyTorch
(analyses/calibration/plain_training.py) and 12 of two and three layers by the package; a second set has 16 GPT-2s and 12 models of a pool of
tasks (transformers.py). The right reading of a trained model comes from its predictions, by least squares, without the
response. Each set was drawn after the rules of reading.py were settled, and looked at once. In the second set one reading
of a model of a pool was called wrong by a fit that left more with a column than without; the readings stayed as they are,
that fit was mended, and the third set of such models was drawn. Models that the file already has are skipped. Writes
analyses/results/response/response_calibration.csv.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from zlib import crc32

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest
from torch import Tensor

from analyses.algorithms.trained import config_of
from analyses.calibration import plain_training
from analyses.calibration.plain_training import Setting
from analyses.lib.measured import RESULTS
from analyses.response import transformers
from analyses.response.families import BATCH, FAMILIES, KERNEL, NOT_LINEAR, STILL, Learner
from mechinterp import response, sample_prompts
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts

FILE = "response/response_calibration.csv"
FIRST = 100
"""First seed of the first set."""
SEEDS = 10
"""Functions of each family in a set."""
SETTINGS = (
    Setting("softmax", 3, 18, 1),
    Setting("softmax", 4, 32, 1, noise=0.3),
    Setting("softmax", 3, 24, 2),
    Setting("softmax", 5, 25, 2, noise=0.3),
    Setting("softmax", 6, 36, 3),
    Setting("softmax", 4, 16, 4),
    Setting("linear", 3, 15, 1),
    Setting("linear", 5, 30, 2, noise=0.3),
)
DEEP = tuple((score, n) for score in ("linear/L", "softmax") for n in (2, 3))
DEEP_SEEDS = 3
MARGIN = 0.01
"""Distance from a limit of the reading below which both readings are right."""
NO_FILTER, NOT_LINEAR_FROM = 0.05, 0.15
"""Limits of docs/response.md."""
N_CHECKED = 8192
STEPS = 7
"""Number of powers of S, up to six steps of descent, whose terms a filter is fitted with."""


def right_of(learner: Learner, task: TaskConfig, n_layers: int) -> frozenset[str]:
    """Right readings of a trained model without positions, whose pairs are therefore a set."""
    prompts = sample_prompts(task, N_CHECKED, seed=1).to(torch.float64)
    with torch.no_grad():
        f = learner(prompts)[:, 0].double()
        flipped = Prompts(**vars(prompts) | {"y": -prompts.y})
        even = float((f + learner(flipped)[:, 0].double()).square().mean() / 4 / f.square().mean())
    left = transformers.left(f, transformers.powers(prompts, STEPS, normed=False))
    right = set()
    if even > NOT_LINEAR_FROM - MARGIN:
        right.add(NOT_LINEAR)
    if even < NOT_LINEAR_FROM + MARGIN:
        if left > NO_FILTER - MARGIN:
            right.add(KERNEL if n_layers == 1 else BATCH)
        if left < NO_FILTER + MARGIN:
            right |= {BATCH, STILL} if n_layers == 1 else {BATCH}
    return frozenset(right)


def one_layer(known: set[tuple[str, int]]) -> Iterator[tuple[str, int, Learner, TaskConfig, int]]:
    """Models trained by plain PyTorch, six of a setting at once; settings whose models are known are left out."""
    for number, setting in enumerate(SETTINGS):
        name = f"trained {setting.name}"
        if all((name, replica) in known for replica in range(plain_training.REPLICAS)):
            continue
        task = TaskConfig(d_x=setting.d_x, context_length=setting.length, noise_var=setting.noise)
        weights, _ = plain_training.trained(setting, seed=1000 * FIRST + number)
        for replica in range(plain_training.REPLICAS):
            own = {name: w[replica : replica + 1].double() for name, w in weights.items()}

            def learner(
                prompts: Prompts, setting: Setting = setting, own: dict[str, Tensor] = own
            ) -> Tensor:
                given = {name: w.to(prompts.y) for name, w in own.items()}
                return plain_training.predictions(setting, given, prompts.tokens)[0]

            yield name, replica, learner, task, 1


def deep(known: set[tuple[str, int]]) -> Iterator[tuple[str, int, Learner, TaskConfig, int]]:
    """Models of two and three layers trained by the package; known ones are left out."""
    for (score, n_layers), seed in product(DEEP, range(FIRST, FIRST + DEEP_SEEDS)):
        name, config = f"trained {score}, {n_layers} layers", config_of(score, n_layers, seed)
        if (name, seed) not in known:
            yield name, seed, transformers.trained(config), config.task, n_layers


def row_of(
    name: str, seed: int, learner: Learner, task: TaskConfig, right: frozenset[str]
) -> dict[str, object]:
    try:
        found = response(learner, task=task, seed=seed)
    except ValueError as error:
        return {
            "family": name,
            "seed": seed,
            "right": " or ".join(sorted(right)),
            "reading": f"refused: {error}",
        }
    return {
        "family": name,
        "seed": seed,
        "right": " or ".join(sorted(right)),
        "reading": found.reading,
        "verdict": "right" if found.reading in right else "wrong",
        "left": found.left.set_index("columns").left["filter"],
    }


Drawing = tuple[str, str, int, Learner, TaskConfig, frozenset[str]]


def first_set(known: set[tuple[str, int]]) -> Iterator[Drawing]:
    """Functions, and trained models without positions: kind, name, seed, learner, task, right readings."""
    for seed in range(FIRST, FIRST + SEEDS):
        for name, build in FAMILIES.items():
            drawn = build(np.random.default_rng([crc32(name.encode()), seed]))
            yield "functions", name, seed, drawn.learner, drawn.task, drawn.right
    for name, seed, learner, task, n_layers in chain(one_layer(known), deep(known)):
        yield "trained models", name, seed, learner, task, right_of(learner, task, n_layers)


def transformers_and_pools(
    known: set[tuple[str, int]], *, seeds: range, third: bool
) -> Iterator[Drawing]:
    """GPT-2s and models that were trained on a pool of tasks; in the third set those of a pool alone."""
    for name, seed, config in transformers.configs(seeds, pools_alone=third):
        if (name, seed) not in known:
            learner, task = transformers.trained(config), config.task
            right = transformers.right_of(learner, task, config.model.n_layers, bounded=third)
            kind = "models of a pool" if task.n_tasks else "GPT-2s"
            yield kind, name, seed, learner, task, right


SETS = {
    "first": first_set,
    "second": partial(transformers_and_pools, seeds=range(200, 202), third=False),
    "third": partial(transformers_and_pools, seeds=range(300, 303), third=True),
}
"""Each set is drawn once."""


def calibration_table(results: Path) -> str:
    """Table of docs/response.md."""
    rows = pd.read_csv(results / FILE)
    lines = [
        "| set | learners | read | refused | wrong | 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for (name, kind), each in rows.groupby(["set", "kind"], sort=False):
        read = each[each.verdict.notna()]
        wrong = int((read.verdict == "wrong").sum())
        interval = binomtest(wrong, len(read)).proportion_ci(method="exact")
        lines.append(
            f"| {name} | {len(each)} {kind} | {len(read)} | {len(each) - len(read)} | {wrong} "
            f"| {interval.low:.1%} to {interval.high:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    file = RESULTS / FILE
    file.parent.mkdir(exist_ok=True)
    columns = ["set", "kind", "family", "seed", "right", "reading", "verdict", "left"]
    if not file.exists():
        pd.DataFrame(columns=columns).to_csv(file, index=False)
    for name, drawn in SETS.items():
        rows = pd.read_csv(file).query("set == @name")
        known = set(rows[["family", "seed"]].itertuples(index=False, name=None))
        for kind, family, seed, learner, task, right in drawn(known):
            if (family, seed) in known:
                continue
            row = {"set": name, "kind": kind, **row_of(family, seed, learner, task, right)}
            frame = pd.DataFrame([row]).reindex(columns=columns)
            frame.to_csv(file, mode="a", header=False, index=False, float_format="%.6g")
            print(*row.values(), sep=" | ", flush=True)
    print(calibration_table(RESULTS))


if __name__ == "__main__":
    main()
