"""The sections on one layer of attention: what each says, its figures and tables."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from mechinterp import figures
from mechinterp.analysis.ablation.single import HeadAblation
from mechinterp.analysis.multi_layer.head_circuits import LayeredCircuits
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.analysis.one_layer.circuits import circuits, weights_of
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import head_outputs
from mechinterp.models.scores import is_normalised
from mechinterp.report.parts import Band, Card, Section, Toggles
from mechinterp.report.subject import Subject

MOST_TOGGLES = 8
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MEANINGS = {
    "positive": "looks at tokens whose x is like the query's and adds their y",
    "negative": "looks at tokens whose x is unlike the query's and takes their y away",
    "mismatched": "omega and mu differ in sign: what it looks at and what it adds pull apart",
    "mixed": "entries of its omega, or of its mu, have both signs",
    "unstructured": "its circuits are not of the form that omega and mu describe",
    "dummy": "adds next to nothing to the prediction",
}
HOW = {
    "pattern": "the first definition that all numbers below allow",
    "sign_matching": "omega and mu of every active head have the same sign",
    "omega_spread": "max/min |omega| over active heads, minus 1",
    "zero_sum": "|Σ mu| / Σ |mu|",
    "eta": "Σ mu·omega, times f'(0): the step",
    "optimal eta for the task": "1 / (1 + (1 + s²) d_x / L), s² the noise variance over the signal's",
    "gamma": "|omega| of the nearest point of the solution manifold",
    "distance to the solution manifold": "of (omega, mu), each relative to its norm",
    "R² with idealised heads": "of the model's predictions, by heads that keep omega and mu only",
    "R² of the closed form": "of the model's predictions, by the learner built from omega and mu",
    "R² on its task": "1 − loss / loss of predicting 0",
    "principal components used": "directions that are more than half learned",
    "learned part of each component": "eᵀ M e over its value at the optimum",
    "share of E y² predicted off the components": "by the entries of M between two directions",
}


def heads_section(subject: Subject) -> Section:
    """The pattern with its evidence, and a card for each head."""
    found = subject.pattern
    kinds = ", ".join(
        f"{found.labels.count(label)} {label}" for label in dict.fromkeys(found.labels)
    )
    return Section(
        "Heads and pattern",
        f"{counted(len(found.labels), 'head')}: {kinds}.",
        "A head is active if its share of the heads' output (standard deviation over prompts) is above "
        f"{Thresholds().share:.0%}, else it is a dummy. Active heads are positive or negative by the common sign of omega and mu. "
        "Heads of one sign make a kernel smoother; heads of both signs whose mu sum to zero and whose "
        "|omega| agree make one step of debiased gradient descent of size eta. Idealised heads keep omega and "
        "mu and lose the rest of their circuits; the closed form is the learner built from omega and mu alone. "
        "A p is the fraction of randomly initialised models of this shape that are as structured.",
        {"heads": found.plot()},
        {"pattern": _evidence(found), "heads": found.to_frame()},
        _cards(subject),
        legend=f"The grey band beside a number is where 90% of {found.n_random} models with random weights lie; the line is this model.",
    )


def _band(found: Classification, name: str, value: float) -> tuple[Band, ...]:
    """The range of random weights beside a number; none where there is no number or no range."""
    low, high = found.random_ranges[name]
    return (Band(float(value), low, high),) if np.isfinite([value, low, high]).all() else ()


def _evidence(found: Classification) -> pd.DataFrame:
    scales, used = found.scales, found.components
    values = {
        "pattern": found.pattern,
        "sign_matching": str(found.sign_matching).lower(),
        "omega_spread": cell(scales.omega_spread),
        "zero_sum": cell(scales.zero_sum),
        "eta": ", ".join(cell(eta) for eta in scales.eta),
        "optimal eta for the task": cell(scales.eta_optimal),
        "gamma": cell(scales.gamma),
        "distance to the solution manifold": cell(scales.manifold_distance),
        "R² with idealised heads": with_error(found.substitution.r2, found.substitution.r2_sem),
        "R² of the closed form": with_error(found.learner.r2, found.learner.r2_sem),
        "R² on its task": cell(found.loss.r2),
    }
    if used is not None:
        count = "–" if used.n_components is None else f"{used.n_components} of {len(used.learned)}"
        values["principal components used"] = count
        values["learned part of each component"] = ", ".join(map(cell, used.learned))
        values["share of E y² predicted off the components"] = cell(used.off_diagonal)
    drawn = {
        "omega_spread": _band(found, "omega_spread", scales.omega_spread),
        "zero_sum": _band(found, "zero_sum", scales.zero_sum),
        "R² with idealised heads": _band(found, "substitution_r2", found.substitution.r2),
        "R² on its task": _band(found, "task_r2", found.loss.r2),
    }
    bands = {name: bands[0] for name, bands in drawn.items() if bands}
    rows = [(name, value, bands.get(name, ""), HOW[name]) for name, value in values.items()]
    rows += [
        (
            f"p of {name}",
            f"< {1 / found.n_random:.2g}" if p <= 1 / found.n_random else cell(p),
            "",
            "fraction of random models that reach it",
        )
        for name, p in found.p_values.items()
    ]
    return pd.DataFrame(rows, columns=["evidence", "value", "random_weights", "how"])


def _cards(subject: Subject) -> tuple[Card, ...]:
    found, subsets = subject.pattern, subject.subsets
    scales, cards = found.circuits, []
    for head, label in enumerate(found.labels):
        facts = {
            "share of output": f"{found.share[head]:.1%}",
            "omega (1/x²)": f"{scales.omega_mean[head]:+.4g}",
            "mu": ", ".join(f"{mu:+.4g}" for mu in scales.mu[head]),
            "QK diagonal": cell(scales.qk_diagonal[head]),
            "OV reads y only": cell(scales.ov_last_entry[head]),
        }
        facts |= {
            f"{one.method} ablation (y²)": with_error(one.rise[0, head], one.rise_sem[0, head])
            for one in subject.single
        }
        if subsets is not None:
            value = with_error(subsets.shapley[head], subsets.shapley_sem[head])
            facts["Shapley value (y²)"] = value
        bands = {
            "share of output": _band(found, "share", found.share[head]),
            "omega (1/x²)": _band(found, "omega_mean", scales.omega_mean[head]),
            "mu": tuple(band for mu in scales.mu[head] for band in _band(found, "mu", mu)),
            "QK diagonal": _band(found, "qk_diagonal", scales.qk_diagonal[head]),
            "OV reads y only": _band(found, "ov_last_entry", scales.ov_last_entry[head]),
        }
        # A score that is no average looks at unlike tokens with weights below 0: omega and mu flip together.
        told = is_normalised(subject.score) or label not in ("positive", "negative")
        meaning = MEANINGS[label] if told else "adds y weighted by how alike token and query are"
        color = figures.head_color(head)
        cards.append(Card(f"head {head}", label, meaning, color, facts, bands))
    return tuple(cards)


def circuits_section(subject: Subject) -> Section:
    """QK and OV heatmaps."""
    found = circuits(subject.checkpoint)
    if isinstance(found, LayeredCircuits):
        return _layered_circuits_section(found)
    return Section(
        "Circuits",
        "QK says how strongly a query's x looks at a key's x and y; OV says what is read from the tokens "
        "a head looks at. In the published pattern QK is omega times the identity on x, and OV is mu on y.",
        "QK = W_Q W_K^T times the softmax scale, OV = W_V W_O, from the weights alone. Rows of QK that belong "
        "to the query's empty y slot never act and are not drawn.",
        {"qk": found.plot(), "ov": found.plot_ov()},
    )


def _layered_circuits_section(found: LayeredCircuits) -> Section:
    """Circuits of every layer, with a slider over them."""
    if found.of_weights_alone:
        text = f"The model has {found.of_weights_alone}, so that the circuits are of the weights alone, in coordinates of the stream."
        method = "QK = W_Q W_K^T times the scale of the scores, OV = W_V W_O."
    else:
        text = "These are direct paths: how a query's token looks at a key's, and what of it a head writes into the prediction."
        method = "QK = W_in W_Q W_K^T W_inᵀ times the scale of the scores, OV = W_in W_V W_O W_U; what other layers do in between is left out."
    return Section(
        "Circuits",
        f"{text} Move the slider to see each layer.",
        method,
        {"qk": found.plot(), "ov": found.plot_ov()},
        {"circuits": found.to_frame()},
        slider="layer",
    )


def attention_section(subject: Subject) -> Section:
    """Attention on prompts from the one the model does best on to the one it does worst on."""
    found = attention_patterns(subject.checkpoint, _shown_prompts(subject))
    return Section(
        "Attention on prompts",
        "Five prompts, ordered by how far the prediction is off: prompt 0 is the best of all, 2 the median, 4 the worst. "
        "Move the slider, or use the arrow keys on it. A weight that depends only on how alike token and query "
        "are lies on one curve.",
        f"Of {len(subject.prompts)} prompts those at the quartiles of (ŷ − x·β)². Weights are those the query gives to the "
        "tokens of its context.",
        {"attention": found.plot(), "similarity": found.plot_similarity()},
        {"attention": found.to_frame()},
        slider="prompt",
    )


def _shown_prompts(subject: Subject) -> Prompts:
    """Prompts from the one that the model does best on to the one it does worst on."""
    order = np.argsort(subject.squared_errors(), kind="stable")
    rows = order[[round(quantile * (len(order) - 1)) for quantile in QUANTILES]]
    return subject.prompts[torch.from_numpy(rows)]


def _toggles(subject: Subject) -> Toggles | None:
    """Switches for the heads of a model that has no more than the page's room for subsets."""
    subsets = subject.subsets
    if subsets is None or subsets.kept.shape[1] > MOST_TOGGLES:
        return None
    weights = weights_of(subject.checkpoint, "report")
    prompts = _shown_prompts(subject).to("cpu").to(torch.float64)
    rows = zip(subsets.kept, subsets.risk, subsets.risk_sem, strict=True)
    rest = torch.zeros(weights.d_y) if weights.b_O is None else weights.b_O
    return Toggles(
        colors=tuple(figures.head_color(head) for head in range(subsets.kept.shape[1])),
        risks={
            "".join(str(int(k)) for k in kept): (float(risk), float(sem))
            for kept, risk, sem in rows
        },
        outputs=head_outputs(weights, prompts).tolist(),
        rest=rest.tolist(),
        target=prompts.y_query_clean.tolist(),
    )


