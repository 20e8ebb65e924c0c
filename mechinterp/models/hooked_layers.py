"""Somebody else's layered models with TransformerLens' hooks, so that the analyses of heads take them.

What is computed is what `mechinterp.models.layered` computes, with a hook point on the stream before and after
each layer and on what its heads have averaged; hooks carry the names and shapes of HookedTransformer.
"""

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechinterp.models.adapter import HookedPredictor
from mechinterp.models.layered import Layer, LayeredModel


class HookedLayers(HookedRootModule):
    """The layers of a layered model, from stream to stream.

    Example:
        >>> import torch
        >>> from mechinterp.models.layered import LayerLaw, encoder_model
        >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> tensors = {f"layers.0.{name}": weight for name, weight in layer.state_dict().items()}
        >>> law = LayerLaw(n_heads=2, activation="relu", norm_first=False)
        >>> hooked = HookedLayers(encoder_model(tensors, law, d_x=5, d_y=1))
        >>> _, cache = hooked.run_with_cache(torch.zeros(4, 41, 6))
        >>> tuple(cache["blocks.0.attn.hook_z"].shape)
        (4, 41, 2, 3)
    """

    def __init__(self, model: LayeredModel) -> None:
        super().__init__()
        self.reads = model.reads
        self.blocks = nn.ModuleList([HookedLayer(layer) for layer in model.layers])
        self.setup()

    def forward(
        self,
        stream: Float[Tensor, "batch pos width"],
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Float[Tensor, "batch pos width"]:
        """The stream after the layers.

        Args:
            start_at_layer: First layer to run; the stream given is the one before it.
            stop_at_layer: Return the stream before this layer instead.
        """
        reads = self.reads(stream.shape[1])
        # A hook may write in place: into this copy, not into the caller's stream.
        stream = stream.clone()
        for block in self.blocks[start_at_layer:stop_at_layer]:
            stream = block(stream, reads)
        return stream


class HookedHeads(nn.Module):
    """The heads of a layer, with a hook point on z."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]

    def forward(
        self, stream: Float[Tensor, "batch pos width"], reads: Tensor | None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """z: what each head has averaged."""
        return self.hook_z(self.layer.heads(stream, reads))


class HookedLayer(nn.Module):
    """A layer with a hook point on its input and on its output."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.attn = HookedHeads(layer)
        self.hook_resid_pre = HookPoint()  # [batch, pos, width]
        self.hook_resid_post = HookPoint()

    def forward(
        self, stream: Float[Tensor, "batch pos width"], reads: Tensor | None
    ) -> Float[Tensor, "batch pos width"]:
        """The stream after the layer."""
        stream = self.hook_resid_pre(stream)
        return self.hook_resid_post(self.layer.after_heads(stream, self.attn(stream, reads)))


def layered_predictor(model: LayeredModel) -> HookedPredictor:
    """A layered model as the analyses of heads take it; it predicts as `model.predict` does."""
    return HookedPredictor(
        model=HookedLayers(model),
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        embed=model.stream,
        read=lambda stream: model.read(stream[:, -1]),
    )
