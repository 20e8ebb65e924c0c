"""The architecture of a model: layers, heads, masks, norms and MLPs."""

from dataclasses import dataclass

from mechinterp.fields import MAX_SIZE, Rules, set_checked

SCORES = ("softmax", "1+tanh", "1+Cx", "(1+Cx)^2", "linear", "linear/L")
CONTEXT_ONLY_SCORES = (*SCORES, "relu/L")
"""Scores of models in which every token reads the context; `SCORES` are those of the others."""
NORMS = ("before", "after")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "tanh")
LAYOUTS = ("pairs", "in_turn")


@dataclass(frozen=True)
class ModelConfig:
    """A transformer that reads the prompt's tokens and predicts y_query; attention only unless told.

    See also:
        `ExperimentConfig`, `ICLTransformer`.
    """

    n_layers: int = 1
    """Number of layers, each of attention and, where there is a d_mlp, an MLP."""
    n_heads: int = 2
    """Heads per layer."""
    d_head: int | None = None
    """Width of a head; None stands for the width d_model, and in context-only models for d_model / n_heads."""
    score: str = "softmax"
    """Attention weights are f(s_i) / sum_j f(s_j); "softmax" has f = exp, the others name f. Linear
    attention has C s_i ("linear") or C s_i over the number of keys ("linear/L")."""
    score_slope: float = 1.0
    """The constant C of "1+Cx", "(1+Cx)^2" and linear attention."""
    attend_to_self: bool = False
    """Whether the query is among its own keys."""
    biases: bool = False
    """Whether heads, MLPs, read-in and read-out have biases."""
    merged_qk: bool = False
    """Whether each head has one matrix W_QK in place of W_Q W_K^T; d_head is then d_model."""
    context_only: bool = False
    """Whether a token reads the context on both sides of it. Without this it reads the tokens before it, with
    attend_to_self also itself. With it, it reads all tokens of the context, with attend_to_self also the query."""
    d_model: int | None = None
    """Width of the residual stream, with a read-in W_in before it and a read-out W_U behind it; None: the tokens
    (x, y) are the stream, of width d_x + d_y, and its y entries the prediction."""
    norm: str | None = None
    """Layer norm "before" attention and MLP, or "after" what they add to the stream; None: no norm."""
    final_norm: bool = False
    """Whether a layer norm stands before the read-out."""
    norm_eps: float = 1e-5
    """What norms add to the variance, or to the mean square."""
    rms_norm: bool = False
    """Whether norms divide by the root mean square alone; False: they subtract the mean first."""
    d_mlp: int | None = None
    """Hidden width of the MLP of each layer; None: no MLP."""
    activation: str = "relu"
    """Activation of the MLPs: "relu", "gelu", "gelu_new" (its tanh approximation), "silu" or "tanh"."""
    layout: str = "pairs"
    """Tokens: "pairs", (x_1, y_1), ..., (x_query, 0), or "in_turn", x_1, y_1, ..., x_query, y padded to d_x."""
    n_positions: int | None = None
    """Number of learned positions, added to the stream; None: there are none."""
    rotary_dim: int | None = None
    """Entries of every query and key that are turned by an angle that grows with the position; None: no rotation."""
    rotary_base: float = 10000.0
    """Entry pair i turns by position / rotary_base^(2i / rotary_dim)."""
    rotary_adjacent_pairs: bool = False
    """Whether entries 2i and 2i + 1 are a pair; False pairs entry i with entry i + rotary_dim/2."""
    d_read_in: int | None = None
    """Hidden width of an MLP that reads the tokens in: W_in acts on activation(tokens W_read + b_read); None: W_in
    acts on the tokens."""

    def __post_init__(self) -> None:
        set_checked(self, "model")
        rules = Rules("model", self)
        sizes: tuple[str, ...] = ("n_layers", "n_heads", "d_head", "d_model", "d_mlp")
        sizes += ("n_positions", "d_read_in", "rotary_dim")
        rules.at_least(1, *sizes)
        rules.at_most(MAX_SIZE, *sizes)
        rules.at_least(0, "norm_eps")
        scores = CONTEXT_ONLY_SCORES if self.context_only else SCORES
        rules.one_of("score", scores)
        rules.one_of("norm", (*NORMS, None))
        rules.one_of("activation", ACTIVATIONS)
        rules.one_of("layout", LAYOUTS)
        wide = self.d_model is not None
        rule = "must be given where layout is 'in_turn'"
        rules.require("d_model", wide or self.layout == "pairs", rule)
        rules.require("d_model", wide or self.d_read_in is None, "must be given where d_read_in is")
        rules.require("rotary_dim", not (self.rotary_dim or 0) % 2, "must be even")
        rules.require("rotary_base", self.rotary_base > 0, "must be > 0")
        turned = self.rotary_dim is None or not self.merged_qk
        rules.require("rotary_dim", turned, "must be null where merged_qk is true")

    @property
    def attention_only(self) -> bool:
        """Whether nothing but the heads adds to the stream or changes it: no norm, MLP or position."""
        parts = (self.norm, self.d_mlp, self.n_positions, self.rotary_dim, self.d_read_in)
        return set(parts) == {None} and not self.final_norm

    @property
    def one_attention(self) -> bool:
        """Whether the prediction is the sum of the heads' outputs: one layer of attention on tokens (x, y)."""
        return self.n_layers == 1 and self.d_model is None and self.attention_only

    @property
    def is_stack(self) -> bool:
        """Whether there is attention alone, and every token reads the context."""
        variants = (self.biases, self.merged_qk, self.attend_to_self, self.layout == "in_turn")
        return self.context_only and self.attention_only and not any(variants)

    @property
    def trains_compiled(self) -> bool:
        """Whether the compiled step trains it: one layer of attention whose query reads the context alone."""
        variants = (self.context_only, self.attend_to_self, self.biases)
        return self.one_attention and not any(variants)

    @property
    def longest_context(self) -> int | None:
        """Most pairs that the positions have room for; None: any number."""
        if self.n_positions is None:
            return None
        return (self.n_positions - 1) // (2 if self.layout == "in_turn" else 1)

    def n_tokens(self, context_length: int) -> int:
        """Tokens of a prompt, the query among them."""
        return context_length * (2 if self.layout == "in_turn" else 1) + 1

    def d_token(self, d_x: int, d_y: int) -> int:
        """Width of a token."""
        return d_x if self.layout == "in_turn" else d_x + d_y

    def stream_width(self, d_x: int, d_y: int) -> int:
        """Width of the residual stream, with the default of d_model filled in."""
        return self.d_token(d_x, d_y) if self.d_model is None else self.d_model

    def head_width(self, d_x: int, d_y: int) -> int:
        """Width of a head, with the default of d_head filled in."""
        if self.d_head is not None:
            return self.d_head
        width = self.stream_width(d_x, d_y)
        return width // self.n_heads if self.context_only else width
