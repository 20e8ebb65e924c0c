"""HookedTransformer's names and switches, and errors for parts that need a vocabulary."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.utilities import composition_scores

from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.blocks import Unembed
from mechinterp.models.hooked.checked_hooks import CheckedHooks
from mechinterp.models.hooked.config import HookedConfig

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores


ABSENT = {
    "W_E": "tokens are vectors, read in by W_in where the model has a d_model, as they are where not",
    "W_E_pos": "tokens are vectors, read in by W_in, to which pos_embed.W_pos is added where there is one",
    "W_pos": "the model has no positions (ModelConfig.n_positions is None)",
    "tokenizer": "prompts have no text; sample_prompts draws them, numbered gives their tokens numbers",
    "to_string": "prompts have no text; model.tokens(prompts) are the vectors that the model reads",
    "to_str_tokens": "prompts have no text; model.tokens(prompts) are the vectors that the model reads",
    "to_single_token": "responses have no names, they are numbered from 0 to d_y - 1",
    "to_single_str_token": "responses have no names, they are numbered from 0 to d_y - 1",
    "get_token_position": "prompts have no text; pair i is token i, the query is the last",
    "generate": "the model gives a prediction, not a next token; predict(prompts) is it",
    "fold_value_biases": "weights are not processed",
    "refactor_factored_attn_matrices": "weights are not processed",
}
"""Parts of HookedTransformer that this model lacks, most of them for want of a vocabulary, and what to use instead."""
PROCESSING = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)
"""Weight processing that HookedTransformer does when it loads; refused here."""


class HeadLabels(list[str]):
    """Names of the heads, e.g. L0H1. Calling the list returns it, as in TransformerLens 3."""

    def __call__(self) -> "HeadLabels":
        return self


def _stacked(name: str) -> property:
    """Property with one weight of all heads and layers, [layer, head, ...]."""
    return property(lambda model: torch.stack([getattr(attn, name) for attn in model._layers]))


class HookedTransformerNames(CheckedHooks):
    """Names and switches of HookedTransformer, for a model with a config, blocks and a read-out."""

    cfg: HookedConfig
    blocks: nn.ModuleList
    unembed: Unembed

    @property
    def _layers(self) -> list[Attention]:
        return [block.attn for block in self.blocks]  # type: ignore[misc]

    W_Q = _stacked("W_Q")
    W_K = _stacked("W_K")
    W_V = _stacked("W_V")
    W_O = _stacked("W_O")

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
        """Weights and read-out under HookedTransformer's names; merged heads are given as W_Q and W_K, too."""
        scores = {
            f"blocks.{layer}.attn.{name}": getattr(attn, name)
            for layer, attn in enumerate(self._layers)
            for name in ("W_Q", "W_K")
        }
        read_out = {"unembed.W_U": self.W_U, "unembed.b_U": self.b_U}
        return dict(self.named_parameters()) | scores | read_out

    @property
    def all_head_labels(self) -> HeadLabels:
        cfg = self.cfg
        return HeadLabels(f"L{i}H{j}" for i in range(cfg.n_layers) for j in range(cfg.n_heads))

    @property
    def n_params_total(self) -> int:
        """Number of weights of the whole model."""
        return sum(parameter.numel() for parameter in self.parameters())

    def all_composition_scores(self, mode: str) -> "CompositionScores":
        """Composition score of each pair of heads in different layers, [layer, head, layer, head].

        |OV_from M| / (|OV_from| |M|) with Frobenius norms; M is the later head's QK ("Q"), QK^T ("K") or OV ("V").

        Raises:
            ValueError: If the mode is not one of Q, K, V.
        """
        # Imported here, because it loads TransformerLens' Bridge, which takes a second.
        from transformer_lens.model_bridge.composition_scores import CompositionScores

        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode must be one of Q, K, V, got {mode!r}.")
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        layers = torch.arange(self.cfg.n_layers, device=self.cfg.device)
        later = layers[:, None, None, None] < layers[:, None]
        scores = composition_scores(self.OV, right, broadcast_dims=True).where(later, 0)
        return CompositionScores(scores, layers.tolist(), self.all_head_labels)

    def tokens_to_residual_directions(
        self, tokens: int | Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes d_model"]:
        """Directions of the residual stream that the read-out maps to these responses, numbered from 0."""
        return self.W_U.mT[tokens]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of b_O and b_out over all layers before this one; `mlp_input` adds this layer's b_O."""
        biases = [torch.zeros_like(self.W_U[:, 0])]
        if self.cfg.model.biases:
            biases += [attn.b_O for attn in self._layers[: layer + int(mlp_input)]]
            if include_mlp_biases and not self.cfg.attn_only:
                biases += [block.mlp.b_out for block in self.blocks[:layer]]  # type: ignore[union-attr, misc]
        return torch.stack(biases).sum(0)

    def blocks_with(self, submodule: str) -> list[tuple[int, nn.Module]]:
        """Blocks that have a submodule of this name, with their layers."""
        return [(i, block) for i, block in enumerate(self.blocks) if hasattr(block, submodule)]

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Switch `hook_result`, the output of each head, on or off."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Switch `hook_attn_in`, one copy of the input per head, on or off.

        Raises:
            ValueError: If the split inputs (a copy each for query, key and value) are on.
        """
        if use_attn_in and self.cfg.use_split_qkv_input:
            raise ValueError("use_attn_in excludes use_split_qkv_input; turn that off first.")
        self.cfg.use_attn_in = use_attn_in

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Switch `hook_q_input`, `hook_k_input` and `hook_v_input` on or off.

        Raises:
            ValueError: If `hook_attn_in` (one copy for all three) is on.
        """
        if use_split_qkv_input and self.cfg.use_attn_in:
            raise ValueError("use_split_qkv_input excludes use_attn_in; turn that off first.")
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_zero_mlp(self, use_zero_mlp: bool) -> None:
        """Switch the hooks of an MLP that adds zeros on or off, for a model without MLPs."""
        self.cfg.use_zero_mlp = use_zero_mlp

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Switch `hook_mlp_in` on or off. A model without MLPs also needs `set_use_zero_mlp(True)`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def load_and_process_state_dict(
        self, state_dict: dict[str, Tensor], **processing: bool
    ) -> None:
        """Load the weights unchanged; HookedTransformer's processing is not supported.

        Folding norms or biases and centring weights assume attention rows that sum to 1, a stream that a norm reads, or
        a softmax over words. These models have none of these in general.

        Raises:
            ValueError: If a processing option is on or unknown.
        """
        _require_unprocessed(processing)
        self.load_state_dict(state_dict)

    def process_weights_(self, **processing: bool) -> None:
        """Keep the weights unchanged; see `load_and_process_state_dict`.

        Raises:
            ValueError: If a processing option is on or unknown.
        """
        _require_unprocessed(processing)

    def __getattr__(self, name: str) -> Any:
        if name == "W_pos" and self.cfg.model.n_positions is not None:
            return self.pos_embed["W_pos"]
        if name in ABSENT:
            raise AttributeError(f"There is no {name}: {ABSENT[name]}.")
        return super().__getattr__(name)


def _require_unprocessed(asked: dict[str, bool]) -> None:
    """Refuse processing options that are on, and unknown options."""
    for name, wanted in asked.items():
        if wanted or name not in PROCESSING:
            raise _not_done(f"{name}={wanted}")


def _not_done(asked: str) -> ValueError:
    return ValueError(
        f"weights are not processed: {', '.join(PROCESSING)} must be False or left out, got {asked}."
    )
