"""The attention model with TransformerLens' hooks, for looking inside.

It computes what `mechinterp.models.functional` computes, at every position and with a hook point at
every step; weights, hooks and `run_with_cache` carry the names and shapes of HookedTransformer. Tokens
are vectors (x, y), and the read-out is the y entries of the residual stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.attention import Attention, Block, HookedConfig, Unembed
from mechinterp.models.deep import DeepWeights
from mechinterp.models.functional import AttentionWeights, unmerged


class ICLTransformer(HookedRootModule):
    """Attention-only transformer on tokens (x, y): no norm, no positions, and no embedding unless d_model is given.

    The weights start at zero: load them, or fill them with `torch.nn.init`. With one layer the x columns
    of W_O stay zero in training, since only y is read.

    Args:
        d_head: Width of a head; None stands for d_model.
        scale: Factor on the scores; None stands for 1/sqrt(d_head).
        score: Attention weights are f(s_i) / sum_j f(s_j); "softmax", "1+tanh", "1+Cx" or "(1+Cx)^2".
            Linear attention has C s_i ("linear") or C s_i over the number of keys ("linear/L"). With
            context_only also "relu/L", C max(s_i, 0) over the number of keys.
        score_slope: The constant C.
        attend_to_self: Whether a position is among its own keys.
        biases: Whether the layers have b_Q, b_K, b_V and b_O.
        merged_qk: Whether a head has one parameter W_QK, [head, d_model, d_model], in place of W_Q W_K^T; W_Q is
            then that, and W_K the identity.
        context_only: Whether every position reads all positions but the last, in place of those before it.
        d_model: Width of the residual stream, with a read-in W_in [d_x + d_y, d_model] and a read-out W_U
            [d_model, d_y]; None: the tokens are the stream, of width d_x + d_y, and its y entries the read-out.
        n_ctx: Number of positions that tools of TransformerLens may count on; no limit for the model.
    Raises:
        ValueError: If a size is below 1, the score is unknown, or merged heads have another d_head than d_model.
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
        *,
        d_x: int,
        d_y: int,
        n_heads: int,
        n_layers: int = 1,
        d_head: int | None = None,
        scale: float | None = None,
        score: str = "softmax",
        score_slope: float = 1.0,
        attend_to_self: bool = False,
        biases: bool = False,
        merged_qk: bool = False,
        context_only: bool = False,
        d_model: int | None = None,
        n_ctx: int = 1024,
    ) -> None:
        super().__init__()
        if d_head is None:
            d_head = d_x + d_y if d_model is None else d_model
        self.cfg = HookedConfig(
            d_x=d_x,
            d_y=d_y,
            n_heads=n_heads,
            n_layers=n_layers,
            d_head=d_head,
            scale=max(d_head, 1) ** -0.5 if scale is None else scale,
            score=score,
            score_slope=score_slope,
            attend_to_self=attend_to_self,
            biases=biases,
            merged_qk=merged_qk,
            context_only=context_only,
            width=d_model,
            n_ctx=n_ctx,
        )
        if d_model is not None:
            self.W_in = nn.Parameter(torch.zeros(d_x + d_y, d_model))
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        self.blocks = nn.ModuleList([Block(self.cfg) for _ in range(n_layers)])
        self.ln_final = nn.Identity()
        self.unembed = Unembed(self.cfg)
        self._numbered: Tensor | None = None
        self._follow_weights()
        self.setup()

    @classmethod
    def from_weights(
        cls, weights: AttentionWeights | DeepWeights, *, task: TaskConfig
    ) -> "ICLTransformer":
        """A model with a copy of these weights, in their dtype, in evaluation mode; `DeepWeights` make it context-only.

        Raises:
            ValueError: If weights and task differ in d_x or d_y.
        """
        for name in ("d_x", "d_y"):
            one, other = getattr(weights, name), getattr(task, name)
            if one != other:
                raise ValueError(f"weights and task must have one {name}, got {one} and {other}.")
        state = weights.parameters
        own: dict[str, Any]
        if isinstance(weights, DeepWeights):
            own = {"context_only": True, "n_layers": weights.n_layers}
            own["d_model"] = None if weights.W_in is None else weights.d_model
        else:
            own = {name: getattr(weights, name) for name in ("attend_to_self", "merged_qk")}
            own["biases"] = weights.b_O is not None
            for name in {"W_O", "b_O"} & set(state):
                state[name] = nn.functional.pad(state[name], (task.d_x, 0))
            state = {f"blocks.0.attn.{name}": tensor for name, tensor in state.items()}
        model = cls(
            d_x=task.d_x,
            d_y=task.d_y,
            n_heads=weights.n_heads,
            d_head=weights.W_Q.shape[-1],
            scale=weights.scale,
            score=weights.score,
            score_slope=weights.score_slope,
            # Tools of TransformerLens ask for fewer than n_ctx positions; a prompt has context_length + 1.
            n_ctx=task.context_length + 2,
            **own,
        )
        model.to(weights.W_Q)
        model.load_state_dict(state)
        return model.eval()

    @property
    def weights(self) -> AttentionWeights:
        """A copy of the weights of a one-layer model, without the x columns of W_O, which nothing reads.

        Raises:
            ValueError: If the model has more than one layer, or a read-in: `deep_weights` has those.
        """
        if self.cfg.n_layers != 1:
            raise ValueError(f"weights as one layer need n_layers = 1, got {self.cfg.n_layers}.")
        if self.cfg.width is not None:
            raise ValueError(
                f"weights as one layer need a model without a read-in, got d_model = {self.cfg.width}."
            )
        state = self._layers[0].state_dict()
        for name in {"W_O", "b_O"} & set(state):
            state[name] = state[name][..., self.cfg.d_x :]
        return AttentionWeights(
            **unmerged({name: tensor.detach().clone() for name, tensor in state.items()}),
            scale=self.cfg.scale,
            score=self.cfg.score,
            score_slope=self.cfg.score_slope,
            attend_to_self=self.cfg.attend_to_self,
            merged_qk=self.cfg.merged_qk,
        )

    @property
    def deep_weights(self) -> DeepWeights:
        """A copy of the weights of a context-only model.

        Raises:
            ValueError: If the model is not context-only, or has biases or merged heads.
        """
        cfg = self.cfg
        for name, needed in (("context_only", True), ("biases", False), ("merged_qk", False)):
            if getattr(cfg, name) != needed:
                raise ValueError(f"{name} must be {needed} for deep_weights, got {not needed}.")
        stacked = {name: getattr(self, name).detach() for name in ("W_Q", "W_K", "W_V", "W_O")}
        reading = {} if cfg.width is None else {"W_in": self.W_in, "W_U": self.W_U}
        return DeepWeights(
            **stacked,
            **{name: tensor.detach().clone() for name, tensor in reading.items()},
            d_y=cfg.d_y,
            scale=cfg.scale,
            score=cfg.score,
            score_slope=cfg.score_slope,
        )

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
            input: Tokens [batch, pos, d_x + d_y], or the residual stream before `start_at_layer`, [batch,
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
            resid = self.hook_embed(resid if self.cfg.width is None else resid @ self.W_in)
        for block in self.blocks[start_at_layer:stop_at_layer]:
            resid = block(resid)
        if stop_at_layer is not None:
            return resid
        return None if return_type is None else self.unembed(self.ln_final(resid))

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y."""
        return self(prompts.tokens)[:, -1]

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
        """Sum of b_O over the layers before this one, and with `mlp_input` over this one too."""
        before = self._layers[: layer + int(mlp_input)]
        biases = [attn.b_O for attn in before if self.cfg.biases]
        return torch.stack([torch.zeros_like(self.W_U[:, 0]), *biases]).sum(0)

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
        """Turn `hook_resid_mid` and `hook_mlp_out`, hooks of an MLP that adds zeros, on or off."""
        self.cfg.use_zero_mlp = use_zero_mlp

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn `hook_mlp_in` on or off; it fires only with `set_use_zero_mlp(True)`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in
