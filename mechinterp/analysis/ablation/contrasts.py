"""Sets of masks, and the weighted sums of a metric under them that answer a question.

The rise of one head is (masked) - (full); the interaction of two heads (both) - (one) - (other) + (full); a Shapley value a
weighted sum over all subsets of heads. All contrasts of a row are measured on the same prompts, so that errors are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head, z_name
from mechinterp.models.run.ways import Predictor

MOST_SUBSET_HEADS = 12
"""Largest number of heads of which all subsets are masked."""


@dataclass(frozen=True)
class Mask:
    """Parts that are masked together; without any it is the full model."""

    heads: tuple[Head, ...] = ()
    mlps: tuple[int, ...] = ()
    """Layers whose MLP is masked."""
    at: int | None = None
    """Position of the prompt, from 0; None: all positions."""


FULL = Mask()
Contrast = Mapping[Mask, float]
"""Weight of the metric under each mask."""
Rows = dict[tuple, dict[str, Contrast]]
"""Contrasts by name, for each row; a row is named by what it is about, such as a layer and a head."""


def rise(mask: Mask) -> Contrast:
    """Metric with the mask minus that of the full model.

    Example:
        >>> [*rise(Mask(((0, 1),))).values()]
        [1.0, -1.0]
    """
    full = Mask(at=mask.at)
    return {} if mask == full else {mask: 1.0, full: -1.0}


def head_name(head: Head) -> str:
    """Name of a head, such as L0H1."""
    return f"L{head[0]}H{head[1]}"


def kept_name(heads: Sequence[Head]) -> str:
    """Names of the heads of a subset, or "none"."""
    return " ".join(map(head_name, heads)) or "none"


def heads_alone(predictor: Predictor) -> Rows:
    """Each head alone."""
    return {head: {"rise": rise(Mask((head,)))} for head in predictor.heads}


def blocks(predictor: Predictor) -> Rows:
    """Each head in all runs of its block."""
    together = (tuple(predictor.hooked.in_all_runs([head])) for head in predictor.heads)
    each = enumerate(dict.fromkeys(together))
    n_heads = predictor.n_heads
    return {divmod(n, n_heads): {"rise": rise(Mask(heads))} for n, heads in each}


def pairs(predictor: Predictor) -> Rows:
    """Every two heads together, and what that costs beyond both alone.

    Raises:
        ValueError: If the model has one head.
    """
    if len(predictor.heads) < 2:
        raise ValueError("what='pairs' needs a model of two heads or more, got one head.")
    rows: Rows = {}
    for one, other in combinations(predictor.heads, 2):
        both = Mask((one, other))
        alone = {Mask((one,)): -1.0, Mask((other,)): -1.0}
        interaction = {both: 1.0, **alone, FULL: 1.0}
        rows[head_name(one), head_name(other)] = {"rise": rise(both), "interaction": interaction}
    return rows


def layers(predictor: Predictor) -> Rows:
    """All heads of each layer."""
    numbers = range(predictor.n_layers)
    heads = {n: tuple(head for head in predictor.heads if head[0] == n) for n in numbers}
    return {(n,): {"rise": rise(Mask(heads[n]))} for n in numbers}


def mlps(predictor: Predictor) -> Rows:
    """The MLP of each layer.

    Raises:
        ValueError: If the model consists of attention alone.
    """
    if predictor.attention_only:
        raise ValueError("what='mlps' needs a model with MLPs, got one of attention alone.")
    return {(n,): {"rise": rise(Mask(mlps=(n,)))} for n in range(predictor.n_layers)}


def subsets(predictor: Predictor) -> Rows:
    """Every subset of the heads that stays, the empty one first.

    Raises:
        ValueError: If there are more than `MOST_SUBSET_HEADS` heads.
    """
    rows: Rows = {}
    for kept in all_subsets(predictor.heads, predictor.heads):
        mask = without(predictor.heads, kept)
        rows[kept_name(kept), len(kept)] = {"risk": {mask: 1.0}, "rise": rise(mask)}
    return rows


def shapley(predictor: Predictor) -> Rows:
    """Fall of the metric due to a head, averaged over all orders of adding heads.

    Raises:
        ValueError: If there are more than `MOST_SUBSET_HEADS` heads.
    """
    heads = predictor.heads
    rows: Rows = {}
    for head in heads:
        rest = [other for other in heads if other != head]
        value: dict[Mask, float] = {}
        for kept in all_subsets(rest, heads):
            weight = 1 / (len(heads) * comb(len(rest), len(kept)))
            value[without(heads, kept)] = weight
            value[without(heads, (*kept, head))] = -weight
        rows[head] = {"shapley": value}
    return rows


def all_subsets(heads: Sequence[Head], of: Sequence[Head]) -> list[tuple[Head, ...]]:
    """Subsets by size; within a size those with the first heads come first.

    Args:
        of: All heads of the model, whose number is limited.
    """
    if len(of) > MOST_SUBSET_HEADS:
        raise ValueError(f"n_heads must be <= {MOST_SUBSET_HEADS} for all subsets, got {len(of)}.")
    return [kept for size in range(len(heads) + 1) for kept in combinations(heads, size)]


def without(heads: Sequence[Head], kept: Sequence[Head]) -> Mask:
    """Mask of all heads but the kept ones."""
    return Mask(tuple(head for head in heads if head not in kept))


def steps(order: Sequence[Head]) -> Rows:
    """Heads masked one after another, in this order."""
    rows: Rows = {}
    for n, head in enumerate([*order, None]):
        mask = Mask(tuple(order[:n]))
        following = "" if head is None else head_name(head)
        rows[len(order) - n, following] = {"risk": {mask: 1.0}, "rise": rise(mask)}
    return rows


def positions(predictor: Predictor, prompts: Prompts) -> Rows:
    """Each head at one position at a time.

    In models of this package nothing reads the last layer but the prediction at the query, so that its heads have no effect
    at other positions and are not run there.
    """
    names = [z_name(layer) for layer in range(predictor.n_layers)]
    _, every_z = predictor.hooked.activations(prompts[:2], names)
    sizes = [z.shape[1] for z in every_z]
    last = predictor.n_layers - 1
    named = position_names(max(sizes), prompts.x.shape[1])
    rows: Rows = {}
    for layer, head in predictor.heads:
        for at, name in enumerate(named):
            idle = predictor.weights is not None and layer == last and at < max(sizes) - 1
            runs = at < sizes[layer] and not idle
            mask = Mask(((layer, head),) if runs else (), at=at)
            rows[layer, head, name] = {"rise": rise(mask)}
    return rows


def position_names(n_pos: int, n_pairs: int) -> tuple[str, ...]:
    """Names of the positions: pairs, or x and y in turn; numbers for anything else.

    Example:
        >>> position_names(3, 2), position_names(4, 1)
        (('1', '2', 'query'), ('x1', 'y1', 'x2', 'y2'))
    """
    if n_pos == n_pairs + 1:
        return (*(str(n + 1) for n in range(n_pairs)), "query")
    if n_pos in (2 * n_pairs + 1, 2 * n_pairs + 2):
        return tuple(f"{'xy'[n % 2]}{n // 2 + 1}" for n in range(n_pos))
    return tuple(map(str, range(n_pos)))
