"""Sections on the heads of a model of any number of layers: risk, masking, pruning."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.analysis.ablation.cross_fitting import SPLITS
from mechinterp.analysis.ablation.masked_risk import Head, masked_errors
from mechinterp.analysis.ablation.pairs import greedy_order
from mechinterp.analysis.ablation.pruning_curves import PruningCurves, RulePruning, pruning_curves
from mechinterp.analysis.ablation.single import HeadAblation, ablate_heads
from mechinterp.analysis.learners.baselines import STEPS
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Predictor
from mechinterp.report.parts import Section
from mechinterp.report.subject import Subject, some

GREEDY_HEADS = 32
"""Most heads whose greedy order is searched: it takes n (n + 1) / 2 masks."""


def risk_section(subject: Subject) -> Section:
    """How large the excess risk is, held against learners at their best."""
    found = subject.baselines
    ratios = [
        f"{with_error(ratio, sem)} times that of {'predicting 0' if name == 'zero' else name}"
        for name, ratio, sem in zip(found.learners, found.ratio, found.ratio_sem, strict=True)
        if not np.isnan(ratio)
    ]
    return Section(
        "Excess risk",
        f"The model's excess risk is {with_error(found.model_risk, found.model_risk_sem)} y²: {'; '.join(ratios)}.",
        f"Mean of (ŷ − x·β)² over {len(subject.prompts)} prompts, the same for all. Each learner has the penalty, or the number "
        f"of steps up to {STEPS}, that is best on these very prompts, which favours it. GD descends from zero with the "
        "step 1/λ_max of each prompt; Algorithm 1 does so on x reweighted by its correlations with y. Ratios "
        "are paired over prompts.",
        {"baselines": found.plot()},
        {"baselines": found.to_frame()},
    )


def masking_section(subject: Subject) -> Section:
    """What masking each head costs, by three methods, and what masking whole layers does."""
    zero, *others = subject.single
    whole = _layer_rises(subject.predictor, subject.prompts)
    return Section(
        "Heads",
        " ".join([_effective(zero), *_carried(zero), *_broken(zero), _cautioned(zero, *whole)]),
        f"One head is masked at a time, nothing is retrained; excess risk is the mean of (ŷ − x·β)², ± one standard error, "
        f"paired over {len(subject.prompts)} prompts. Zero ablation sets a head's z to 0, mean ablation to its mean over "
        f"prompts, resample ablation to that of another prompt. Importance is a head's share of its "
        "layer's rises, falls taken as 0; the effective number of heads is exp of the entropy of the importance. Colours of the "
        "first figure end where the model is as bad as predicting 0, if not before.",
        {
            "head_risk": _risk_heatmap(zero),
            "head_importance": zero.plot_importance(),
            "effective_heads": _effective_bars([zero, *others]),
        },
        {
            "layers": _layer_table([zero, *others], *whole),
            "heads": _head_table([zero, *others]),
        },
        longest_table=128,
    )


def pruning_section(subject: Subject) -> Section:
    """What is left of the model as heads go for good: curves, and rules that name what stays."""
    rules, measured = subject.rules, subject.measured
    orders, how = _orders(subject)
    curves = pruning_curves(subject.predictor, some(measured, 4), orders, progress=subject.progress)
    pruned = len(rules.rules) > 1
    chosen_figure = {"chosen": rules.plot_chosen()} if pruned else {}
    chosen_table = {"chosen": rules.chosen_frame()} if pruned else {}
    return Section(
        "Pruning",
        " ".join([_enough(curves), _rules_told(rules), *_by_chance(rules)]),
        f"{how}The other order goes by the rises of the single masks on {len(subject.scored)} prompts. Risks of the curves are "
        f"those of {len(some(measured, 4))} other prompts; nothing is retrained. For the rules, all {len(subject.prompts)} prompts are halved at random {SPLITS} "
        "times, heads chosen on each half and measured on the other; ± is over prompts and over which heads were chosen. best-later keeps all heads of the first "
        "layer and of each later one the head that is missed most; least-later keeps the one missed least, best-first the "
        "best of the first layer and all later heads: both are controls. A new read-out is a ridge regression on the "
        "stream at the query, cross-validated: it tells what is lost from what has only moved.",
        {"pruning": curves.plot(), "rules": rules.plot()} | chosen_figure,
        {"rules": rules.to_frame(), "pruning": curves.to_frame()} | chosen_table,
        longest_table=80,
    )


def _orders(subject: Subject) -> tuple[dict[str, list[Head]], str]:
    """Orders in which heads go, and how they were found."""
    zero = ablate_heads(subject.predictor, subject.scored, progress=subject.progress)
    heads = list(np.ndindex(zero.rise.shape))
    by_rise = {
        "least rise first": [heads[index] for index in zero.rise.ravel().argsort(kind="stable")]
    }
    if len(heads) > GREEDY_HEADS:
        said = f"A greedy order, searched for up to {GREEDY_HEADS} heads, is left out: there are {len(heads)}. "
        return by_rise, said
    chosen_on = some(subject.scored, 8)
    found = greedy_order(subject.predictor, chosen_on, progress=subject.progress)
    greedy = [(int(layer), int(head)) for layer, head in found.heads]
    said = (
        "The greedy order masks at each step the head that is missed least with those before it gone, chosen on "
        f"{len(chosen_on) // 2} prompts. "
    )
    return {"greedy": greedy, **by_rise}, said


def _effective(zero: HeadAblation) -> str:
    few = set(np.flatnonzero(zero.carried_by_few.any(axis=1)))
    counts = [
        f"{number:.2f} by medians in layer {layer}"
        if layer in few
        else f"{number:.2f} ± {zero.effective_heads_sem[layer]:.2f} in layer {layer}"
        for layer, number in enumerate(zero.typical_effective_heads)
    ]
    return f"Of {zero.rise.shape[1]} heads per layer the rises of the excess risk are spread over {', '.join(counts)}."


def _carried(zero: HeadAblation) -> list[str]:
    """A sentence on the heads whose mean rise few prompts carry, if there are any."""
    if not zero.carried:
        return []
    medians = zero.median_rise[zero.carried_by_few]
    listed = ", ".join(
        f"{name} {cell(rise)}" for name, rise in zip(zero.carried, medians, strict=True)
    )
    return [
        f"One prompt in a hundred carries most of the mean rise of some heads; their median rises (y²): {listed}."
    ]


def _broken(zero: HeadAblation) -> list[str]:
    """A sentence on the heads without which the model is worse than no model, if there are any."""
    if not zero.breaking:
        return []
    return [
        f"Without {_together(zero.breaking)} the model is worse than predicting 0: the layers after meet inputs they have "
        "never seen, and the size of such a rise says that something breaks, not how much the head computes."
    ]


def _cautioned(zero: HeadAblation, rise: np.ndarray, rise_sem: np.ndarray) -> str:
    """What masks of single heads do not say, with the layers that can go more easily than one of their heads."""
    found = []
    for layer, head in enumerate(zero.rise.argmax(1)):
        one, sem = zero.rise[layer, head], zero.rise_sem[layer, head]
        if zero.rise.shape[1] > 1 and one - rise[layer] > 2 * np.hypot(sem, rise_sem[layer]):
            found.append(
                f"all of layer {layer} costs {with_error(rise[layer], rise_sem[layer])} y², less than L{layer}H{head} "
                f"alone ({with_error(one, sem)})"
            )
    said = (
        f"Here {'; '.join(found)}."
        if found
        else "Here no head costs more than its whole layer does."
    )
    return (
        "A mask asks what one head costs while all others stay. Heads that stand in for each other cost little one by one "
        "and much together, and a head whose masking costs a lot may only hold the others of its layer in balance, in a "
        f"layer that can go. {said}"
    )


def _together(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"any of {', '.join(names)}"


def _layer_rises(predictor: Predictor, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Rise of the excess risk when all heads of a layer are masked, and its standard error."""
    layers, heads = range(predictor.n_layers), range(predictor.n_heads)
    masks: list[list[Head]] = [[], *([(layer, head) for head in heads] for layer in layers)]
    errors = masked_errors(predictor, prompts, masks)
    return mean_and_sem(errors[:, 1:] - errors[:, :1])


