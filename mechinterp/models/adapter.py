"""Hooked models of any make as the analyses of heads see them: prompts in, predictions out, heads by number.

Ours fit as they are. A TransformerLens Bridge around somebody else's layers needs to be told how prompts
become its input and which part of its output is the prediction; that is all there is to an adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.icl.prompts import Prompts
from mechinterp.models.functional import BIASES, NAMES, AttentionWeights
from mechinterp.models.layered import interleaved, too_long

if TYPE_CHECKING:
    from transformer_lens import HookedRootModule
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Model

    from mechinterp.models.attention import HookedConfig
    from mechinterp.models.transformer import ICLTransformer


@dataclass(frozen=True, eq=False)
class HookedPredictor:
    """A model with TransformerLens' hooks, how prompts go into it and where its prediction comes out.

    Raises:
        ValueError: If the model lacks the hooks of a layer's heads or of its input.
    """

    model: "HookedRootModule | TransformerBridge"
    """Takes `start_at_layer` and `stop_at_layer` as HookedTransformer does."""
    n_layers: int
    n_heads: int
    """Heads of every layer."""
    embed: Callable[[Prompts], Tensor]
    """Prompts to the model's input, [batch, pos, width]; the query is at the last position."""
    read: Callable[[Tensor], Tensor]
    """The model's output to the prediction at the query, [batch, d_y]."""
    adds_up: bool = False
    """Whether a layer adds its heads' outputs, `z @ W_O`, to the stream and does nothing else."""

    def __post_init__(self) -> None:
        for layer in range(self.n_layers):
            for name in (z_name(layer), resid_name(layer)):
                if name not in self.model.hook_dict:
                    raise ValueError(
                        f"A model of {self.n_layers} layers must have the hook {name}, got a "
                        f"{type(self.model).__name__} without it."
                    )

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y."""
        return self.read(self.model(self.embed(prompts)))

    def require_heads(self, heads: "list[tuple[int, int]]") -> None:
        """Refuse heads that do not exist.

        Raises:
            ValueError: Naming the first of them.
        """
        for layer, head in heads:
            if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads):
                raise ValueError(
                    f"heads must lie in {self.n_layers} layers of {self.n_heads} heads, counted from 0, "
                    f"got L{layer}H{head}."
                )

    @property
    def is_hooked(self) -> bool:
        """Whether somebody's forward hooks are on the model, which shortcuts past its modules would miss."""
        return any(point.fwd_hooks for point in self.model.hook_dict.values())

    def layer_weights(self, layer: int) -> AttentionWeights:
        """The weights of a layer of a model whose heads add up, W_O in full width."""
        attn = self.model.get_submodule(f"blocks.{layer}.attn")
        cfg = cast("HookedConfig", self.model.cfg)
        names = (*NAMES, *BIASES) if cfg.biases else NAMES
        return AttentionWeights(
            **{name: getattr(attn, name).detach() for name in names},
            scale=cfg.scale,
            score=cfg.score,
            score_slope=cfg.score_slope,
            attend_to_self=cfg.attend_to_self,
        )


def z_name(layer: int) -> str:
    """Name of the hook on what a layer's heads have averaged, [batch, pos, head, d_head]."""
    return f"blocks.{layer}.attn.hook_z"


def resid_name(layer: int) -> str:
    """Name of the hook on the stream before a layer, [batch, pos, d_model]."""
    return f"blocks.{layer}.hook_resid_pre"


def as_predictor(model: "HookedPredictor | ICLTransformer") -> HookedPredictor:
    """The model as a predictor: one of ours as it is, and a `HookedPredictor` itself.

    Raises:
        ValueError: If it is neither.
    Example:
        >>> from mechinterp.models.transformer import ICLTransformer
        >>> as_predictor(ICLTransformer(d_x=5, d_y=1, n_heads=2, n_layers=3)).n_layers
        3
    """
    if isinstance(model, HookedPredictor):
        return model
    from mechinterp.models.transformer import ICLTransformer

    if not isinstance(model, ICLTransformer):
        raise ValueError(
            f"model must be an ICLTransformer or a HookedPredictor around a hooked model, got {type(model).__name__}."
        )
    return HookedPredictor(
        model=model,
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        embed=lambda prompts: prompts.tokens,
        read=lambda output: output[:, -1],
        adds_up=True,
    )


def gpt2_predictor(
    backbone: "GPT2Model", read_in: nn.Module, read_out: nn.Linear
) -> HookedPredictor:
    """A regression GPT-2 in a TransformerLens Bridge; it reads x_1, y_1, ..., x_query and predicts at the last.

    The layers are wrapped where they are: the given backbone runs through the hooks from then on, and its
    state_dict has other names. Save it before.

    Args:
        backbone: Hugging Face's model, fed with vectors in place of words.
        read_in: From [.., d_x] to the backbone's width.
        read_out: From the backbone's width to [.., d_y].
    Source:
        Garg et al. 2022, arXiv 2208.01066.
    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> backbone = GPT2Model(GPT2Config(vocab_size=1, n_positions=101, n_embd=8, n_layer=2, n_head=2))
        >>> gpt2_predictor(backbone, nn.Linear(5, 8), nn.Linear(8, 1)).n_heads
        2
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2LMHeadModel

    with_head = GPT2LMHeadModel(backbone.config)
    with_head.transformer, with_head.lm_head = backbone, read_out
    with_head.config.tie_word_embeddings = False
    with_head.set_attn_implementation("eager")
    with_head.eval()
    bridge = build_bridge_from_module(with_head, "GPT2LMHeadModel", hf_config=with_head.config)
    most = (backbone.config.n_positions - 1) // 2

    def embed(prompts: Prompts) -> Tensor:
        if prompts.x.shape[1] > most:
            raise ValueError(too_long(prompts.x.shape[1], most))
        return read_in(interleaved(prompts))

    return HookedPredictor(
        model=bridge,
        n_layers=bridge.cfg.n_layers,
        n_heads=bridge.cfg.n_heads,
        embed=embed,
        read=lambda output: output[:, -1],
    )
