"""Regression GPT-2 from Hugging Face, hooked by a TransformerLens Bridge."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.layers import tokens_of

if TYPE_CHECKING:
    from transformers import GPT2Model


def gpt2_predictor(
    backbone: "GPT2Model", read_in: nn.Module, read_out: nn.Linear
) -> HookedPredictor:
    """Regression GPT-2 in a TransformerLens Bridge; it reads x_1, y_1, ..., x_query and predicts at the last token.

    The backbone is wrapped in place: afterwards it runs through the hooks, and its state_dict has other names.
    Save it before. All parts are put into evaluation mode.

    Args:
        backbone: Hugging Face's model, which gets vectors in place of word embeddings.
        read_in: Map from [.., d_x] to the backbone's width. If it is a Linear, other values of d_x are refused.
        read_out: Map from the backbone's width to [.., d_y].
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
    read_in.eval()
    bridge = build_bridge_from_module(with_head, "GPT2LMHeadModel", hf_config=with_head.config)
    sizes = backbone.config
    model = ModelConfig(layout="in_turn", d_model=sizes.n_embd, n_positions=sizes.n_positions)

    def embed(prompts: Prompts) -> Tensor:
        d_x = read_in.in_features if isinstance(read_in, nn.Linear) else prompts.x.shape[2]
        tokens = tokens_of(prompts, model, d_x=d_x, d_y=read_out.out_features)
        return read_in(tokens.to(next(read_in.parameters(), prompts.x)))

    n_layers, n_heads = bridge.cfg.n_layers, bridge.cfg.n_heads
    return HookedPredictor(bridge, n_layers, n_heads, embed, lambda output: output[:, -1])
