"""Faithfulness of circuits: how much of the model's prediction stays when only some edges are kept."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.patching.edges import N_PAIRS, EdgeEffects, attribute_edges
from mechinterp.analysis.patching.pairing import Pair, clean_and_corrupted, hooks_of, written_at
from mechinterp.analysis.stats import mean_and_sem, ratio_and_sem, resampled
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Hooks
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import progress

N_SIZES = 12
"""Default number of circuits that are measured."""


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
    ranking: EdgeEffects | pd.DataFrame | None = None,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    nodes: str = "heads",
    sizes: Sequence[int] | None = None,
    n_prompts: int = N_PAIRS,
    seed: int = 0,
) -> Faithfulness:
    """Faithfulness of the circuits of the first edges of a ranking, over the number of edges.

    Between heads, what comes from the input and from MLPs and what goes to MLPs and to the output is always kept.

    Args:
        ranking: Result of `attribute_edges`, ranked by the size of the estimate; or a frame with columns "from" and "to"
            such as "L0H1" and "L2H3.v", the most important edge first, each edge once. None: by `attribute_edges` on the
            same prompts.
        clean: Clean prompts, on which the circuit runs; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors.
        nodes: Graph without a ranking: "heads", or "all" for the whole model. A ranking names its own.
        sizes: Numbers of edges to keep; none and all are added. None means twelve, from one edge on.
    Raises:
        ValueError: If the model is not one of this package, or has one layer; if the ranking names other edges or
            misses one.
    Source:
        Mueller et al. 2025, "MIB", arXiv 2504.13151 (faithfulness, CPR and CMD). Their graphs are those of nodes="all".
    See also:
        `attribute_edges`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("sparse-h4-noise0.1-s0")
        >>> found = faithfulness(checkpoint, n_prompts=4)
        >>> found.faithfulness[[0, -1]].tolist()
        [0.0, 1.0]
    """
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    if ranking is None:
        ranking = attribute_edges(source, clean, corrupted, nodes=nodes)
    edges = _ranked(ranking)
    nodes = "all" if (edges["to"] == "output").any() else "heads"
    pair = Pair.of(predictor_of(source).hooked, clean, corrupted, nodes=nodes)
    order = _order(edges, pair)
    asked = np.geomspace(1, len(order), N_SIZES).round() if sizes is None else np.array(sizes)
    counts = np.unique([0, len(order), *asked]).astype(int)
    if counts[0] < 0 or counts[-1] > len(order):
        raise ValueError(f"sizes must lie in 0 to {len(order)}, the number of edges, got {asked}.")
    values = []
    for count in progress(counts.tolist(), "keeping edges"):
        kept = np.zeros(pair.edges.shape, dtype=bool)
        kept[tuple(order[:count].T)] = True
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


def circuit_output(pair: Pair, kept: Bool[np.ndarray, "sender receiver"]) -> Tensor:
    """Output of the model on the clean prompts if every edge that is not kept carries what its sender writes on the
    corrupted prompts."""
    model: Any = pair.hooked.model
    writing, reading = hooks_of(pair.senders), defaultdict(list)
    for index, node in enumerate(pair.receivers):
        reading[node.own_input].append(index)
        if node.own_input not in model.hook_dict:
            raise ValueError(
                f"circuits of edges need a model with the hook {node.own_input}, got {type(model).__name__} without it."
            )
    _, cache = model.run_with_cache(pair.corrupted, names_filter=writing)
    corrupted = {name: written_at(model, name, cache[name]) for name in writing}
    moved: list[Tensor] = []  # corrupted minus current output of the senders so far, by hook

    def note(values: Tensor, hook: object, *, name: str) -> None:
        moved.append(corrupted[name] - written_at(model, name, values))

    def shifted(own: Tensor, hook: object, *, receivers: list[int]) -> Tensor:
        if not moved:
            return own
        every = torch.cat(moved, dim=2)
        cut = torch.from_numpy(~kept[: every.shape[2], receivers]).to(own)
        shift = einsum(every, cut, "batch pos sender d, sender reader -> batch pos reader d")
        return own + (shift if own.ndim == 4 else shift[:, :, 0])

    hooks: Hooks = [(name, partial(note, name=name)) for name in writing]
    hooks += [(name, partial(shifted, receivers=some)) for name, some in reading.items()]
    switches = "use_split_qkv_input", "use_hook_mlp_in"
    before = {name: getattr(model.cfg, name) for name in switches}
    try:
        for name in switches:
            getattr(model, f"set_{name}")(True)
        return model.run_with_hooks(pair.clean, fwd_hooks=hooks)
    finally:
        for name, value in before.items():
            getattr(model, f"set_{name}")(value)


def _ranked(ranking: EdgeEffects | pd.DataFrame) -> pd.DataFrame:
    """Edges, the most important first, with the columns "from" and "to"."""
    if isinstance(ranking, EdgeEffects):
        frame = ranking.to_frame()
        return frame.sort_values("estimate", key=np.abs, ascending=False, kind="stable")
    if missing := [name for name in ("from", "to") if name not in ranking]:
        raise ValueError(
            f"ranking must have a column {missing[0]}, got {', '.join(map(str, ranking))}."
        )
    return ranking


def _order(edges: pd.DataFrame, pair: Pair) -> Int[np.ndarray, "edge 2"]:
    """Indices of the senders and receivers of the edges."""
    places = [
        {node.name: index for index, node in enumerate(each)}
        for each in (pair.senders, pair.receivers)
    ]
    ends = zip(edges["from"], edges["to"], strict=True)
    order = [(places[0].get(one), places[1].get(two)) for one, two in ends]
    if len(order) != pair.edges.sum() or set(order) != set(map(tuple, np.argwhere(pair.edges))):
        raise ValueError(
            f"ranking must name each of the {pair.edges.sum()} edges of the model once."
        )
    return np.array(order, dtype=int)


def _areas(
    found: Float[np.ndarray, " size"], counts: Int[np.ndarray, " size"]
) -> tuple[float, float]:
    """Areas under f and under |1 - f| over the share of edges kept."""
    share = counts / counts[-1]
    return float(np.trapezoid(found, share)), float(np.trapezoid(np.abs(1 - found), share))
