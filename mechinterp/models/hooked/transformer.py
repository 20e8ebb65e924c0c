"""The attention model with TransformerLens' hooks, for interpretability work.

`hook_map` is the table of its hook points. Weights, hooks and `run_with_cache` have the names and shapes of HookedTransformer. Tokens are vectors. The read-out
selects the y entries of the residual stream unless the model has weights for it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.blocks import Block, LayerNorm, Unembed
from mechinterp.models.hooked.config import SWITCHES, HookedConfig, zeros
from mechinterp.models.hooked.linear_module import LinearModule
from mechinterp.models.hooked.masks import lock_of
from mechinterp.models.hooked.shared import SharedWeights
from mechinterp.models.hooked.transformer_names import HookedTransformerNames
from mechinterp.models.layers import ACTIVATION_FUNCTIONS, affine, tokens_of
from mechinterp.models.weights import Weights


class ICLTransformer(HookedTransformerNames):
    """Transformer on vector tokens; by default attention only, without norm, position or embedding.

    Weights start at zero, norm weights at one: load them or fill them with `torch.nn.init`. In a single attention layer
    on tokens (x, y) the x columns of W_O stay zero in training, since only y is read.

    Args:
        model: Architecture: layers, heads, scores, masks, norms, MLPs.
        scale: Factor on the scores; None: 1/sqrt(d_head).
        n_ctx: Number of positions that TransformerLens' tools may assume; the model itself has no limit.
    Raises:
        ValueError: If a size is below 1, or merged heads have a d_head other than d_model.
    See also:
        `load`, `mechinterp.models.hooked.masks.mask_heads`.
    Example:
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
        >>> task = TaskConfig(context_length=40)
        >>> model = ICLTransformer.from_weights(debiased_gradient_step(0.88, 0.02, d_x=5), task=task)
        >>> prompts = draw_prompts(task, 8, generator=generator_for(0, "eval", 0), dtype=torch.float64)
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
            self.W_in = nn.Parameter(zeros(model.d_read_in or cfg.d_token, cfg.d_model))
            self.b_in = nn.Parameter(zeros(cfg.d_model)) if model.biases else None
        if model.d_read_in is not None:
            self.W_read = nn.Parameter(zeros(cfg.d_token, model.d_read_in))
            self.b_read = nn.Parameter(zeros(model.d_read_in)) if model.biases else None
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if model.n_positions is not None:
            self.pos_embed = nn.ParameterDict(
                {"W_pos": nn.Parameter(zeros(model.n_positions, cfg.d_model))}
            )
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(model.n_layers)])
        self.ln_final = LayerNorm(cfg) if model.final_norm else nn.Identity()
        self.unembed = Unembed(cfg)
        self._table = zeros(0, self.cfg.d_token)
        self._shared = SharedWeights()
        self._follow_weights()
        self.setup()

    @classmethod
    def from_weights(cls, weights: Weights, *, task: TaskConfig) -> "ICLTransformer":
        """Model with a copy of these weights, in their dtype, in evaluation mode.

        Raises:
            ValueError: If weights and task differ in d_x or d_y.
        """
        return cls.sharing(weights.copied(), task=task)

    @classmethod
    @torch.inference_mode(False)
    def sharing(cls, weights: Weights, *, task: TaskConfig) -> "ICLTransformer":
        """Model whose parameters are these weights: an edit in place of either is an edit of both.

        Raises:
            ValueError: If weights and task differ in d_x or d_y.
        """
        for name in ("d_x", "d_y"):
            one, other = getattr(weights, name), getattr(task, name)
            if one != other:
                raise ValueError(f"weights and task must have one {name}, got {one} and {other}.")
        # TransformerLens' tools use fewer than n_ctx positions; a prompt has context_length + 1 pairs.
        n_pos = (task.context_length + 1) * (2 if weights.model.layout == "in_turn" else 1)
        model = cls(weights.model, d_x=task.d_x, d_y=task.d_y, scale=weights.scale, n_ctx=n_pos + 1)
        model.to(weights.W_V)
        model._shared.adopt(model, weights)
        return model.eval()

    @property
    def weights(self) -> Weights:
        """Weights of the model, detached and stacked over layers. They share memory with the parameters: an edit in place
        of either is an edit of both.

        Raises:
            ValueError: If a weight is no parameter of the model or the read-out of a model without `d_model` was
                edited, so that the weights would not give the model's predictions; or they are on the meta device.
        """
        if any(parameter.is_meta for parameter in self.parameters()):
            raise ValueError(
                "the weights must be numbers, got a model on the meta device; model.load_state_dict(state, assign=True) gives it some."
            )
        cfg = self.cfg
        if cfg.model.d_model is None:
            self.unembed.require_selection()
        return self._shared.of(self, cfg.model, d_x=cfg.d_x, d_y=cfg.d_y, scale=cfg.scale)

    def forward(
        self,
        input: object,
        return_type: str | None = "logits",
        *,
        labels: Float[Tensor, "batch d_y"] | None = None,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Read-out at every position, in units of y; at the last position it predicts y_query.

        Args:
            input: Prompts; or tokens [batch, pos, d_token]; or the residual stream before `start_at_layer`,
                [batch, pos, d_model]; or token numbers from `numbered` or `to_tokens`, [batch, pos].
            return_type: "logits" [batch, pos, d_y], the "loss", "both", or None to return nothing.
            labels: Target of the loss, in units of y; None: y_query of the prompts (tokens do not contain it).
            attention_mask: Only ones are accepted, since prompts have no padding.
            start_at_layer: First layer to run. None: from the tokens, with read-in and `hook_embed`.
            stop_at_layer: Return the residual stream before this layer instead, [batch, pos, d_model].
        Raises:
            ValueError: If the input has a wrong shape or dtype, the return type is unknown, a loss has no labels,
                or a mask contains zeros.
        """
        if isinstance(input, Prompts):
            labels = input.y_query if labels is None else labels
            input = self.tokens(input)
        input = self._vectors(input)
        width = self.cfg.d_token if start_at_layer is None else self.cfg.d_model
        if input.ndim != 3 or input.shape[-1] != width or input.dtype != self.cfg.dtype:
            raise ValueError(
                f"input must be {self.cfg.dtype} of shape [batch, pos, {width}], "
                f"got {input.dtype} of shape {list(input.shape)}."
            )
        _require_asked(return_type, labels, attention_mask)
        if self.hook_embed.bwd_hooks and torch.is_grad_enabled() and not input.requires_grad:
            # A gradient at hook_embed needs an input that requires one; prompts do not.
            input = input.detach().requires_grad_()
        # The model gets a copy, so that in-place hooks do not change the caller's prompts.
        resid = input.clone()
        if start_at_layer is None:
            resid = self._embed(resid)
        for block in self.blocks[start_at_layer:stop_at_layer]:
            resid = block(resid)
        if stop_at_layer is not None:
            return resid
        if return_type is None:
            return None
        logits = self.unembed(self.ln_final(resid))
        if labels is None or return_type == "logits":
            return logits
        loss = self.loss_fn(logits, labels)
        return loss if return_type == "loss" else (logits, loss)

    def loss_fn(
        self, logits: Float[Tensor, "batch pos d_y"], labels: Float[Tensor, "batch d_y"]
    ) -> Float[Tensor, ""]:
        """Mean over prompts of the squared error at the query, summed over responses, in units of y^2."""
        return (logits[:, -1] - labels).square().sum(-1).mean()

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y."""
        return self(self.tokens(prompts))[:, -1]

    def tokens(self, prompts: Prompts) -> Float[Tensor, "batch pos d_token"]:
        """Tokens of the prompts in the model's layout: pairs (x, y), or x and y in turn.

        Raises:
            ValueError: If the prompts have another d_x or d_y, or more positions than the model.
        """
        return tokens_of(prompts, self.cfg.model, d_x=self.cfg.d_x, d_y=self.cfg.d_y)

    @torch.inference_mode(False)
    def as_linear_module(self) -> LinearModule:
        """Module of the same function, with q, k, v, o, MLPs, read-in and read-out as nn.Linear, and no hooks.

        The weights are copies, [heads side by side], for tools that decompose or replace linear layers.

        Raises:
            ValueError: If the model is recurrent.
        Example:
            >>> from mechinterp import load
            >>> module = load("checkpoints/softmax-h2-s0").model.as_linear_module()
            >>> module.blocks[0].attn.q
            Linear(in_features=6, out_features=12, bias=False)
        """
        return LinearModule(self)

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> "ICLTransformer":
        """As nn.Module.to; tools for HookedTransformer pass `print_details`, and nothing is printed here."""
        return super().to(*args, **kwargs)

    def _embed(self, tokens: Tensor) -> Tensor:
        model = self.cfg.model
        if model.d_read_in is not None:
            tokens = ACTIVATION_FUNCTIONS[model.activation](
                affine(tokens, self.W_read, self.b_read)
            )
        resid = self.hook_embed(
            tokens if model.d_model is None else affine(tokens, self.W_in, self.b_in)
        )
        if model.n_positions is None:
            return resid
        n_pos = resid.shape[1]
        if n_pos > model.n_positions:
            raise ValueError(
                f"input must have at most n_positions = {model.n_positions}, got {n_pos}."
            )
        # A copy, so that a hook that writes in place does not change the weights.
        positions = self.pos_embed["W_pos"][:n_pos].repeat(len(resid), 1, 1)
        return resid + self.hook_pos_embed(positions)

    def to_tokens(self, prompts: object) -> Int[Tensor, "batch pos"]:
        """Token numbers of prompts, for tools that need [batch, pos]; integer tensors are returned unchanged.

        The model stores the tokens for its lifetime, or until the end of a surrounding `numbered` block.

        Raises:
            ValueError: If the argument has no tokens, for example text.
        """
        tokens = self.tokens(prompts) if isinstance(prompts, Prompts) else prompts
        if isinstance(tokens, Tensor) and not tokens.is_floating_point():
            return tokens
        if not (isinstance(tokens, Tensor) and tokens.ndim == 3):
            kind = type(prompts).__name__
            raise ValueError(
                f"There is no text to read: to_tokens and numbered take prompts or vectors [batch, pos, d_token], got {kind}."
            )
        start, added = len(self._table), tokens.detach().flatten(0, 1)
        self._table = torch.cat([self._table, added]) if start else added.clone()
        return torch.arange(start, len(self._table), device=added.device).view(tokens.shape[:2])

    @contextmanager
    def numbered(
        self, *prompts: Prompts | Float[Tensor, "_batch _pos d_token"]
    ) -> Iterator[tuple[Int[Tensor, "_batch _pos"], ...]]:
        """Context with token numbers for prompts of vectors, for tools that take the last axis for positions.

        Within the block the model accepts these integers, one per token, in place of the tokens.
        """
        with lock_of(self):
            before = len(self._table)
            try:
                yield tuple(self.to_tokens(each) for each in prompts)
            finally:
                self._table = self._table[:before]

    def _vectors(self, input: object) -> Tensor:
        """Input with token numbers replaced by the tokens."""
        if not isinstance(input, Tensor):
            raise ValueError(
                f"There is no text to read: input must be prompts, vectors or numbers of `numbered`, got {type(input).__name__}."
            )
        if input.is_floating_point() or not len(self._table):
            return input
        if input.min() < 0 or input.max() >= len(self._table):
            raise ValueError(
                f"numbers must be those of to_tokens or `with model.numbered(tokens)`, up to {len(self._table) - 1} now, "
                f"got {input.min()} to {input.max()}."
            )
        return self._table[input]

    @torch.inference_mode(False)
    def _apply(self, fn: Callable, recurse: bool = True) -> "ICLTransformer":
        super()._apply(fn, recurse)._follow_weights()
        self._table = fn(self._table)
        self._shared.follow(self)
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module.load_state_dict; `weights` follow, with assign=True too."""
        loaded = super().load_state_dict(*args, **kwargs)
        self._follow_weights()
        self._shared.follow(self)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """State without the shared weights: a copy of the model shares nothing with the model."""
        return vars(self) | {"_shared": SharedWeights()}

    def _follow_weights(self) -> None:
        weights = self._layers[0].W_Q
        self.cfg.device, self.cfg.dtype = str(weights.device), weights.dtype


def _require_asked(
    return_type: str | None, labels: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Refuse return types, labels and masks that the model does not support."""
    if return_type not in ("logits", "loss", "both", None):
        raise ValueError(
            f"return_type must be 'logits', 'loss', 'both' or None, got {return_type!r}."
        )
    if return_type in ("loss", "both") and labels is None:
        raise ValueError(
            f"return_type={return_type!r} needs labels=prompts.y_query, which tokens do not hold, or prompts as input."
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask must be 1 everywhere, prompts have no padding; a hook on hook_attn_scores masks keys."
        )


def hook_map(model: ICLTransformer) -> pd.DataFrame:
    """One row per hook point: its name, its shape, and the setter that turns it on ("" if it always fires).

    Example:
        >>> from mechinterp.config import ModelConfig
        >>> frame = hook_map(ICLTransformer(ModelConfig(n_heads=2), d_x=5, d_y=1))
        >>> frame.loc[frame["name"] == "blocks.0.attn.hook_pattern", "shape"].item()
        ['batch', 2, 'pos', 'pos']
    """
    # Two sizes that no model has mark the batch and pos axes; the meta device needs no memory.
    names = {10_007: "batch", 10_009: "pos"}
    twin = copy.deepcopy(model).to("meta")
    twin.reset_hooks(including_permanent=True)
    if twin.cfg.model.n_positions is not None:
        twin.cfg.model = replace(twin.cfg.model, n_positions=max(names))
        W_pos = torch.empty(max(names), twin.cfg.d_model, dtype=twin.cfg.dtype, device="meta")
        twin.pos_embed["W_pos"] = torch.nn.Parameter(W_pos)
    inputs = torch.empty(*names, twin.cfg.d_token, dtype=twin.cfg.dtype, device="meta")
    for switch in SWITCHES:
        getattr(twin, f"set_{switch}")(False)
    rows: dict[str, dict[str, object]] = {}
    for switch in ("", *SWITCHES):
        setter = switch and f"set_{switch}"
        if setter:
            # hook_mlp_in may need the zero MLP; hook_attn_in and the split inputs exclude each other.
            twin.set_use_attn_in(False)
            getattr(twin, setter)(True)
        _, cache = twin.run_with_cache(inputs)
        for name in twin.hook_dict.keys() & cache.keys():
            values = cache[name]
            shape = [names.get(size, size) for size in values.shape]
            rows.setdefault(name, {"name": name, "shape": shape, "switch": setter})
    return pd.DataFrame([rows[name] for name in twin.hook_dict])
