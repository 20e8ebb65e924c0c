"""Hooks by name, checked before they are added.

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
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

from mechinterp.models.hooked.config import HookedConfig
from mechinterp.models.hooked.contexts import Context
from mechinterp.models.hooked.masks import Hook, lock_of

if TYPE_CHECKING:
    pass

FORKS = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_attn_in")
"""Points that TransformerLens 4 has in the attention, and HookedTransformer in the layer."""


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

        Ctrl-C waits while hooks are added or removed. A hook that an interrupt leaves on does nothing once its context
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
