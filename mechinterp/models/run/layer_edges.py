"""Effects of edges between the heads of any model without recurrent layers, computed from its weights.

Each run starts at the layer that reads. The outputs of its heads are computed once for all runs in which one head's query,
key or value reads the change, and the later layers run for these side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.memory import CHUNK
from mechinterp.models.run.attend import attend
from mechinterp.models.run.layer import LAST, Layer, read_in, read_out
from mechinterp.models.weights import Weights

_BY_HEAD = "part batch row head d, head d d_model -> part head batch row d_model"


@dataclass(frozen=True, eq=False)
class _Pass:
    """Forward pass over all prompts."""

    streams: list[Tensor]
    """Stream before each layer, and at the query after the last."""
    projections: list[tuple[Tensor, Tensor, Tensor]]
    """Queries, keys and values of each layer."""
    z: list[Tensor]
    added: list[Tensor]
    """Sum of the heads' outputs of each layer."""


@dataclass(frozen=True, eq=False)
class LayerEdges:
    """Runs of a model on clean and corrupted prompts, in which one reader gets what a sender writes on the clean ones.

    It has the methods of `linear_edges.EdgeMaps`.
    """

    weights: Weights
    clean: Float[Tensor, "batch pos d_token"]
    corrupted: Float[Tensor, "batch pos d_token"]

    @cached_property
    def layers(self) -> list[Layer]:
        return [Layer(self.weights, n, attend, LAST) for n in range(self.weights.n_layers)]

    @cached_property
    def moved(self) -> list[Float[Tensor, "batch _pos d_model"]]:
        """Change of what the input and each head write, from the corrupted to the clean prompts: the input, then layer by
        layer; that of the last layer at the query alone."""
        clean, corrupted = self._pass(read_in(self.weights, self.clean)), self._corrupted
        moved = [clean.streams[0] - corrupted.streams[0]]
        for z, other, W_O in zip(clean.z, corrupted.z, self.weights.W_O, strict=True):
            moved += [(z - other)[:, :, head] @ W_O[head] for head in range(self.weights.n_heads)]
        return moved

    @property
    def output(self) -> Float[Tensor, "batch 1 d_y"]:
        """Output at the query on the corrupted prompts."""
        return read_out(self.weights, self._corrupted.streams[-1])

    def patched(self, sender: int, layer: int) -> Float[Tensor, "part head batch 1 d_y"]:
        """Outputs of corrupted runs in which the query (part 0), key or value of one head of a layer reads the change of a
        sender.

        Args:
            sender: Number of the sender in `moved`.
            layer: Layer of the heads that read; the number of layers means the output, one run of part 0 and head 0.
        """
        weights, run, moved = self.weights, self._corrupted, self.moved[sender]
        if layer == weights.n_layers:
            return read_out(weights, run.streams[-1] + moved[:, LAST])[None, None]
        own, stream = self.layers[layer], run.streams[layer]
        old, new = run.projections[layer], own.projections(own.read(stream + moved))
        z = [own.averages(new[0], *old[1:]), own.averages(old[0], new[1], old[2])]
        z.append(own.averages(*old[:2], new[2]))
        change = einsum(torch.stack(z) - run.z[layer], weights.W_O[layer], _BY_HEAD)
        outputs = []
        for some in change.flatten(0, 1).split(max(1, CHUNK // len(stream))):
            added = (run.added[layer] + some).flatten(0, 1)
            after = own.after(stream.repeat(len(some), 1, 1), added)
            for later in self.layers[layer + 1 :]:
                after = later.after(after, later.written(later.z(after)))
            outputs.append(read_out(weights, after))
        return torch.cat(outputs).unflatten(0, (3, weights.n_heads, len(stream)))

    def estimates(
        self, metric: Callable[[Tensor], Float[Tensor, " batch"]], share: float
    ) -> Iterator[tuple[int, Float[Tensor, "sender part head batch"]]]:
        """First-order changes of a metric of the output, by layer that reads, for all senders before this layer.

        Args:
            metric: Function from outputs [batch, 1, d_y] to one number per prompt.
            share: Gradients are those at corrupted + share (clean - corrupted).
        """
        weights = self.weights
        with torch.enable_grad():
            tokens = torch.lerp(self.corrupted, self.clean, share).requires_grad_()
            run = self._pass(read_in(weights, tokens))
            total = metric(read_out(weights, run.streams[-1])).sum()
            wanted = [each for three in run.projections for each in three]
            *outer, at_end = torch.autograd.grad(total, [*wanted, run.streams[-1]])
        for layer, own in enumerate(self.layers):
            gradient = self._at_stream(own, run.streams[layer], outer[3 * layer : 3 * layer + 3])
            # Senders before the layer: the input and the heads of the layers before.
            moved = torch.stack(self.moved[: 1 + layer * weights.n_heads])
            names = "sender batch pos d, part batch pos head d -> sender part head batch"
            yield layer, einsum(moved, gradient, names)
        at_query = torch.stack([each[:, LAST] for each in self.moved])
        yield weights.n_layers, (at_query * at_end).sum((2, 3))[:, None, None]

    def _at_stream(
        self, own: Layer, stream: Tensor, outer: list[Tensor]
    ) -> Float[Tensor, "part batch pos head d_model"]:
        """Gradients at the stream through the query, key or value of each head alone, from those at what they compute."""
        matrices = (getattr(self.weights, f"W_{name}")[own.number] for name in "QKV")
        names = "batch row head d, head d_model d -> batch row head d_model"
        q, k, v = (einsum(at, W, names) for at, W in zip(outer, matrices, strict=True))
        at_query = torch.zeros_like(k)
        at_query[:, own.rows] = q
        gradient = torch.stack([at_query, k, v])
        with torch.enable_grad():
            copies = stream.detach()[:, :, None].expand_as(gradient).clone().requires_grad_()
            through = (own.read(copies) * gradient).sum()
            return torch.autograd.grad(through, copies)[0]

    @cached_property
    def _corrupted(self) -> _Pass:
        return self._pass(read_in(self.weights, self.corrupted))

    def _pass(self, stream: Float[Tensor, "batch pos d_model"]) -> _Pass:
        streams, projections, every_z, added = [stream], [], [], []
        for layer in self.layers:
            projections.append(layer.projections(layer.read(streams[-1])))
            every_z.append(layer.averages(*projections[-1]))
            added.append(layer.written(every_z[-1]))
            streams.append(layer.after(streams[-1], added[-1]))
        return _Pass(streams, projections, every_z, added)
