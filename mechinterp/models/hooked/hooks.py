"""HookedTransformer's names and methods on hooks, and errors for parts that need a vocabulary.

HookedRootModule accepts a hook on a point that is switched off and never calls it. Here names are checked first.
HookedTransformer's older names of moved points work too.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice, composition_scores

from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.blocks import Unembed
from mechinterp.models.hooked.config import HookedConfig
from mechinterp.models.hooked.contexts import Context
from mechinterp.models.hooked.masks import Hook, lock_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores


FORKS = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_attn_in")
"""Points that TransformerLens 4 has in the attention, and HookedTransformer in the layer."""

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


class HookError(ValueError, AssertionError, KeyError):
    """A hook on a point that is switched off or does not exist.

    It inherits from every error that TransformerLens raises here: ValueError and KeyError in 4.x, AssertionError before.
    """

    __str__ = Exception.__str__  # KeyError's __str__ would quote the text


class CheckedHooks(HookedRootModule):
    """A hooked model that refuses hooks on points that do not exist or are switched off.

    A function of names selects among all points: selected points that are off are left out with a warning, as in
    TransformerLens 4.
    """

    cfg: HookedConfig
    scopes_hooks = True
    """Hooks of a block that an interrupt leaves on do nothing, see `hooks`."""

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[Hook] = (),
        bwd_hooks: Sequence[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator["CheckedHooks"]:
        """Context with these hooks on the model; other threads wait until it ends.

        Ctrl-C waits while hooks are put on or taken off. A hook that an interrupt leaves on does nothing once its context
        has ended, and the next context takes it off.

        Raises:
            HookError: If a hook point does not exist or is switched off.
        """
        context = Context(reset_hooks_end)
        forward, backward = (context.scoped(self._on_points(h)) for h in (fwd_hooks, bwd_hooks))
        added = super().hooks(forward, backward, reset_hooks_end, clear_contexts)
        with lock_of(self), context.of(self, added):
            yield self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the model. The call waits while another thread has hooks on the model."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with lock_of(self):
            return super().__call__(*args, **kwargs)

    def _on_points(
        self, hooks: Sequence[Hook]
    ) -> list[tuple[str | Callable[..., Any], Callable[..., Any]]]:
        return [(name, hook) for pick, hook in hooks for name in self._points(pick)]

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **kwargs: Any
    ) -> None:
        """Add a hook to a point, or to all points that a function of names selects; arguments as in TransformerLens.

        Raises:
            HookError: If the hook point does not exist or is switched off.
        """
        for point in self._points(name):
            super().add_hook(point, hook, *args, **kwargs)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Check that TransformerLens calls before it adds a hook.

        Raises:
            HookError: If the point is switched off.
        """
        self._require(hook_point_name)

    def get_caching_hooks(
        self,
        names_filter: object = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list, list]:
        """An empty cache, and the forward and backward hooks that fill it.

        Raises:
            HookError: If a hook point does not exist or is switched off.
        """
        values: dict[str, Tensor] = {} if cache is None else cache
        positions = Slice.unwrap(pos_slice)

        def save(tensor: Tensor, hook: HookPoint, *, keys: list[str]) -> None:
            # The position axis follows the batch axis; in patterns and scores the query axis follows the head axis.
            axis = 2 if str(hook.name).endswith(("hook_pattern", "hook_attn_scores")) else 1
            kept = positions.apply(tensor.detach().to(device), dim=axis)
            for key in keys:
                values[key] = kept[0] if remove_batch_dim and len(kept) == 1 else kept

        points = self._points(names_filter)
        forward = [(name, partial(save, keys=keys)) for name, keys in points.items()]
        graded = {name: [f"{key}_grad" for key in keys] for name, keys in points.items()}
        backward = [(name, partial(save, keys=keys)) for name, keys in graded.items()]
        return values, forward, backward if incl_bwd else []

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """Output of the model and its activations by hook name; arguments as in HookedTransformer.

        Raises:
            HookError: If a hook point in `names_filter` does not exist or is switched off.
            ValueError: If `incl_bwd` is set while gradients are off, or without a loss to differentiate.
        """
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError("incl_bwd needs gradients, which are off here (torch.no_grad).")
        returned = (*model_args[1:2], kwargs.get("return_type"))
        if incl_bwd and ("loss" not in returned or kwargs.get("stop_at_layer") is not None):
            raise ValueError(
                "incl_bwd needs return_type='loss' and no stop_at_layer: gradients are those of one number."
            )
        output, cache = super().run_with_cache(
            *model_args, remove_batch_dim=remove_batch_dim, incl_bwd=incl_bwd, **kwargs
        )
        if return_cache_object:
            cache = ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)
        return output, cache

    def _points(self, pick: object) -> dict[str, list[str]]:
        """Selected hook points, each with the names that select it (its own or an older one)."""
        if isinstance(pick, str):
            pick = [pick]
        points: dict[str, list[str]] = {}
        if isinstance(pick, list):
            for asked in pick:
                points.setdefault(self._require(asked), []).append(asked)
            return points
        if not (pick is None or callable(pick)):
            rule = "a name, a list of names or a function"
            raise ValueError(f"names_filter must be {rule}, got {pick!r}.")
        asleep = []
        # Points that cannot be on, because another point that excludes them is on.
        excluded = FORKS if self.cfg.use_attn_in or self.cfg.use_split_qkv_input else ()
        for name in self.hook_dict:
            names = [name, *_older_names(name)]
            names = names if pick is None else [each for each in names if pick(each)]
            if names and self.cfg.switch_of(name) is None:
                points[name] = names
            elif names and not name.endswith(excluded):
                asleep.append(name)
        if asleep and pick is not None:
            setters = sorted({f"set_{self.cfg.switch_of(name)}(True)" for name in asleep})
            warnings.warn(
                f"{len(asleep)} of the hook points picked are switched off and left out, {asleep[0]} first; "
                f"{', '.join(setters)} turns them on.",
                stacklevel=4,
            )
        return points

    def _require(self, asked: str) -> str:
        """Hook point with this name; it must exist and be on."""
        name = asked if asked in self.hook_dict else _newer_name(asked)
        if name not in self.hook_dict:
            raise HookError(
                f"There is no hook point {asked!r}; model.hook_dict lists those of the model."
            )
        switch = self.cfg.switch_of(name)
        if switch is not None:
            raise HookError(f"The hook point {asked} is off; call model.set_{switch}(True) first.")
        return name


def _older_names(name: str) -> list[str]:
    """HookedTransformer's name for a moved point; empty if the point has not moved."""
    older = re.sub(rf"^(blocks\.\d+)\.attn\.({'|'.join(FORKS)})$", r"\1.\2", name)
    return [older] if older != name else []


def _newer_name(name: str) -> str:
    return re.sub(rf"^(blocks\.\d+)\.({'|'.join(FORKS)})$", r"\1.attn.\2", name)


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
