"""Architecture of a model (layers, heads, masks, norms and MLPs), and the names and shapes of its tensors.

HookedTransformer stores one tensor per layer, "blocks.0.attn.W_Q". Here one tensor "attn.W_Q" has all layers along its
first axis.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mechinterp.fields import LARGEST_SETTING, MAX_SIZE, Rules, set_checked

SCORES = ("softmax", "1+tanh", "1+Cx", "(1+Cx)^2", "linear", "linear/L")
CONTEXT_ONLY_SCORES = (*SCORES, "relu/L")
"""Scores of context-only models; `SCORES` are those of all others."""
OVER_PAIRS = "linear/pairs"
"""Score of linear attention over the number of pairs L, whatever the number of keys: code of others also reads the query's
token and still divides by L. A query that reads the context alone has L keys, so that this score is "linear/L"."""
LINEAR = ("linear", "linear/L", OVER_PAIRS)
"""Scores of linear attention."""
RECURRENT = ("gated", "delta", "gated_delta", "mesa")
"""Rules of recurrent layers, whose heads write the pairs into a state one after the other."""
FORGETTING = ("gated", "gated_delta", "mesa")
"""Recurrent rules with a gate."""
WRITING = ("delta", "gated_delta", "mesa")
"""Recurrent rules with a strength of writing, beta."""
GATES = ("constant", "token")
GATE_START = 0.95
NORMS = ("before", "after")
MLP_NORM = "before_mlp"
"""Place of a norm that MLPs alone read through."""
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "tanh")
LAYOUTS = ("pairs", "in_turn")

_Part = TypeVar("_Part")
NAMES = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("b_Q", "b_K", "b_V", "b_O")
_LAYERED = ("attn.", "mlp.", "ln1.", "ln2.")
"""Prefixes of the names of tensors that every layer has."""


@dataclass(frozen=True)
class ModelConfig:
    """Transformer that reads the prompt's tokens and predicts y_query; by default it has attention
    only.

    See also:
        `ExperimentConfig`, `ICLTransformer`.
    """

    n_layers: int = 1
    """Number of layers. Each has attention and, if `d_mlp` is set, an MLP."""
    n_heads: int = 2
    """Number of heads per layer."""
    d_head: int | None = None
    """Width of a head; None means d_model, or d_model / n_heads in context-only models."""
    score: str = "softmax"
    """Score function: attention weights are f(s_i) / sum_j f(s_j) with f = exp for "softmax" and f
    as named otherwise. Linear attention has the weights C s_i ("linear"), C s_i / number of keys
    ("linear/L") or, for keys other than the pairs, C s_i / number of pairs ("linear/pairs"). "gated", "delta", "gated_delta" and "mesa" are recurrent layers, whose heads write
    the tokens into a state one after the other (`mechinterp.models.recurrence`)."""
    score_slope: float = 1.0
    """The constant C of "1+Cx", "(1+Cx)^2" and linear attention."""
    attend_to_self: bool = False
    """True: the query attends to itself too."""
    biases: bool = False
    """True: heads, MLPs, read-in and read-out have biases."""
    merged_qk: bool = False
    """True: each head has one matrix W_QK instead of W_Q W_K^T; d_head is then d_model."""
    context_only: bool = False
    """Tokens that a token attends to. True: all tokens of the context (with attend_to_self also the
    query). False: the tokens before it (with attend_to_self also itself)."""
    d_model: int | None = None
    """Width of the residual stream, with a read-in W_in and a read-out W_U. None: the tokens (x, y)
    are the stream, of width d_x + d_y, and its y entries are the prediction."""
    norm: str | None = None
    """Place of the layer norms: "before" attention and MLP, "before_mlp" alone, or "after" their
    outputs are added; None means no norm."""
    final_norm: bool = False
    """True: a layer norm precedes the read-out."""
    norm_eps: float = 1e-5
    """Constant that norms add to the variance or mean square."""
    rms_norm: bool = False
    """True: norms divide by the root mean square without subtracting the mean. False: they subtract
    the mean first."""
    d_mlp: int | None = None
    """Hidden width of the MLP of each layer; None means no MLP."""
    activation: str = "relu"
    """Activation of the MLPs: "relu", "gelu", "gelu_new" (its tanh approximation), "silu" or "tanh"."""
    layout: str = "pairs"
    """Tokens: "pairs" means (x_1, y_1), ..., (x_query, 0); "in_turn" means x_1, y_1, ..., x_query,
    with y padded to d_x."""
    n_positions: int | None = None
    """Number of learned positions, which are added to the stream; None means no positions."""
    rotary_dim: int | None = None
    """Number of entries of every query and key that are rotated by a position-dependent angle; None
    means no rotation."""
    rotary_base: float = 10000.0
    """Base of the rotation: entry pair i turns by position / rotary_base^(2i / rotary_dim)."""
    rotary_adjacent_pairs: bool = False
    """Pairs of rotated entries. True: entries 2i and 2i + 1. False: entries i and i + rotary_dim/2.
    """
    d_read_in: int | None = None
    """Hidden width of an MLP that reads the tokens: W_in acts on activation(tokens W_read +
    b_read). None: W_in acts on the tokens."""
    gates: str = "constant"
    """Gates of a recurrent layer, sigmoid(stream W + b). "constant": b alone, one number per head.
    "token": W too, so that every token has its own."""
    gate_start: float = GATE_START
    """Gate of every head at the start of training, in (0, 1]: the factor that is left of the state
    after one token. Recurrent layers with a gate only."""

    def __post_init__(self) -> None:
        set_checked(self, "model")
        rules = Rules("model", self)
        sizes: tuple[str, ...] = ("n_layers", "n_heads", "d_head", "d_model", "d_mlp")
        sizes += ("n_positions", "d_read_in", "rotary_dim")
        rules.at_least(1, *sizes)
        rules.at_most(MAX_SIZE, *sizes)
        rules.at_least(0, "norm_eps")
        slope = f"must lie within ±{LARGEST_SETTING:g}"
        rules.require("score_slope", abs(self.score_slope) <= LARGEST_SETTING, slope)
        scores: tuple[str, ...] = CONTEXT_ONLY_SCORES if self.context_only else SCORES
        # Attention to the pairs alone has this score as "linear/L".
        other_keys = self.attend_to_self or (self.n_layers > 1 and not self.context_only)
        scores += (OVER_PAIRS,) if other_keys and self.layout == "pairs" else ()
        rules.one_of("score", (*scores, *RECURRENT))
        rules.one_of("norm", (*NORMS, None) if self.d_mlp is None else (*NORMS, MLP_NORM, None))
        rules.one_of("activation", ACTIVATIONS)
        rules.one_of("layout", LAYOUTS)
        wide = self.d_model is not None
        rule = "must be given if layout is 'in_turn'"
        rules.require("d_model", wide or self.layout == "pairs", rule)
        rules.require("d_model", wide or self.d_read_in is None, "must be given if d_read_in is")
        rules.require("rotary_dim", not (self.rotary_dim or 0) % 2, "must be even")
        rules.require("rotary_base", self.rotary_base > 0, "must be > 0")
        turned = self.rotary_dim is None or not self.merged_qk
        rules.require("rotary_dim", turned, "must be null if merged_qk is true")
        self._check_gates(rules)

    def _check_gates(self, rules: Rules) -> None:
        """Refuse gates outside (0, 1] and settings that recurrent layers, or all others, do not use."""
        rules.one_of("gates", GATES)
        rules.require("gate_start", 0 < self.gate_start <= 1, "must be in (0, 1]")
        if self.recurrent:
            rule = f"must be false for the recurrent score {self.score!r}"
            rules.require("context_only", not self.context_only, rule)
            rules.require("merged_qk", not self.merged_qk, rule)
        rule = f"is not used by score {self.score!r}, which has no gate"
        rules.require("gates", self.recurrent or self.gates == "constant", rule)
        gated = self.score in FORGETTING
        rules.require("gate_start", gated or self.gate_start == GATE_START, rule)

    @property
    def recurrent(self) -> bool:
        """True if heads write the tokens into a state one after the other."""
        return self.score in RECURRENT

    @property
    def attention_only(self) -> bool:
        """True if only heads change the stream: no norm, MLP, position or nonlinear read-in."""
        parts = (self.norm, self.d_mlp, self.n_positions, self.rotary_dim, self.d_read_in)
        return set(parts) == {None} and not self.final_norm

    @property
    def beyond_one_layer(self) -> str | None:
        """First part of the model beyond one attention layer on tokens (x, y), in words; None if there
        is none.

        Example:
            >>> ModelConfig(n_layers=4, context_only=True).beyond_one_layer
            'several layers (4)'
        """
        parts = {
            f"several layers ({self.n_layers})": self.n_layers > 1,
            "layer norms": self.norm is not None or self.final_norm,
            "MLPs": self.d_mlp is not None,
            "a read-in and read-out": self.d_model is not None,
            "positions": (self.n_positions, self.rotary_dim) != (None, None),
            f"a recurrent layer ({self.score})": self.recurrent,
        }
        return next((part for part, has_it in parts.items() if has_it), None)

    @property
    def reads_y_alone(self) -> bool:
        """True for one layer on tokens (x, y), attention or recurrent: only the y entries of its
        output are read."""
        parts = (self.norm, self.d_mlp, self.d_model, self.n_positions, self.rotary_dim)
        return self.n_layers == 1 and set(parts) == {None} and not self.final_norm

    @property
    def one_attention(self) -> bool:
        """True if the prediction is the sum of the heads' outputs: one layer of attention on tokens
        (x, y)."""
        return self.beyond_one_layer is None

    @property
    def stack(self) -> str | None:
        """Kind of a stack of attention layers without further parts, whose tokens all attend to the
        context: "linear" or "nonlinear". None for any other model.

        A linear stack is a linear map of its tokens, given the second moment of the context."""
        variants = (self.biases, self.merged_qk, self.attend_to_self, self.layout == "in_turn")
        if not (self.context_only and self.attention_only) or any(variants):
            return None
        return "linear" if self.score in LINEAR else "nonlinear"

    @property
    def queries_side_by_side(self) -> bool:
        """True if several queries can share one pass: no token reads a query, or knows its place."""
        alone = self.context_only or self.n_layers == 1
        placed = (self.rotary_dim, self.n_positions) != (None, None)
        variants = (self.attend_to_self, self.layout == "in_turn", self.recurrent)
        return alone and not (placed or any(variants))

    @property
    def predicts_everywhere(self) -> bool:
        """True if one pass predicts y at every x: a causal model of tokens in turn, or one recurrent
        layer on pairs, whose state after each pair every later x can ask."""
        if self.layout == "in_turn":
            return not self.context_only
        placed = (self.rotary_dim, self.n_positions) != (None, None)
        return self.recurrent and self.n_layers == 1 and not (placed or self.attend_to_self)

    @property
    def trains_compiled(self) -> bool:
        """True if the compiled step can train it: one layer of attention whose query attends to the
        context only."""
        variants = (self.context_only, self.attend_to_self, self.biases)
        return self.one_attention and not any(variants)

    @property
    def longest_context(self) -> int | None:
        """Largest number of pairs that the positions allow; None means any number."""
        if self.n_positions is None:
            return None
        return (self.n_positions - 1) // (2 if self.layout == "in_turn" else 1)

    def n_tokens(self, context_length: int) -> int:
        """Number of tokens of a prompt, including the query."""
        return context_length * (2 if self.layout == "in_turn" else 1) + 1

    def d_token(self, d_x: int, d_y: int) -> int:
        """Width of a token."""
        return d_x if self.layout == "in_turn" else d_x + d_y

    def stream_width(self, d_x: int, d_y: int) -> int:
        """Width of the residual stream; the default is the width of a token."""
        return self.d_token(d_x, d_y) if self.d_model is None else self.d_model

    def head_width(self, d_x: int, d_y: int) -> int:
        """Width of a head; the default is the stream width, or its share per head for context-only
        models."""
        if self.d_head is not None:
            return self.d_head
        width = self.stream_width(d_x, d_y)
        return width // self.n_heads if self.context_only else width


def tensor_shapes(model: ModelConfig, d_x: int, d_y: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by HookedTransformer's names.

    Example:
        >>> tensor_shapes(ModelConfig(n_heads=2), 5, 1)["blocks.0.attn.W_O"]
        (2, 6, 6)
    """
    shapes = stacked_shapes(model, d_x, d_y)
    return of_each_layer(shapes, model.n_layers, lambda shape, layer: shape[1:])


