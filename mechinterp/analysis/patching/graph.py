"""Graph of a model for patching: senders write into the residual stream, receivers read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mechinterp.models.hooked.masks import mlp_name, resid_name, z_name
from mechinterp.models.hooked.runner import HookedPredictor, class_name

COMPONENTS = ("q", "k", "v")
GRAPHS = ("heads", "all")
"""Values of `nodes`: edges between heads, or edges of the whole model."""


@dataclass(frozen=True)
class Node:
    """A sender (input, head, MLP) or a receiver (query, key or value of a head, MLP, output)."""

    name: str
    """Name such as "input", "L0H1", "L2H3.v", "L0MLP" or "output"."""
    time: int
    """Place in the order of computation. An edge goes from a sender to each receiver of a later time."""
    hook: str
    """Hook on what a sender writes (on z for a head), or on what a receiver computes from the stream."""
    stream: str = ""
    """Hook on the stream that a receiver reads; empty for a head or the input as a sender."""
    head: int | None = None
    """Number of the head in its layer; None for other nodes."""

    @property
    def own_input(self) -> str:
        """Hook on a receiver's own copy of the stream."""
        if self.head is not None:
            return f"{self.hook}_input"
        return self.hook.replace("hook_mlp_out", "hook_mlp_in")


def graph_of(hooked: HookedPredictor, nodes: str) -> tuple[list[Node], list[Node]]:
    """Senders and receivers of a model, in the order of computation.

    Args:
        nodes: "heads" for edges between heads; "all" for those of the whole model.
    Raises:
        ValueError: If `nodes` is another value, there is no edge, the stream is not a sum, or a hook is missing.
    """
    if nodes not in GRAPHS:
        raise ValueError(f"nodes must be one of {', '.join(GRAPHS)}, got {nodes!r}.")
    d_mlp = getattr(hooked.model.cfg, "d_mlp", None)
    last = hooked.stream_name(hooked.n_layers)
    writing, reading = nodes_of(hooked.n_layers, hooked.n_heads, nodes, last, bool(d_mlp))
    _require(hooked, writing, reading)
    return writing, reading


def nodes_of(
    n_layers: int, n_heads: int, nodes: str, last: str, mlps: bool
) -> tuple[list[Node], list[Node]]:
    """Senders and receivers of a model of these sizes that are ends of an edge.

    Args:
        nodes: As for `graph_of`.
        last: Name of the hook on the stream after the last layer.
        mlps: True: the layers have MLPs.
    """
    layers, heads = range(n_layers), range(n_heads)
    senders, receivers = [], []
    for layer, head in product(layers, heads):
        name, time, stream = f"L{layer}H{head}", 2 * layer + 1, resid_name(layer)
        senders.append(Node(name, time, z_name(layer), head=head))
        receivers += [
            Node(f"{name}.{part}", time, f"blocks.{layer}.attn.hook_{part}", stream, head)
            for part in COMPONENTS
        ]
    if nodes == "all":
        senders.append(Node("input", 0, resid_name(0)))
        receivers.append(Node("output", 2 * len(layers) + 1, last, last))
        for layer in layers if mlps else ():
            stream = f"blocks.{layer}.hook_resid_mid"
            mlp = Node(f"L{layer}MLP", 2 * layer + 2, mlp_name(layer), stream)
            senders.append(mlp)
            receivers.append(mlp)
    senders.sort(key=lambda node: node.time)
    receivers.sort(key=lambda node: node.time)
    first = senders[0].time
    writing = [node for node in senders if node.time < receivers[-1].time]
    return writing, [node for node in receivers if node.time > first]


def _require(hooked: HookedPredictor, senders: Sequence[Node], receivers: Sequence[Node]) -> None:
    """Refuse models without edges, with a stream that is not a sum, or without hooks on the nodes.

    Raises:
        ValueError: In these cases.
    """
    if not senders:
        raise ValueError(
            f"model must have at least 2 layers to have edges between heads, got {hooked.n_layers}."
        )
    model = hooked.model
    blocks: Sequence[object] = model.blocks  # type: ignore[assignment]
    if not all(getattr(block, "hook_out_is_single_residual_stream", True) for block in blocks):
        raise ValueError(
            "model must have a residual stream that is the sum of all outputs, got a norm after each layer."
        )
    unfollowed = getattr(model, "unfollowed", {})
    for node in (*senders, *receivers):
        for hook in {node.hook, node.stream} - {"", *model.hook_dict}:
            why = f": {unfollowed[layer_of(hook)]}" if layer_of(hook) in unfollowed else ""
            raise ValueError(
                f"model must have the hook {hook}; this {class_name(model)} has none{why}."
            )


def layer_of(hook: str) -> int:
    """Layer in the name of a hook.

    Example:
        >>> layer_of("blocks.2.attn.hook_z")
        2
    """
    return int(hook.split(".")[1])
