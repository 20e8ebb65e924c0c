"""Masking of heads and MLPs: what it costs, one row per contrast."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from mechinterp.analysis.ablation import contrasts
from mechinterp.analysis.ablation.ablation import Ablation
from mechinterp.analysis.ablation.contrasts import MOST_SUBSET_HEADS, Mask, Rows, steps
from mechinterp.analysis.ablation.kinds import QUESTIONS
from mechinterp.analysis.ablation.measured import (
    EXCESS,
    Estimates,
    Measure,
    Metric,
    estimated,
    measure_of,
    values_under,
)
from mechinterp.analysis.stats import halves
from mechinterp.config import TaskLike
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import METHODS, Head, require_method
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

AT_POSITIONS = 256
"""Default number of prompts with positions; every head and position needs a run on them."""
MOST_SWITCHES = 8
"""Largest number of heads with switches on the page."""
SHOWN = 5
"""Number of prompts of the switches."""
ROWS_OF = {
    "heads": contrasts.heads_alone,
    "blocks": contrasts.blocks,
    "pairs": contrasts.pairs,
    "layers": contrasts.layers,
    "mlps": contrasts.mlps,
    "subsets": contrasts.subsets,
    "shapley": contrasts.shapley,
}
"""Rows that follow from the model alone."""


def ablate(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    what: str | None = None,
    method: str | None = None,
    metric: Metric | str | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Ablation:
    """Cost of masking heads or MLPs: heads alone, pairs, layers, subsets, Shapley values, a greedy order, positions.

    Excess risk is the mean of (ŷ − x·β)² on the same prompts for every mask; ± is one standard error, paired over
    prompts. Nothing is retrained. Importance is a head's share of its layer's rises, negative ones counted as 0; the
    effective number of heads is exp of its entropy. A Shapley value is what a head takes off the metric, mean over all
    orders of adding heads.

    Args:
        prompts: None draws `n_prompts` of the model's own task with `seed`.
        task: Law of the prompts; None: the model's own.
        what: None: each head alone by every method, then the layers of a model of several, or subsets and Shapley values
            of one layer of at most 12 heads. Or "heads", each alone; "blocks", a head in all runs of its block; "pairs",
            every two heads, with their interaction; "layers", all heads of each; "mlps", that of each layer; "subsets"
            and "shapley", for at most 12 heads; "positions", each head at one position at a time; "greedy", one head
            after another, next the one whose masking leaves the smallest metric (chosen on half of the prompts,
            measured on the other half).
        method: "zero" sets a head's z to 0, "mean" to its mean over prompts at that position, "resample" to that of
            another prompt (prompts swap in pairs, an odd last one is left out). None: "zero"; all three for heads alone.
        metric: Function from predictions [batch, d_y] and prompts to one number per prompt; "ridge" or "dmmse", the
            squared distance to this predictor, y²; None: the squared error against the target without noise.
        n_prompts: None means 4096, or 512 for models with norms or MLPs, more for a wide stream; 256 with positions.
    Raises:
        ValueError: If an option is unknown, there are too few prompts (two, four to resample, eight for greedy), the
            metric does not give one finite number per prompt, an MLP or its hook is missing, or there are too many heads.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time; importance within a layer, its
        estimate and the interaction are choices made here; the greedy order is backward elimination.
    See also:
        `prune`, `classify`, `attribute_edges`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("softmax-h2-s0")
        >>> ablate(checkpoint, n_prompts=64).rise.shape  # method, layer, head
        (3, 1, 2)
        >>> ablate(checkpoint, what="pairs", method="mean", n_prompts=64).to_frame()[["head", "other"]].values.tolist()
        [['L0H0', 'L0H1']]
    """
    if what is not None and what not in QUESTIONS:
        raise ValueError(f"what must be one of {', '.join(QUESTIONS)} or None, got {what!r}.")
    number = AT_POSITIONS if what == "positions" and n_prompts is None else n_prompts
    drawn: dict = {"task": task, "n_prompts": number, "seed": seed}
    fitted = 1 if what == "greedy" else 0
    given, law = prompts_and_law(source, prompts, analysis="ablate", fitted=fitted, **drawn)
    predictor, measure = predictor_of(source), measure_of(metric, law)
    if method is not None:
        require_method(method, given[:2])
    if what is None:
        return _overview(predictor, given, METHODS if method is None else (method,), measure)
    return _one_kind(predictor, given, what, (method or "zero",), measure)


def _overview(
    predictor: Predictor, prompts: Prompts, methods: Sequence[str], measure: Measure
) -> Ablation:
    """Heads by every method; layers of several, subsets of one."""
    few = predictor.is_one_attention and predictor.n_heads <= MOST_SUBSET_HEADS
    kinds = ("subsets", "shapley") if few else ("layers",) if predictor.n_layers > 1 else ()
    others = {kind: _one_kind(predictor, prompts, kind, methods[:1], measure) for kind in kinds}
    outputs = {}
    if few and predictor.n_heads <= MOST_SWITCHES:
        outputs = _outputs(predictor, prompts[:SHOWN])
    return _one_kind(predictor, prompts, "heads", methods, measure, others=others, outputs=outputs)


def _one_kind(
    predictor: Predictor,
    prompts: Prompts,
    what: str,
    methods: Sequence[str],
    measure: Measure,
    **further: Any,
) -> Ablation:
    """One kind of rows under each method."""
    parts = [_estimated(predictor, prompts, what, method, measure) for method in methods]
    frames = [
        pd.DataFrame(list(rows), columns=QUESTIONS[what].axes).assign(method=method)
        for (rows, _), method in zip(parts, methods, strict=True)
    ]
    rows = pd.concat(frames, ignore_index=True)
    found = [estimates for _, estimates in parts]
    columns = {
        name: np.concatenate([each.columns[name] for each in found]) for name in found[0].columns
    }
    nothing = torch.zeros_like(prompts.y_query_clean)
    return Ablation(
        what=what,
        methods=tuple(methods),
        rows=rows[["method", *QUESTIONS[what].axes]],
        columns=columns,
        few=np.concatenate([each.carried_by_few for each in found]),
        full_risk=found[0].full[0],
        full_risk_sem=found[0].full[1],
        null_risk=measure.values(nothing, prompts).mean().item(),
        metric=measure.name,
        unit=measure.unit,
        **further,
    )


def _estimated(
    predictor: Predictor, prompts: Prompts, what: str, method: str, measure: Measure
) -> tuple[Rows, Estimates]:
    """Rows of a kind, and their contrasts."""
    if what == "positions":
        rows = contrasts.positions(predictor, prompts)
    elif what == "greedy":
        chosen_on, prompts = halves(prompts)
        rows = steps(greedy_order(predictor, _even(chosen_on, method), measure, method))
    else:
        rows = ROWS_OF[what](predictor)
    return rows, estimated(predictor, _even(prompts, method), rows, measure, method)


def _even(prompts: Prompts, method: str) -> Prompts:
    """An even number of prompts for resample ablation, whose prompts swap in pairs."""
    return prompts[: len(prompts) // 2 * 2] if method == "resample" else prompts


def greedy_order(
    predictor: Predictor, prompts: Prompts, measure: Measure = EXCESS, method: str = "zero"
) -> list[Head]:
    """Heads in an order in which next is the one that leaves the smallest metric when masked, too."""
    order: list[Head] = []
    left = predictor.heads
    for _ in progress(range(len(left)), "greedy order of heads"):
        masks = [Mask((*order, head)) for head in left]
        values = values_under(predictor, prompts, masks, measure, method)
        order.append(left.pop(int(values.mean(0).argmin())))
    return order


def _outputs(predictor: Predictor, prompts: Prompts) -> dict[str, np.ndarray]:
    """Contribution of each head of one layer to the prediction, the part without heads, and the target; unit y."""
    heads = predictor.heads
    nothing, *alone = predictor.run(
        prompts, [heads, *([h for h in heads if h != head] for head in heads)]
    )
    outputs = torch.stack([each - nothing for each in alone], 1)
    named = {"outputs": outputs, "rest": nothing[0], "target": prompts.y_query_clean}
    return {name: values.double().numpy(force=True) for name, values in named.items()}
