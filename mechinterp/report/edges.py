"""The part of a page on how heads of one layer act through heads of later ones."""

from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.edges import N_PAIRS, HeadEdges, attribute_edges, edge_name
from mechinterp.report.parts import Section
from mechinterp.report.subject import Subject

MOST_EDGES = 1_200
NAMED = 3


def edges_sections(subject: Subject) -> list[Section]:
    """Which edges between heads carry what tells two sets of prompts apart; nothing where there are none to patch.

    That is with one layer, too many heads, a norm after each layer, or a module of somebody else's.
    """
    predictor = subject.predictor
    n_layers, n_heads = predictor.n_layers, predictor.n_heads
    n_edges = 3 * n_heads**2 * n_layers * (n_layers - 1) // 2
    weights = predictor.weights
    summed = weights is not None and weights.model.norm != "after"
    if not 0 < n_edges <= MOST_EDGES or not summed:
        return []
    size = subject.at_most(N_PAIRS)
    found = attribute_edges(
        subject.checkpoint, n_prompts=size, seed=subject.seed, progress=subject.progress
    )
    return [edges_section(found, size)]


def edges_section(found: HeadEdges, n_pairs: int) -> Section:
    """The largest effects, and how well gradients foretell them."""
    frame = found.to_frame()
    named = [
        f"{edge_name(e)} ({with_error(e.patched, e.patched_sem)})"
        for e in frame.head(NAMED).itertuples()
    ]
    return Section(
        "Edges between heads",
        f"When prompts get other task vectors the prediction moves by {with_error(found.total, found.total_sem)} y² (mean "
        f"squared distance). The edges that bring it nearest or take it furthest, each patched alone: {', '.join(named)}. "
        f"Estimates from gradients rank the {len(frame)} edges as patching does with a rank correlation of "
        f"{with_error(found.rank_correlation, found.rank_correlation_sem)}.",
        "An edge goes from what a head writes to the query, key or value of a head in a later layer, which alone then reads "
        f"what the head writes on the other prompts. {n_pairs} pairs of prompts, of the same covariates and noise; ± is over pairs. The estimate is to "
        "first order, by the gradient on the corrupted prompts (EAP). A positive effect is one towards the clean prediction.",
        {"edges": found.plot()},
        {"edges": frame},
    )
