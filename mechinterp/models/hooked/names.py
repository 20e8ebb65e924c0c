"""What HookedTransformer has beside a run: its weights by name, switches of hooks, and what is said of words."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.utilities import composition_scores

from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.blocks import Unembed
from mechinterp.models.hooked.config import HookedConfig
from mechinterp.models.hooked.hooks import CheckedHooks

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores

NO_WORDS = {
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
}
"""What HookedTransformer has for words, and here the way that works."""


PROCESSING = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)
"""What HookedTransformer does to weights as it loads them."""


class HeadLabels(list[str]):
    """Names of the heads; called, as in TransformerLens 3, they give themselves."""

    def __call__(self) -> "HeadLabels":
        return self


def _stacked(name: str) -> property:
    """A weight of the heads of all layers, [layer, head, ...]."""
    return property(lambda model: torch.stack([getattr(attn, name) for attn in model._layers]))


class HookedTransformerNames(CheckedHooks):
    """Names and switches of HookedTransformer, for a model that has a config, blocks and a read-out."""

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
        """Weights and read-out by their names in HookedTransformer, those of merged heads as W_Q and W_K, too."""
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
        """How strongly each head writes into what later heads read, [layer, head, layer, head].

        |OV_from M| / (|OV_from| |M|), Frobenius norms, M the later head's QK ("Q"), QK^T ("K") or OV ("V").

        Raises:
            ValueError: If the mode is another.
        """
        # TransformerLens' Bridge comes with it, which takes a second to load.
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

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Turn `hook_attn_in`, one copy of a head's input for its query, key and value, on or off.

        Raises:
            ValueError: If the split inputs, one copy for each of the three, are on.
        """
        if use_attn_in and self.cfg.use_split_qkv_input:
            raise ValueError("use_attn_in excludes use_split_qkv_input; turn that off first.")
        self.cfg.use_attn_in = use_attn_in

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Turn `hook_q_input`, `hook_k_input` and `hook_v_input` on or off.

        Raises:
            ValueError: If `hook_attn_in`, one copy for the three, is on.
        """
        if use_split_qkv_input and self.cfg.use_attn_in:
            raise ValueError("use_split_qkv_input excludes use_attn_in; turn that off first.")
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_zero_mlp(self, use_zero_mlp: bool) -> None:
        """Turn the hooks of an MLP that adds zeros on or off, in a model that has none."""
        self.cfg.use_zero_mlp = use_zero_mlp

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn `hook_mlp_in` on or off; without MLPs it fires only with `set_use_zero_mlp(True)`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def load_and_process_state_dict(
        self, state_dict: dict[str, Tensor], **processing: bool
    ) -> None:
        """Load the weights as they are; what HookedTransformer does to them besides is not done here.

        Folding norms and biases and centring weights rest on rows of attention that add up to 1, on a stream that
        a norm reads, or on a softmax over words, none of which is given here.

        Raises:
            ValueError: If some processing is asked for.
        """
        _require_unprocessed(processing)
        self.load_state_dict(state_dict)

    def process_weights_(self, **processing: bool) -> None:
        """The weights stay as they are: see `load_and_process_state_dict`.

        Raises:
            ValueError: If some processing is asked for.
        """
        _require_unprocessed(processing)

    def fold_value_biases(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Refused: see `load_and_process_state_dict`.

        Raises:
            ValueError: Always.
        """
        raise _not_done("fold_value_biases")

    def refactor_factored_attn_matrices(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Refused: see `load_and_process_state_dict`.

        Raises:
            ValueError: Always.
        """
        raise _not_done("refactor_factored_attn_matrices")

    def __getattr__(self, name: str) -> Any:
        if name == "W_pos" and self.cfg.model.n_positions is not None:
            return self.pos_embed["W_pos"]
        if name in NO_WORDS:
            raise AttributeError(f"There is no {name}: {NO_WORDS[name]}.")
        return super().__getattr__(name)


def _require_unprocessed(asked: dict[str, bool]) -> None:
    """Refuse the processing that is asked for, and what HookedTransformer has no name for."""
    for name, wanted in asked.items():
        if wanted or name not in PROCESSING:
            raise _not_done(f"{name}={wanted}")


def _not_done(asked: str) -> ValueError:
    return ValueError(
        f"weights are not processed: {', '.join(PROCESSING)} must be False or left out, got {asked}."
    )