def ablation_section(subject: Subject) -> Section:
    """What masking heads costs."""
    found, single, subsets = subject.pattern, subject.single, subject.subsets
    pictures = {"ablation": _ablation_bars(single)}
    tables = {"ablation": pd.concat([one.to_frame() for one in single], ignore_index=True)}
    text = (
        f"Excess risk of the full model: {single[0].full_risk:.4f} ± {single[0].full_risk_sem:.4f} y². "
        "Each bar is its rise when one head is masked."
    )
    if is_normalised(subject.score) and {"positive", "negative"} <= set(found.labels):
        text += (
            " Masking one head of a ± pair does more than remove its share: the mu no longer sum to zero, so the "
            "mean response of the context, which the pair had cancelled, enters the prediction with the weight "
            "of the heads that stay. A large bar therefore does not mean that a head could do the task alone."
        )
    if subsets is not None:
        text += (
            " What heads do alone and together stands in the table of subsets; the Shapley values average over "
            "all orders of adding heads."
        )
        pictures["shapley"] = subsets.plot()
        tables |= {"shapley": subsets.shapley_frame(), "subsets": subsets.to_frame()}
    return Section(
        "Head ablation",
        text,
        f"Excess risk is the mean of (ŷ − x·β)² over {len(subject.prompts)} prompts, the same for every mask; ± is one "
        "standard error, paired over prompts. Zero ablation sets a head's z to 0, mean ablation to its mean "
        "over prompts, resample ablation to that of another prompt. In one layer heads add up, so all subsets follow from one pass.",
        pictures,
        tables,
        toggles=_toggles(subject),
    )


