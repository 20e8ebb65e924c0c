"""Sections of a page: results of analyses with their sentences, figures, tables and cards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

import plotly.graph_objects as go

from mechinterp.analysis.classified import Classified
from mechinterp.analysis.needs import one_attention
from mechinterp.analysis.over_steps import N_STEP_PROMPTS, SUFFIX, over_steps
from mechinterp.analysis.registry import ANALYSES, Analysis, analysis_of, run_analysis, target_note
from mechinterp.analysis.response.projection import FewPromptsError
from mechinterp.analysis.result import Card, Finding, figures_of, sentences_of, tables_of
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.config import TaskLike
from mechinterp.display import counted
from mechinterp.icl.prompts import NoTaskVectorsError, Prompts
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.models.run.evaluation import require_prompts
from mechinterp.models.run.n_prompts import least_number, require_number, usual_number
from mechinterp.report.to_html import Section

FIGURE_HEIGHT = 420
"""Default height of a figure, in pixels."""
TOP = 60
"""Default height of the margin above a figure, in pixels."""


def contents_of(
    checkpoint: Checkpoint | HookedModule,
    prompts: Prompts | None,
    n_prompts: int | None,
    seed: int,
    analyses: Sequence[str | Callable[..., Finding]] | None,
    task: TaskLike | None = None,
) -> tuple[str, str, list[Section]]:
    """Verdict, loss line (with the losses of ridge regression and of predicting 0), and sections. Arguments are those of
    `write_report`.

    Raises:
        ValueError: If an analysis does not exist or does not take the model, or n_prompts is too small.
    """
    require_prompts(prompts, "write_report")
    if prompts is not None and n_prompts is not None:
        raise ValueError(
            f"n_prompts is of prompts that are drawn, got {n_prompts} and {prompts!r}."
        )
    if n_prompts is not None and not one_attention(checkpoint):
        require_number(n_prompts, 1)
        n_prompts = max(n_prompts, least_number(checkpoint))

    def result_of(name: str, analysis: Analysis) -> tuple[Finding, str]:
        drawn_by = prompts_for(name, analysis, n_prompts, seed, prompts)
        law = task if "task" in analysis.options else None
        result = run_analysis(analysis.function, checkpoint, task=law, **drawn_by)
        return result, prompts_in_words(checkpoint, analysis, result, drawn_by)

    found: dict[str, tuple[Analysis, Finding, str]] = {}
    left_out: dict[str, list[str]] = {}
    for name, analysis in dict(map(_named, analyses or default_names(checkpoint))).items():
        try:
            found[name] = (analysis, *result_of(name, analysis))
        except (NoStreamError, NoTaskVectorsError, FewPromptsError) as error:
            if analyses is not None:
                raise
            left_out.setdefault(str(error), []).append(name)
    results = {name: result for name, (_, result, _) in found.items()}
    classified = next((r for r in results.values() if isinstance(r, Classified)), None)
    if classified is None:
        classified = cast("Classified", result_of("classify", ANALYSES["classify"])[0])
    top = [*str(classified.verdict).splitlines(), classified.loss_text]
    sections: dict[str, Section] = {}
    for name, (analysis, result, text) in found.items():
        section = section_of(name, analysis, result, shown=top, prompts=text)
        sections[name] = _named_apart(name, section, sections.values())
    listed = list(with_cards(sections, results).values())
    if left_out:
        text = " ".join(f"{', '.join(names)}: {why}" for why, names in left_out.items())
        listed.append(Section("Left out", text, "They need what the model or the prompts lack."))
    verdict = str(classified.verdict)
    if classified.label == "undetermined" and "response" in results:
        verdict += f"\nWhat it does: {sentences_of(results['response'])[0]}"
    return verdict, classified.loss_text, listed


def _named_apart(name: str, section: Section, others: Iterable[Section]) -> Section:
    """Copy of the section in which tables and figures have names that no other section uses."""
    taken = {key for each in others for key in (*each.tables, *each.figures)}
    own = name.replace("-", "_")
    apart = {
        key: f"{own}_{key}" if key in taken else key for key in (*section.tables, *section.figures)
    }
    return replace(
        section,
        tables={apart[key]: table for key, table in section.tables.items()},
        figures={apart[key]: figure for key, figure in section.figures.items()},
    )


def prompts_for(
    name: str, analysis: Analysis, n_prompts: int | None, seed: int, prompts: Prompts | None
) -> dict[str, Any]:
    """Given prompts of an analysis, or their number and seed, as arguments; slow analyses use at
    most their default number, and an analysis over steps few."""
    if not analysis.draws_prompts:
        return {}
    most = analysis.options["n_prompts"].default if analysis.many_runs else None
    if name.endswith(SUFFIX):
        most, n_prompts = N_STEP_PROMPTS, n_prompts or N_STEP_PROMPTS
    if prompts is not None and analysis.takes_prompts_as is not None:
        return {"prompts": prompts[:most]}
    if n_prompts is None:
        return {"seed": seed}
    return {"seed": seed, "n_prompts": min(n_prompts, most or n_prompts)}


def prompts_in_words(
    checkpoint: Checkpoint | HookedModule,
    analysis: Analysis,
    result: Finding,
    drawn_by: Mapping[str, Any],
) -> str:
    """Number of prompts of a result, and their seed or what is not known of them; empty if it used none.

    Args:
        drawn_by: Arguments of `prompts_for`.
    """
    if "prompts" in drawn_by:
        given = drawn_by["prompts"]
        texts = (counted(len(given), "given prompt"), target_note(given))
        return f"{'. '.join(filter(None, texts))}."
    if not drawn_by:
        return ""
    number = drawn_by.get("n_prompts") or getattr(result, "n_prompts", None)
    if number is None:
        default = analysis.options["n_prompts"].default
        number = default if isinstance(default, int) else usual_number(checkpoint)
    return f"{counted(number, 'prompt')}, seed {drawn_by['seed']}."


def default_names(checkpoint: Checkpoint | HookedModule) -> tuple[str, ...]:
    """Names of the analyses that suit a model."""
    taken = {name: each for name, each in ANALYSES.items() if each.needs(checkpoint)}
    once = [name for name, each in taken.items() if each.on_page(checkpoint)]
    steps = [name for name, each in taken.items() if each.steps_on_page(checkpoint)]
    return (*once, *(f"{name}{SUFFIX}" for name in steps if checkpoint.steps))


def _named(named: str | Callable[..., Finding]) -> tuple[str, Analysis]:
    """Name and analysis; an analysis whose name ends in `SUFFIX` runs at every saved step."""
    if callable(named) or not named.endswith(SUFFIX):
        return analysis_of(named)
    name, analysis = analysis_of(named.removesuffix(SUFFIX))
    settings: dict = dict(analysis.step_settings)
    stepwise = wraps(analysis.function)(partial(over_steps, analysis=name, **settings))
    title = f"{analysis.title or name.capitalize()}, step by step"
    return f"{name}{SUFFIX}", replace(analysis, home=stepwise, title=title)


def section_of(
    name: str, analysis: Analysis, result: Finding, *, shown: Sequence[str] = (), prompts: str = ""
) -> Section:
    """Section with the sentences, figures, tables and switches of a result, and its method.

    Args:
        shown: Sentences that the page already shows.
        prompts: Description of the prompts.
    Example:
        >>> from mechinterp.analysis.circuits import circuits
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> section_of("circuits", Analysis(circuits), circuits(zero_head(d_x=5))).title
        'Circuits'
    """
    sentences = [text for text in sentences_of(result) if text not in shown]
    text = " ".join(sentences)
    tables = tables_of(name, result)
    return Section(
        analysis.title or name.replace("-", " ").capitalize(),
        f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", ".")) else "."),
        " ".join(filter(None, (f"Analysis {name}:", analysis.described.replace("`", ""), prompts))),
        {key: _ready(figure, name) for key, figure in figures_of(name, result).items()},
        tables,
        switches=result.switches() if hasattr(result, "switches") else None,
    )


def _ready(figure: go.Figure, name: str) -> go.Figure:
    """Figure with a height, a top margin and a title filled in."""
    layout = figure.layout
    return figure.update_layout(
        height=layout.height or FIGURE_HEIGHT,
        margin_t=TOP if layout.margin.t is None else layout.margin.t,
        title_text=layout.title.text or name,
    )


def with_cards(
    sections: Mapping[str, Section], results: Mapping[str, Finding]
) -> dict[str, Section]:
    """Sections in which the cards of the heads, which one result offers, hold facts of all results."""
    name = next((name for name, each in results.items() if hasattr(each, "cards")), None)
    if name is None:
        return dict(sections)
    cards: Sequence[Card] = results[name].cards()  # type: ignore[attr-defined]
    for each in results.values():
        if hasattr(each, "head_facts"):
            pairs = zip(cards, each.head_facts(), strict=True)
            cards = [replace(card, facts={**card.facts, **more}) for card, more in pairs]
    n_random = getattr(results[name], "n_random", 0)
    legend = f"The grey band beside a number is where 90% of {n_random} models with random weights lie; the line is this model."
    return {**sections, name: replace(sections[name], cards=tuple(cards), legend=legend)}
