"""Faithfulness of circuits: how much of the model's prediction stays when only some edges between heads are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.patching.edges import (
    COMPONENTS,
    N_PAIRS,
    HeadEdges,
    attribute_edges,
    require_edges,
)
from mechinterp.analysis.patching.pairing import Pair, clean_and_corrupted
from mechinterp.analysis.stats import mean_and_sem, ratio_and_sem, resampled
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Hooks, z_name
from mechinterp.models.hooked.written import written
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

N_SIZES = 12
"""Default number of circuits that are measured."""
AXES = ("input", "layer", "head", "later_layer", "later_head")
Kept = Bool[np.ndarray, "input layer head later_layer later_head"]


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(Result):
    """Faithfulness of the circuits that the first edges of a ranking make.

    f(k) = (m(k) - m(0)) / (m(all) - m(0)), with m minus the squared distance to the full model's prediction when k
    edges are kept and all others carry the outputs of corrupted prompts.
    """

    n_edges: Int[np.ndarray, " size"]
    """Number of edges kept."""
    faithfulness: Float[np.ndarray, " size"]
    """f at each size: 0 without edges, 1 with all."""
    faithfulness_sem: Float[np.ndarray, " size"]
    """Standard error of `faithfulness` over prompts, for this ranking."""
    distance: Float[np.ndarray, " size"]
    """Mean squared distance of the circuit's prediction to the full model's, -m(k); unit y^2."""
    distance_sem: Float[np.ndarray, " size"]
    """Standard error of `distance` over prompts."""
    cpr: float
    """Area under f over the share of edges kept; 1 is the best where f does not exceed 1."""
    cpr_sem: float
    """Bootstrap standard error of `cpr` over prompts."""
    cmd: float
    """Area of |1 - f| over the share of edges kept; 0 is the best."""
    cmd_sem: float
    """Bootstrap standard error of `cmd` over prompts."""

    def __repr__(self) -> str:
        return (
            f"Faithfulness(CPR {self.cpr:.3f} ± {self.cpr_sem:.1g}, CMD {self.cmd:.3f} ± {self.cmd_sem:.1g}, "
            f"{self.n_edges[-1]} edges)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per size of the circuit."""
        return frame_of(self, *with_sem("faithfulness", "distance"), n_edges=self.n_edges)

    def plot(self) -> go.Figure:
        """Faithfulness over the number of edges kept."""
        return figures.lines(
            self.n_edges,
            {"circuit": (self.faithfulness, self.faithfulness_sem)},
            title="Faithfulness of the first edges",
            x_title="number of edges kept",
            y_title="faithfulness (0: no edge, 1: all edges)",
        )


