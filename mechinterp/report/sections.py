"""The section of a page on a result, and what sections show of several results together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.analysis.columns import meanings
from mechinterp.analysis.registry import Analysis
from mechinterp.analysis.result import Card, Finding, figures_of, sentences_of, tables_of
from mechinterp.report.parts import Section, Toggles

HEIGHT, TOP = 420, 60
"""Of a figure that does not say how high it is, and of the room above it."""
MOST_TOGGLES = 8


def section_of(
    name: str, analysis: Analysis, result: Finding, *, shown: Sequence[str] = (), prompts: str = ""
) -> Section:
    """Sentences, figures and tables of a result, and how it was computed.

    Args:
        shown: Sentences that the page has already.
        prompts: Which prompts it was computed on.
    Example:
        >>> from mechinterp.analysis.one_layer.circuits import circuits
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> section_of("circuits", Analysis(circuits), circuits(zero_head(d_x=5))).title
        'Circuits'
    """
    sentences = [text for text in sentences_of(result) if text not in shown]
    text = " ".join(sentences)
    tables = tables_of(name, result)
    columns = [column for table in tables.values() for column in table.frame.columns]
    return Section(
        analysis.title or name.replace("-", " ").capitalize(),
        f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", ".")) else "."),
        " ".join(filter(None, (analysis.described.replace("`", ""), prompts))),
        {key: _ready(figure, name) for key, figure in figures_of(name, result).items()},
        tables,
        meanings(result, columns),
    )


def _ready(figure: go.Figure, name: str) -> go.Figure:
    """The figure with a height and a title of its own."""
    layout = figure.layout
    return figure.update_layout(
        height=layout.height or HEIGHT,
        margin_t=TOP if layout.margin.t is None else layout.margin.t,
        title_text=layout.title.text or name,
    )


def with_heads(
    sections: Mapping[str, Section], results: Mapping[str, Finding]
) -> dict[str, Section]:
    """The sections with what they show of several results: cards of heads, and switches for heads."""
    shown = dict(sections)
    for name in [name for name, result in results.items() if hasattr(result, "cards")][:1]:
        cards: list[Card] = results[name].cards()  # type: ignore[attr-defined]
        for other in results.values():
            facts = other.head_facts() if hasattr(other, "head_facts") else [{}] * len(cards)
            cards = [
                replace(card, facts={**card.facts, **more})
                for card, more in zip(cards, facts, strict=True)
            ]
        n_random = getattr(results[name], "n_random", 0)
        legend = f"The grey band beside a number is where 90% of {n_random} models with random weights lie; the line is this model."
        shown[name] = replace(shown[name], cards=tuple(cards), legend=legend)
    switches = switches_of(results)
    if switches is not None:
        shown["ablate"] = replace(shown["ablate"], toggles=switches)
    return shown


def switches_of(results: Mapping[str, Finding]) -> Toggles | None:
    """Switches for the heads of one layer of attention, from its subsets of heads and its attention on a few prompts."""
    attention = results.get("attention")
    subsets = getattr(results.get("ablate"), "subsets", None)
    outputs = getattr(attention, "outputs", None)
    if subsets is None or outputs is None or subsets.kept.shape[1] > MOST_TOGGLES:
        return None
    rows = zip(subsets.kept, subsets.risk, subsets.risk_sem, strict=True)
    rest = np.asarray(attention.prediction - outputs.sum(1))[0]  # type: ignore[union-attr]
    return Toggles(
        colors=tuple(figures.head_color(head) for head in range(subsets.kept.shape[1])),
        risks={
            "".join(str(int(k)) for k in kept): (float(risk), float(sem))
            for kept, risk, sem in rows
        },
        outputs=outputs.tolist(),
        rest=rest.tolist(),
        target=attention.target.tolist(),  # type: ignore[union-attr]
    )
