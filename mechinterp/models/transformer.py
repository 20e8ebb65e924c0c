"""The attention model with TransformerLens' hooks, for looking inside.

Weights, hooks and `run_with_cache` carry the names and shapes of HookedTransformer. Tokens are vectors, and the
read-out is the y entries of the residual stream unless the model has weights for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.attention import Attention
from mechinterp.models.blocks import Block, LayerNorm, Unembed
from mechinterp.models.deep import DeepWeights
from mechinterp.models.functional import AttentionWeights
from mechinterp.models.hooked_config import HookedConfig
from mechinterp.models.tokens import tokens_of
from mechinterp.models.units import plus
from mechinterp.models.weights import Weights, as_weights


class ICLTransformer(HookedRootModule):
    """Transformer on tokens that are vectors: by default attention alone, without norm, position or embedding.

    The weights start at zero, those of norms at one: load them, or fill them with `torch.nn.init`. With one layer
    of attention on tokens (x, y) the x columns of W_O stay zero in training, since only y is read.

    Args:
        model: The architecture: layers, heads, scores, masks, norms, MLPs.
        scale: Factor on the scores; None stands for 1/sqrt(d_head).
        n_ctx: Number of positions that tools of TransformerLens may count on; no limit for the model.
    Raises:
        ValueError: If a size is below 1, or merged heads have another d_head than d_model.
    Example:
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> from mechinterp.models.constructions import debiased_gradient_step
        >>> task = TaskConfig(context_length=40)
        >>> model = ICLTransformer.from_weights(debiased_gradient_step(0.88, 0.02, d_x=5), task=task)
        >>> prompts = sample_prompts(task, 8, generator=generator_for(0, "eval", 0), dtype=torch.float64)
        >>> y_hat, cache = model.run_with_cache(prompts.tokens)
        >>> tuple(cache["pattern", 0].shape)
        (8, 2, 41, 41)
        >>> torch.allclose(y_hat[:, -1], model.predict(prompts))
        True
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        d_x: int,
        d_y: int,
        scale: float | None = None,
        n_ctx: int = 1024,
    ) -> None:
        super().__init__()
        width = model.head_width(d_x, d_y)
        self.cfg = HookedConfig(
            model, d_x, d_y, scale=max(width, 1) ** -0.5 if scale is None else scale, n_ctx=n_ctx
        )
        cfg = self.cfg
        if model.d_model is not None:
            self.W_in = nn.Parameter(torch.zeros(cfg.d_token, cfg.d_model))
            self.b_in = nn.Parameter(torch.zeros(cfg.d_model)) if model.biases else None
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if model.n_positions is not None:
            self.pos_embed = nn.ParameterDict(
                {"W_pos": nn.Parameter(torch.zeros(model.n_positions, cfg.d_model))}
            )
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(model.n_layers)])
        self.ln_final = LayerNorm(cfg) if model.final_norm else nn.Identity()
        self.unembed = Unembed(cfg)
        self._numbered: Tensor | None = None
        self._follow_weights()
        self.setup()

    @classmethod
    def from_weights(
        cls, weights: Weights | AttentionWeights | DeepWeights, *, task: TaskConfig
    ) -> "ICLTransformer":
        """A model with a copy of these weights, in their dtype, in evaluation mode.

        Raises:
            ValueError: If weights and task differ in d_x or d_y.
        """
        weights = as_weights(weights)
        for name in ("d_x", "d_y"):
            one, other = getattr(weights, name), getattr(task, name)
            if one != other:
                raise ValueError(f"weights and task must have one {name}, got {one} and {other}.")
        # Tools of TransformerLens ask for fewer than n_ctx positions; a prompt has context_length + 1 pairs.
        n_pos = (task.context_length + 1) * (2 if weights.model.layout == "in_turn" else 1)
        model = cls(weights.model, d_x=task.d_x, d_y=task.d_y, scale=weights.scale, n_ctx=n_pos + 1)
        model.to(weights.tensors["blocks.0.attn.W_V"])
        model.load_state_dict(dict(weights.tensors))
        return model.eval()

    @property
    def weights(self) -> Weights:
        """A copy of the weights."""
        cfg = self.cfg
        tensors = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        return Weights(cfg.model, cfg.d_x, cfg.d_y, tensors, cfg.scale)

    def forward(
        self,
        input: Tensor,
        return_type: str | None = "logits",
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Float[Tensor, "batch pos d_out"] | None:
        """The read-out at every position, in units of y; it predicts y_query at the last one.

        Args:
            input: Tokens [batch, pos, d_token], or the residual stream before `start_at_layer`, [batch,
                pos, d_model]. Within `numbered`, the tokens' numbers; [batch, pos].
            return_type: "logits", or None to return nothing.
            start_at_layer: First layer to run; tokens are read in, and `hook_embed` fires, only when it is None.
            stop_at_layer: Return the residual stream before this layer instead, [batch, pos, d_model].
        Raises:
            ValueError: If the input has another shape or dtype than the model's, or the return type is unknown.
        """
        if self._numbered is not None and not input.is_floating_point():
            input = self._numbered[input]
        width = self.cfg.d_token if start_at_layer is None else self.cfg.d_model
        if input.ndim != 3 or input.shape[-1] != width or input.dtype != self.cfg.dtype:
            raise ValueError(
                f"input must be {self.cfg.dtype} of shape [batch, pos, {width}], "
                f"got {input.dtype} of shape {list(input.shape)}."
            )
        if return_type not in ("logits", None):
            raise ValueError(f"return_type must be 'logits' or None, got {return_type!r}.")
        if self.hook_embed.bwd_hooks and torch.is_grad_enabled() and not input.requires_grad:
            # Whoever asks for the gradient at hook_embed gets one, though prompts carry none.
            input = input.detach().requires_grad_()
        # A hook may write in place: into this copy, not into the caller's prompts.
        resid = input.clone()
        if start_at_layer is None:
            resid = self._embed(resid)
        for block in self.blocks[start_at_layer:stop_at_layer]:
            resid = block(resid)
        if stop_at_layer is not None:
            return resid
        return None if return_type is None else self.unembed(self.ln_final(resid))

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y."""
        return self(self.tokens(prompts))[:, -1]

    def tokens(self, prompts: Prompts) -> Float[Tensor, "batch pos d_token"]:
        """The prompts as the model reads them: pairs (x, y), or x and y in turn.

        Raises:
            ValueError: If the prompts are of another d_x or d_y, or longer than the model has positions for.
        """
        return tokens_of(prompts, self.cfg.model, d_x=self.cfg.d_x, d_y=self.cfg.d_y)

    def _embed(self, tokens: Tensor) -> Tensor:
        model = self.cfg.model
        resid = self.hook_embed(
            tokens if model.d_model is None else plus(tokens @ self.W_in, self.b_in)
        )
        if model.n_positions is None:
            return resid
        n_pos = resid.shape[1]
        if n_pos > model.n_positions:
            raise ValueError(
                f"input must have at most n_positions = {model.n_positions}, got {n_pos}."
            )
        # A copy, so that a hook that writes in place does not reach the weights.
        positions = self.pos_embed["W_pos"][:n_pos].repeat(len(resid), 1, 1)
        return resid + self.hook_pos_embed(positions)

    @contextmanager
    def numbered(
        self, *prompts: Float[Tensor, "_batch _pos d_token"]
    ) -> Iterator[tuple[Int[Tensor, "_batch _pos"], ...]]:
        """Stand-ins for prompts of vectors, for tools that read the number of positions off the last axis.

        Within the block the model takes these whole numbers, one for each token, in place of the tokens.
        """
        sizes = [prompt.shape[0] * prompt.shape[1] for prompt in prompts]
        ids = torch.arange(sum(sizes), device=prompts[0].device).split(sizes)
        before, self._numbered = self._numbered, torch.cat([p.flatten(0, 1) for p in prompts])
        try:
            yield tuple(n.view(p.shape[:2]) for n, p in zip(ids, prompts, strict=True))
        finally:
            self._numbered = before

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ActivationCache | dict[str, Tensor]]:
        """The output, and the activations by hook name; arguments are those of HookedTransformer."""
        output, cache = super().run_with_cache(
            *model_args, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if return_cache_object:
            cache = ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)
        return output, cache

    def _apply(self, fn: Callable, recurse: bool = True) -> "ICLTransformer":
        super()._apply(fn, recurse)._follow_weights()
        return self

    def _follow_weights(self) -> None:
        weights = self._layers[0].W_Q
        self.cfg.device, self.cfg.dtype = str(weights.device), weights.dtype

    @property
    def _layers(self) -> list[Attention]:
        return [block.attn for block in self.blocks]  # type: ignore[misc]

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack([attn.W_Q for attn in self._layers])

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack([attn.W_K for attn in self._layers])

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack([attn.W_V for attn in self._layers])

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return torch.stack([attn.W_O for attn in self._layers])

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T, [layer, head, d_model, d_model]. As in TransformerLens, without the scale."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O, [layer, head, d_model, d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_y"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_y"]:
        return self.unembed.b_U

    def tl_parameters(self) -> dict[str, Tensor]:
        """Weights and read-out by their names in HookedTransformer, those of merged heads as W_Q and W_K, too."""
        scores = {
            f"blocks.{layer}.attn.{name}": getattr(attn, name)
            for layer, attn in enumerate(self._layers)
            for name in ("W_Q", "W_K")
        }
        read_out = {"unembed.W_U": self.W_U, "unembed.b_U": self.b_U}
        return dict(self.named_parameters()) | scores | read_out

    @property
    def all_head_labels(self) -> list[str]:
        cfg = self.cfg
        return [f"L{layer}H{head}" for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]

    def to_tokens(self, prompts: Tensor) -> Int[Tensor, "batch pos"]:
        """The numbers themselves, for tools that ask; a ValueError for prompts of vectors."""
        if prompts.is_floating_point():
            raise ValueError(
                "tokens must be whole numbers; `with model.numbered(tokens)` gives them."
            )
        return prompts

    def tokens_to_residual_directions(
        self, tokens: int | Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes d_model"]:
        """Directions of the residual stream that are read as these responses, by number from 0."""
        return self.W_U.mT[tokens]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of b_O and of the MLPs' b_out over the layers before this one, with `mlp_input` b_O of this one too."""
        biases = [torch.zeros_like(self.W_U[:, 0])]
        if self.cfg.biases:
            biases += [attn.b_O for attn in self._layers[: layer + int(mlp_input)]]
            if include_mlp_biases and not self.cfg.attn_only:
                biases += [block.mlp.b_out for block in self.blocks[:layer]]  # type: ignore[union-attr, misc]
        return torch.stack(biases).sum(0)

    def blocks_with(self, submodule: str) -> list[tuple[int, nn.Module]]:
        """Blocks that have a submodule of this name, with their numbers."""
        return [(i, block) for i, block in enumerate(self.blocks) if hasattr(block, submodule)]

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Turn `hook_result`, the output of every head, on or off."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Turn `hook_q_input`, `hook_k_input` and `hook_v_input` on or off."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_zero_mlp(self, use_zero_mlp: bool) -> None:
        """Turn the hooks of an MLP that adds zeros on or off, in a model that has none."""
        self.cfg.use_zero_mlp = use_zero_mlp

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn `hook_mlp_in` on or off; without MLPs it fires only with `set_use_zero_mlp(True)`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in
