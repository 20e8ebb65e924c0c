"""Effects of edges between the heads of a linear stack, computed as maps of the tokens of two kinds of prompts.

In a patched run, a node reads on corrupted prompts what another node writes on clean ones. Given the second moment of the
context, every stream of that run is a linear map of the corrupted and the clean tokens. The cost does not grow with the context.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.models.run.linear import NEAR, stack_bytes
from mechinterp.models.run.linear_pass import factor_on_scores, linear_heads, query_key_value
from mechinterp.models.weights import Weights

Map = Float[Tensor, "batch column d_model"]
"""Map from the columns of the tokens to a stream."""


@dataclass(frozen=True, eq=False)
class EdgeMaps:
    """Runs of a linear stack on clean and corrupted prompts, as maps of the columns of both kinds of tokens."""

    weights: Weights
    at_query: Float[Tensor, "batch 1 column"]
    moment: Float[Tensor, "batch column column"]
    """Second moment of the columns over the context, times the factor on the scores."""
    clean: Float[Tensor, "1 column d_model"]
    """Map to the stream before the first layer on the clean prompts."""
    corrupted: Float[Tensor, "1 column d_model"]

    @classmethod
    def of(
        cls,
        weights: Weights,
        clean: Float[Tensor, "batch pos d_token"],
        corrupted: Float[Tensor, "batch pos d_token"],
    ) -> "EdgeMaps":
        """Maps for two kinds of prompts, whose last token is the query.

        Raises:
            ValueError: If the scores are not linear.
        """
        d_x, d_y, n = weights.d_x, weights.d_y, clean.shape[1] - 1
        # Columns that both kinds of prompts have in common stand once.
        same = d_x if torch.equal(clean[..., :d_x], corrupted[..., :d_x]) else 0
        columns = torch.cat([corrupted, clean[..., same:]], 2)
        context = columns[:, :-1]
        W_in, _ = weights.reading
        own = d_x + d_y - same
        return cls(
            weights,
            columns[:, -1:],
            factor_on_scores(weights, n) * (context.mT @ context),
            torch.cat([W_in[:same], W_in.new_zeros(own, W_in.shape[1]), W_in[same:]])[None],
            pad(W_in, (0, 0, 0, own))[None],
        )

    @cached_property
    def moved(self) -> list[Map]:
        """Change of what the input and each head write, from the corrupted to the clean prompts: the input, then layer by
        layer."""
        runs = [self._run(start) for start in (self.clean, self.corrupted)]
        moved = [(self.clean - self.corrupted).expand(len(self.moment), -1, -1)]
        for layer, W_O in enumerate(self.weights.W_O):
            change = self._split(runs[0][1][layer] - runs[1][1][layer])
            moved += [change[:, head] @ W_O[head] for head in range(self.weights.n_heads)]
        return moved

    @property
    def output(self) -> Float[Tensor, "batch 1 d_y"]:
        """Output at the query on the corrupted prompts."""
        return self.at_query @ self._corrupted[0][-1] @ self.weights.reading[1]

    def patched(self, sender: int, layer: int) -> Float[Tensor, "part head batch 1 d_y"]:
        """Outputs of corrupted runs in which the query (part 0), key or value of one head of a layer reads the change of a
        sender.

        Args:
            sender: Number of the sender in `moved`.
            layer: Layer of the heads that read; the number of layers means the output, one run of part 0 and head 0.
        """
        _, W_U = self.weights.reading
        T = self._corrupted[0]
        if layer == self.weights.n_layers:
            return (self.at_query @ (T[-1] + self.moved[sender]) @ W_U)[None, None]
        change = self._read_by_heads(self.moved[sender], layer)
        if layer == self.weights.n_layers - 1:
            return (self.at_query @ T[-1] + change) @ W_U
        n_parts, n_heads, batch = change.shape[:3]
        together = max(1, NEAR // (2 * batch * stack_bytes(self.weights, 1)))
        runs = [
            self._end((T[layer + 1] + some).flatten(0, 1), layer + 1)
            for some in change.flatten(0, 1).split(together)
        ]
        return (torch.cat(runs) @ W_U).unflatten(0, (n_parts, n_heads, batch))

    def estimates(
        self, metric: Callable[[Tensor], Float[Tensor, " batch"]], share: float
    ) -> Iterator[tuple[int, Float[Tensor, "sender part head batch"]]]:
        """First-order changes of a metric of the output, by layer that reads, for all senders before this layer.

        Args:
            metric: Function from outputs [batch, 1, d_y] to one number per prompt.
            share: Gradients are those at corrupted + share (clean - corrupted).
        """
        _, W_U = self.weights.reading
        with torch.enable_grad():
            start = torch.lerp(self.corrupted, self.clean, share).requires_grad_()
            T, _, read = self._run(start)
            output = self.at_query @ T[-1] @ W_U
            *at_heads, at_end = torch.autograd.grad(metric(output).sum(), [*read, T[-1]])
        n_heads = self.weights.n_heads
        for layer, gradient in enumerate(at_heads):
            # Senders before the layer: the input and the heads of the layers before.
            moved = torch.stack(self.moved[: 1 + layer * n_heads])
            along = ((moved @ query_key_value(self.weights, layer)) * gradient).sum(2)
            effects = along.unflatten(2, (3, n_heads, -1)).sum(-1)
            yield layer, effects.permute(0, 2, 3, 1)
        to_output = (torch.stack(self.moved) * at_end).sum((2, 3))
        yield self.weights.n_layers, to_output[:, None, None]

    @cached_property
    def _corrupted(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return self._run(self.corrupted)

    def _run(self, start: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Maps to the stream before each layer and after the last, and to z, and to queries, keys and values of each
        layer, heads side by side."""
        T, z, read = [start.expand(len(self.moment), -1, -1)], [], []
        for layer, W_O in enumerate(self.weights.W_O):
            read.append(T[-1] @ query_key_value(self.weights, layer))
            q, k, v = map(self._split, read[-1].chunk(3, dim=-1))
            own = q @ (k.mT @ (self.moment[:, None] @ v))
            z.append(own.transpose(1, 2).flatten(2))
            T.append(T[-1] + z[-1] @ W_O.flatten(0, 1))
        return T, z, read

    def _read_by_heads(
        self, moved: Map, layer: int
    ) -> Float[Tensor, "part head batch _row d_model"]:
        """Change of what each head of a layer writes if its query, key or value alone reads a change of the stream: a map, or
        in the last layer the one row of the query."""
        W, last = query_key_value(self.weights, layer), layer == self.weights.n_layers - 1
        own, new = self._corrupted[2][layer], moved @ W
        (q, k, v), (dq, dk, dv) = (map(self._split, each.chunk(3, dim=-1)) for each in (own, new))
        if last:
            q, dq = (self.at_query[:, None] @ each for each in (q, dq))
        moment = self.moment[:, None]
        Mv = moment @ v
        z = torch.stack([dq @ (k.mT @ Mv), q @ (dk.mT @ Mv), q @ (k.mT @ (moment @ dv))])
        names = "part batch head column d, head d d_model -> part head batch column d_model"
        return einsum(z, self.weights.W_O[layer], names)

    def _end(self, T: Map, layer: int) -> Float[Tensor, "run 1 d_model"]:
        """Stream at the query after the last layer, from maps before a layer; several runs of the prompts lie side by
        side."""
        weights = self.weights
        times = len(T) // len(self.moment)
        moment, query = (each.repeat(times, 1, 1) for each in (self.moment, self.at_query))
        for number in range(layer, weights.n_layers - 1):
            z = linear_heads(weights, number, T, moment)
            T = T + z @ weights.W_O[number].flatten(0, 1)
        stream = query @ T
        q, k, v = map(self._split, (T @ query_key_value(weights, -1)).chunk(3, dim=-1))
        z = (query[:, None] @ q @ k.mT) @ moment[:, None] @ v
        return stream + z.transpose(1, 2).flatten(2) @ weights.W_O[-1].flatten(0, 1)

    def _split(self, side_by_side: Tensor) -> Float[Tensor, "batch head _row d_head"]:
        return side_by_side.unflatten(-1, (self.weights.n_heads, -1)).transpose(1, 2)