def _ablation_bars(single: list[HeadAblation]) -> go.Figure:
    """One group of bars per head: zero beside mean ablation."""
    return figures.bars(
        single[0].head_names,
        {f"{one.method} ablation": one.rise.ravel() for one in single},
        errors={f"{one.method} ablation": one.rise_sem.ravel() for one in single},
        title="Rise of the excess risk when a head is masked",
        y_title="rise of excess risk (y²)",
    )


def fits_section(subject: Subject) -> Section:
    """Which closed-form learner predicts as the model does."""
    fits = subject.fits
    at_trained = fits.to_frame().query(f"context_length == {fits.trained_length}")
    text = fits.verdict
    best = subject.pattern.scales.eta_optimal if subject.one_attention else np.nan
    if not np.isnan(best):
        text += f" The best debiased step size for this task is {best:.4f}."
    return Section(
        "Which learner",
        text,
        f"At each context length, {fits.n_prompts} prompts shared by the model and all learners. Step sizes and "
        "the kernel head are fitted to the model's predictions by least squares; ridge is the Bayes predictor "
        "of the task, with nothing fitted. Loss alone does not tell: two learners can have "
        "equal losses and differ on every prompt.",
        {"fit_loss": fits.plot(), "fit_distance": fits.plot_distance()},
        {"fits_at_trained_length": at_trained, "fits": fits.to_frame()},
    )


def assumed_text(assumed: Mapping[str, object]) -> str:
    """What a page says was filled in of the architecture that the file did not say; the task has a line of its own.

    Example:
        >>> assumed_text({"task.noise_var": 0.1, "model.score": "softmax", "train.steps": 5})
        '; assumed, as the file does not say it: score softmax'
    """
    told = [
        f"{name.partition('.')[2]} {value}"
        for name, value in assumed.items()
        if name.startswith("model.") and value not in (None, (), [])
    ]
    return f"; assumed, as the file does not say it: {', '.join(told)}" if told else ""
