"""Effects of edges from the weights of a model: a linear stack is a map of its tokens, other models run layer by layer."""

from functools import reduce

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.patching.graph import COMPONENTS, Node, layer_of
from mechinterp.analysis.patching.pairing import GraphPair, shares_of
from mechinterp.models.run.layer_edges import LayerEdges
from mechinterp.models.run.linear_edges import EdgeMaps
from mechinterp.models.run.ways import Predictor
from mechinterp.models.weights import Weights
from mechinterp.progress import progress


def weights_alone(predictor: Predictor, nodes: str) -> Weights | None:
    """Weights, if the effects follow from them; None for hooks, recurrent layers, MLPs among the nodes, or no edges."""
    weights = None if predictor.is_hooked else predictor.weights
    if weights is None or weights.model.norm == "after" or weights.model.recurrent:
        return None
    between_heads = nodes == "heads" and weights.n_layers > 1
    without_mlps = nodes == "all" and weights.model.d_mlp is None
    return weights if between_heads or without_mlps else None


@torch.no_grad()
def by_weights(
    pair: GraphPair, weights: Weights, ig_steps: int
) -> tuple[
    Float[np.ndarray, "prompt sender receiver"], Float[np.ndarray, "prompt sender receiver"]
]:
    """Estimated and patched effects from the weights, for each prompt; NaN where there is no edge. A linear stack is a map
    of its tokens."""
    tokens, edges = (pair.clean, pair.corrupted), pair.edges
    linear = weights.model.stack == "linear"
    maps = EdgeMaps.of(weights, *tokens) if linear else LayerEdges(weights, *tokens)
    estimate, patched = (np.full((len(pair.clean), *edges.shape), np.nan) for _ in range(2))
    full, gradients = pair.metric(maps.output), _estimates_by_layer(pair, maps, ig_steps)
    places = [_place(node, weights.n_layers) for node in pair.receivers]
    for sender in progress(range(len(pair.senders)), "patching edges"):
        node = pair.senders[sender]
        layer, _, head = _place(node, weights.n_layers)
        own = 0 if node.head is None else 1 + layer * weights.n_heads + head
        outputs: dict[int, Tensor] = {}
        for receiver in np.flatnonzero(edges[sender]):
            layer, *place = places[receiver]
            if layer not in outputs:
                outputs[layer] = maps.patched(own, layer)
            change = pair.metric(outputs[layer][*place]) - full
            patched[:, sender, receiver] = change.double().numpy(force=True)
            estimate[:, sender, receiver] = gradients[layer][own, *place].double().numpy(force=True)
    return estimate, patched


def _estimates_by_layer(
    pair: GraphPair, maps: EdgeMaps | LayerEdges, ig_steps: int
) -> dict[int, Float[Tensor, "sender part head batch"]]:
    """First-order effects by layer that reads, from gradients averaged over points between corrupted and clean prompts."""
    shares = shares_of(ig_steps)
    found = [dict(maps.estimates(pair.metric, share)) for share in shares]
    return {
        layer: reduce(torch.add, [each[layer] for each in found]) / len(shares)
        for layer in found[0]
    }


def _place(node: Node, n_layers: int) -> tuple[int, int, int]:
    """Layer of a node of heads, part (query, key, value) and head as in `EdgeMaps.patched`; the number of layers for the
    output."""
    if node.head is None:
        return n_layers, 0, 0
    part = node.name.rpartition(".")[2]
    return layer_of(node.hook), COMPONENTS.index(part) if part in COMPONENTS else 0, node.head
