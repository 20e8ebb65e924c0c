"""Verdict and sections of the page about one model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.registry import (
    ANALYSES,
    Analysis,
    analysis_of,
    run_analysis,
    suits,
)
from mechinterp.analysis.result import Finding
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.report import deep_sections, sections
from mechinterp.report.algorithm_section import algorithm_section
from mechinterp.report.edges import edges_sections
from mechinterp.report.parts import Section
from mechinterp.report.probing import descent_section, probes_section
from mechinterp.report.subject import Subject
from mechinterp.report.training import deep_steps_section, history_sections, steps_section

HEIGHT = 420
"""Of a figure that does not say how high it is."""


@dataclass(frozen=True)
class Contents:
    """What a page says of a model."""

    verdict: str
    """What it computes, how sure, what it is not, and what to doubt: a line each."""
    sections: tuple[Section, ...]


def contents_of(
    checkpoint: Checkpoint | HookedModule,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    analyses: Sequence[str | Callable[..., Finding]] | None = None,
    progress: ProgressCallback = no_progress,
) -> Contents:
    """The verdict and the sections.

    Args:
        n_prompts: Evaluation prompts; None: as many as each analysis takes by itself.
        analyses: Names of those that get a section, or functions; None: those that suit the model.
    Raises:
        ValueError: If there is no such analysis, one that was asked for does not take the model, or n_prompts is too small.
    """
    subject = Subject(checkpoint, n_prompts, seed, progress)
    if analyses is None:
        analyses, chosen = default_names(subject), False
    else:
        chosen = True
    found, left_out = [], {}
    for name, analysis in [analysis_of(each) for each in analyses]:
        try:
            found += sections_of(name, analysis, subject)
        except NoStreamError as error:
            if chosen:
                raise
            left_out[name] = str(error)
    if left_out:
        found.append(_left_out(left_out))
    return Contents(str(subject.classification.verdict), tuple(found))


def _left_out(reasons: Mapping[str, str]) -> Section:
    """The analyses that the model has no stream for, and why."""
    return Section(
        "Left out",
        f"{', '.join(reasons)}: {next(iter(reasons.values()))}",
        "These read the stream between layers.",
    )


def default_names(subject: Subject) -> tuple[str, ...]:
    """The analyses that suit a model."""
    return tuple(name for name, each in ANALYSES.items() if suits(each, subject.checkpoint))


def sections_of(name: str, analysis: Analysis, subject: Subject) -> list[Section]:
    """What an analysis says of a model: its own sections where it has them, else sentence, figure and table."""
    if name in BESPOKE:
        return BESPOKE[name](subject)
    return [plain_section(name, _run(analysis, subject), analysis.first_line)]


def _run(analysis: Analysis, subject: Subject) -> Finding:
    """The result of an analysis, which is told of prompts if it draws some."""
    draws = analysis.draws_prompts
    return run_analysis(
        analysis.function,
        subject.checkpoint,
        n_prompts=subject.n_prompts if draws else None,
        seed=subject.seed if draws else None,
        progress=subject.progress,
    )


def plain_section(
    name: str, found: Finding, method: str, *, title: str | None = None, text: str | None = None
) -> Section:
    """Sentence, figure and table of a result; and how it was computed.

    Example:
        >>> from mechinterp.analysis.one_layer.circuits import circuits
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> plain_section("circuits", circuits(zero_head(d_x=5)), "From the weights.").title
        'Circuits'
    """
    key = name.replace("-", "_")
    figure = found.plot()
    layout = figure.layout
    figure.update_layout(
        height=layout.height or HEIGHT,
        margin_t=60 if layout.margin.t is None else layout.margin.t,
        title_text=layout.title.text or name,
    )
    return Section(
        title or name.replace("-", " ").capitalize(),
        text or f"{found!r}.",
        method,
        {key: figure},
        {key: found.to_frame()},
    )


def _classify_sections(subject: Subject) -> list[Section]:
    if subject.one_attention:
        return [sections.heads_section(subject)]
    found = subject.classification
    text, algorithm = found.reason, None
    if isinstance(found, LayeredClassification):
        text, algorithm = found.heaviest, found.algorithm
    text = f"{text[0].upper()}{text[1:]}."
    computes = plain_section(
        "classify", found, ANALYSES["classify"].first_line, title="What it computes", text=text
    )
    return [computes] if algorithm is None else [computes, algorithm_section(algorithm)]


def _algorithm_sections(subject: Subject) -> list[Section]:
    found = _run(ANALYSES["algorithm"], subject)
    assert isinstance(found, AlgorithmEvidence)
    return [algorithm_section(found)]


def _ablate_sections(subject: Subject) -> list[Section]:
    if subject.one_attention:
        return [sections.ablation_section(subject)]
    return [deep_sections.masking_section(subject)]


def _listed(section: Callable[[Subject], Section], subject: Subject) -> list[Section]:
    return [section(subject)]


BESPOKE: dict[str, Callable[[Subject], list[Section]]] = {
    "classify": _classify_sections,
    "circuits": partial(_listed, sections.circuits_section),
    "attention": partial(_listed, sections.attention_section),
    "algorithm": _algorithm_sections,
    "baselines": partial(_listed, deep_sections.risk_section),
    "ablate": _ablate_sections,
    "prune": partial(_listed, deep_sections.pruning_section),
    "probe": partial(_listed, probes_section),
    "p-probe": partial(_listed, descent_section),
    "edges": edges_sections,
    "fit": partial(_listed, sections.fits_section),
    "snapshots": partial(_listed, steps_section),
    "head-snapshots": partial(_listed, deep_steps_section),
    "training": history_sections,
}
"""Analyses whose sections say more than a sentence, or show several results together."""
