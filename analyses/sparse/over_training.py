"""Heads at work in each layer, and the risk over ridge's, at every kept step of a run.

As C10 has it: median rises of the excess risk when a head is masked, exp of the entropy of their
shares, with errors over prompts drawn again. The run may be finished, a folder, or still in
training, the file of its state. Run: python -m analyses.sparse.over_training RUN (a minute per two
kept steps; --quick fewer prompts). Not among those of `make analyses`.
"""

from pathlib import Path

import pandas as pd
import torch

from analyses.lib import Measured
from analyses.lib.measured import parsed, parser_of, write
from analyses.sparse import questions as ask
from analyses.sparse.heads import drawn, effective, rises_of
from analyses.sparse.setting import best_ridge, ratio, told, unseen
from mechinterp import ICLTransformer, figures, load
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import DeepRun

Row = dict[str, object]


def kept(run: Path) -> tuple[str, dict[int, Weights], object]:
    """A run's name, its weights by step, and its task."""
    if run.is_dir():
        one = load(run)
        return one.name, one.snapshots | {one.step: one.weights}, one.task
    ((name, model),) = DeepRun.restore(run).results().items()
    return name, model.snapshots | {model.step: model.weights}, model.config.task


def rows(run: Path, n_prompts: int) -> pd.DataFrame:
    name, weights, task = kept(run)
    prompts = unseen(task, n_prompts)
    ridge, table = best_ridge(prompts.to(torch.float64)), []
    for step, one in sorted(weights.items()):
        model = ICLTransformer.from_weights(one, task=task)
        row: Row = {"model": name, "step": step, "prompts": n_prompts}
        row |= told("to_ridge", ratio(ask.risks(model, prompts), ridge))
        rises = rises_of(model, prompts, (one.n_layers, one.n_heads))
        pairs = zip(effective(rises), drawn(rises).std(axis=0, ddof=1), strict=True)
        for layer, pair in enumerate(pairs, 1):
            row |= told(f"n_eff_{layer}_median", pair)
        table.append(row)
        print(*row.values(), flush=True)
    return pd.DataFrame(table)


def main() -> None:
    parser = parser_of(__doc__, quick="fewer prompts")
    parser.add_argument("run", type=Path, help="a checkpoint's folder, or training-*.safetensors")
    given = parsed(parser)
    table = rows(given.run, 256 if given.quick else 1024)
    names = {c: f"layer {c.split('_')[2]}" for c in table if c.endswith("_median")}
    pairs = {n: (table[c].to_numpy(), table[f"{c}_sem"].to_numpy()) for c, n in names.items()}
    axes = {"x_title": "step", "y_title": "heads at work"}
    drawing = figures.lines(table.step.to_numpy(), pairs, title="Heads at work, by layer", **axes)
    write(Measured(table, {"heads": drawing}), "sparse_over_training", given.out)


if __name__ == "__main__":
    main()