def _risk_heatmap(zero: HeadAblation) -> go.Figure:
    """How many times the full model's excess risk is left with a head masked, on a logarithmic scale."""
    if not 0 < zero.full_risk < zero.null_risk:
        return zero.plot()
    factor = np.log10(np.maximum(1 + zero.rise / zero.full_risk, 1e-6))
    title = "Excess risk with a head masked, over the full model's, log₁₀"
    bound = np.log10(zero.null_risk / zero.full_risk)
    limit = float(min(np.abs(factor).max(), bound)) or float(bound)
    return figures.layers_by_heads(factor, title=title, unit="log₁₀", limit=limit)


def _effective_bars(found: Sequence[HeadAblation]) -> go.Figure:
    return figures.bars(
        [f"layer {layer}" for layer in range(len(found[0].rise))],
        {f"{one.method} ablation": one.effective_heads for one in found},
        errors={f"{one.method} ablation": one.effective_heads_sem for one in found},
        title="Effective number of heads of each layer",
        y_title="effective heads",
    )


def _layer_table(
    found: Sequence[HeadAblation], rise: np.ndarray, rise_sem: np.ndarray
) -> pd.DataFrame:
    frame = found[0].layer_frame().drop(columns="method")
    frame = frame.assign(layer_rise=rise, layer_rise_sem=rise_sem)
    for one in found[1:]:
        frame[f"{one.method}_effective_heads"] = one.effective_heads
    return frame


def _head_table(found: Sequence[HeadAblation]) -> pd.DataFrame:
    frame = found[0].to_frame().drop(columns="method")
    for one in found[1:]:
        frame[f"{one.method}_rise"] = one.rise.ravel()
        frame[f"{one.method}_rise_sem"] = one.rise_sem.ravel()
    return frame


def _enough(curves: PruningCurves) -> str:
    """How many heads each order needs."""
    counts = [f"{curves.needed(name)} in the order {name!r}" for name in curves.orders]
    n_heads = len(curves.heads[0])
    return f"Of {n_heads} heads, the excess risk stays within twice the full model's with {' and '.join(counts)}."


def _rules_told(rules: RulePruning) -> str:
    told = [
        f"{name} keeps {kept.sum()} and has {with_error(ratio, sem)} times the risk{how}"
        for (name, ratio, sem, how), kept in zip(
            rules.ratios_to_read(), rules.kept[1:], strict=True
        )
    ]
    if not told:
        return "With one head, no rule prunes anything."
    few = [name for name, few in zip(rules.rules, rules.carried_by_few, strict=True) if few]
    why = f" Of {' and '.join(few)} one prompt in a hundred carries most of the risk as it is."
    return f"By rule, {'; '.join(told)}.{why if few else ''}"


def _by_chance(rules: RulePruning) -> list[str]:
    """A sentence on the layers of which best-later keeps different heads by different prompts, if there are any."""
    if "best-later" not in rules.rules:
        return []
    often = rules.chosen[rules.rules.index("best-later")].max(1)
    layers = [f"{share:.0%} in layer {layer}" for layer, share in enumerate(often) if share < 1]
    if not layers:
        return []
    return [
        "Which head best-later keeps depends on the prompts: the one that is chosen most often is so in "
        f"{', '.join(layers)} of the choices on halves of them."
    ]