def of_each_layer(
    stacked: Mapping[str, _Part], n_layers: int, part: Callable[[_Part, int], _Part]
) -> dict[str, _Part]:
    """Values by HookedTransformer's names: `part` extracts a layer's part from each stacked value."""
    return {
        f"blocks.{layer}.{name}": part(whole, layer)
        for layer in range(n_layers)
        for name, whole in stacked.items()
        if name.startswith(_LAYERED)
    } | {name: whole for name, whole in stacked.items() if not name.startswith(_LAYERED)}


def stacked_shapes(model: ModelConfig, d_x: int, d_y: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by name, with layers stacked along the first axis.

    Example:
        >>> stacked_shapes(ModelConfig(n_layers=3, n_heads=2, context_only=True), 5, 1)["attn.W_O"]
        (3, 2, 3, 6)
    """
    width, d_head = model.stream_width(d_x, d_y), model.head_width(d_x, d_y)
    layer = _layer_shapes(model, width, d_head)
    shapes = {name: (model.n_layers, *shape) for name, shape in layer.items()}
    if model.final_norm:
        shapes |= {"ln_final.w": (width,), "ln_final.b": (width,)}
    if model.n_positions is not None:
        shapes["pos_embed.W_pos"] = (model.n_positions, width)
    if model.d_model is not None:
        d_token = model.d_token(d_x, d_y)
        shapes["W_in"] = (model.d_read_in or d_token, width)
        shapes["unembed.W_U"] = (width, d_y)
        if model.biases:
            shapes |= {"b_in": (width,), "unembed.b_U": (d_y,)}
        if model.d_read_in is not None:
            shapes["W_read"] = (d_token, model.d_read_in)
            if model.biases:
                shapes["b_read"] = (model.d_read_in,)
    return shapes


def _layer_shapes(model: ModelConfig, width: int, d_head: int) -> dict[str, tuple[int, ...]]:
    wide = (model.n_heads, width, d_head)
    names = ("W_QK", "W_V") if model.merged_qk else ("W_Q", "W_K", "W_V")
    shapes: dict[str, tuple[int, ...]] = {f"attn.{name}": wide for name in names}
    shapes["attn.W_O"] = (model.n_heads, d_head, width)
    gates = gate_shapes(model, width, d_head)
    shapes |= {f"attn.{name}": shape for name, shape in gates.items()}
    if model.biases:
        shapes |= {f"attn.{name}": (model.n_heads, d_head) for name in BIASES[:3]}
        shapes["attn.b_O"] = (width,)
    if model.d_mlp is not None:
        shapes |= {"mlp.W_in": (width, model.d_mlp), "mlp.W_out": (model.d_mlp, width)}
        if model.biases:
            shapes |= {"mlp.b_in": (model.d_mlp,), "mlp.b_out": (width,)}
    if model.norm is not None:
        norms = ("ln1",) if model.d_mlp is None else ("ln1", "ln2")
        norms = ("ln2",) if model.norm == MLP_NORM else norms
        shapes |= {f"{norm}.{name}": (width,) for norm in norms for name in ("w", "b")}
    return shapes


def gate_shapes(model: ModelConfig, width: int, d_head: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the gates, strengths of writing and ridge penalties of a layer; empty if it is not recurrent.

    Example:
        >>> gate_shapes(ModelConfig(n_heads=2, score="gated", gates="token"), 6, 6)
        {'b_gate': (2,), 'W_gate': (2, 6)}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rules in {"gate": FORGETTING, "beta": WRITING}.items():
        if model.score in rules:
            shapes[f"b_{name}"] = (model.n_heads,)
            if model.gates == "token":
                shapes[f"W_{name}"] = (model.n_heads, width)
    if model.score == "mesa":
        shapes["b_ridge"] = (model.n_heads, d_head)
    return shapes