@torch.inference_mode(False)
@torch.no_grad()
def faithfulness(
    source: Source,
    ranking: HeadEdges | pd.DataFrame | None = None,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    sizes: Sequence[int] | None = None,
    n_prompts: int = N_PAIRS,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Faithfulness:
    """Faithfulness of the circuits of the first edges of a ranking, over the number of edges.

    Edges from the embedding, to and from MLPs, and to the output are always kept.

    Args:
        ranking: Result of `attribute_edges`, ranked by the size of the estimate; or a frame with columns layer, head,
            input, later_layer and later_head, the most important edge first, each edge once. None: by
            `attribute_edges` on the same prompts.
        clean: Clean prompts, on which the circuit runs; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors.
        sizes: Numbers of edges to keep; none and all are added. None means twelve, from one edge on.
    Raises:
        ValueError: If the model is not one of this package, or has one layer; if the ranking names other edges or
            misses one.
    Source:
        Mueller et al. 2025, "MIB", arXiv 2504.13151 (faithfulness, CPR and CMD). They keep edges of language models; the
        graph here has heads only.
    See also:
        `attribute_edges`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("sparse-h4-noise0.1-s0")
        >>> found = faithfulness(checkpoint, n_prompts=4)
        >>> found.faithfulness[[0, -1]].tolist()
        [0.0, 1.0]
    """
    hooked = predictor_of(source).hooked
    require_edges(hooked)
    if _input_name(0, "q") not in hooked.model.hook_dict:
        raise ValueError(
            f"circuits of edges need a model with the hook {_input_name(0, 'q')}, got {type(hooked.model).__name__} "
            f"without it."
        )
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    pair = Pair.of(hooked, clean, corrupted, None)
    if ranking is None:
        ranking = attribute_edges(source, clean, corrupted)
    places = _places(ranking, hooked.n_layers, hooked.n_heads)
    asked = np.geomspace(1, len(places), N_SIZES).round() if sizes is None else np.array(sizes)
    counts = np.unique([0, len(places), *asked]).astype(int)
    if counts[0] < 0 or counts[-1] > len(places):
        raise ValueError(f"sizes must lie in 0 to {len(places)}, the number of edges, got {asked}.")
    values = []
    for count in progress(counts.tolist(), "keeping edges"):
        kept = np.zeros((len(COMPONENTS), *(hooked.n_layers, hooked.n_heads) * 2), dtype=bool)
        kept[tuple(places[:count].T)] = True
        values.append(pair.metric(circuit_output(pair, kept)).double().numpy(force=True))
    metric = np.stack(values, 1)  # [prompt, size]
    gained = metric - metric[:, :1]
    found = ratio_and_sem(gained, gained[:, -1])
    cpr, cmd = _areas(found[0], counts)
    shares = resampled(len(gained))
    again = np.array([_areas(mean / mean[-1], counts) for mean in shares @ gained])
    cpr_sem, cmd_sem = again.std(axis=0, ddof=1)
    return Faithfulness(
        counts, *found, *mean_and_sem(-metric), cpr, float(cpr_sem), cmd, float(cmd_sem)
    )


def circuit_output(pair: Pair, kept: Kept) -> Tensor:
    """Output of the model on the clean prompts if every other edge carries the corrupted output of its first head."""
    n_layers = pair.hooked.n_layers
    model: Any = pair.hooked.model
    names = [z_name(layer) for layer in range(n_layers)]
    _, cache = model.run_with_cache(pair.corrupted, names_filter=names)
    corrupted = [written(model, layer, cache[name]) for layer, name in enumerate(names)]
    moved: list[Tensor] = []  # corrupted minus current output of each head, by layer

    def note(z: Tensor, hook: object, *, layer: int) -> None:
        moved.append(corrupted[layer] - written(model, layer, z))

    def shifted(own: Tensor, hook: object, *, index: int, layer: int) -> Tensor:
        if not moved:
            return own
        cut = torch.from_numpy(~kept[index, :layer, :, layer]).flatten(0, 1).to(own)
        every = torch.cat(moved, dim=2)
        return own + einsum(every, cut, "batch pos head d, head later -> batch pos later d")

    hooks: Hooks = []
    for layer in range(n_layers):
        for index, component in enumerate(COMPONENTS):
            shift = partial(shifted, index=index, layer=layer)
            hooks.append((_input_name(layer, component), shift))
        hooks.append((names[layer], partial(note, layer=layer)))
    before = model.cfg.use_split_qkv_input
    model.set_use_split_qkv_input(True)
    try:
        return model.run_with_hooks(pair.clean, fwd_hooks=hooks)
    finally:
        model.set_use_split_qkv_input(before)


def _input_name(layer: int, component: str) -> str:
    """Name of the hook on the stream that each head of a layer reads as its query, key or value."""
    return f"blocks.{layer}.attn.hook_{component}_input"


def _places(
    ranking: HeadEdges | pd.DataFrame, n_layers: int, n_heads: int
) -> Int[np.ndarray, "edge axis"]:
    """Indices of the edges, the most important first."""
    if isinstance(ranking, HeadEdges):
        frame = ranking.to_frame()
        ranking = frame.sort_values("estimate", key=np.abs, ascending=False, kind="stable")
    if missing := [name for name in AXES if name not in ranking]:
        raise ValueError(f"ranking must have a column {missing[0]}, got {', '.join(ranking)}.")
    inputs = ranking["input"].map({name: n for n, name in enumerate(COMPONENTS)})
    places = ranking.assign(input=inputs)[list(AXES)].to_numpy()
    heads = list(product(range(n_layers), range(n_heads)))
    edges = {
        (index, *one, *two)
        for index in range(len(COMPONENTS))
        for one, two in product(heads, heads)
        if one[0] < two[0]
    }
    if len(places) != len(edges) or set(map(tuple, places.tolist())) != edges:
        raise ValueError(f"ranking must name each of the {len(edges)} edges of the model once.")
    return places.astype(int)


def _areas(
    found: Float[np.ndarray, " size"], counts: Int[np.ndarray, " size"]
) -> tuple[float, float]:
    """Areas under f and under |1 - f| over the share of edges kept."""
    share = counts / counts[-1]
    return float(np.trapezoid(found, share)), float(np.trapezoid(np.abs(1 - found), share))
