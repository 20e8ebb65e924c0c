"""Stacked weights in the memory of a model's parameters: an edit in place of either is an edit of both."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor, nn

from mechinterp.config import ModelConfig
from mechinterp.models.hooked.masks import lock_of
from mechinterp.models.weights import Weights


class SharedWeights:
    """Weights of one model, stacked over layers, and the tensors of earlier ones that it no longer shares."""

    def __init__(self) -> None:
        self._weights: Weights | None = None
        self._views: Mapping[str, Tensor] = {}
        """The weights by HookedTransformer's names, as the parameters should be."""
        self._former: list[tuple[ref[Tensor], int]] = []
        """Tensors that the model has left, with their versions at that time."""

    @torch.inference_mode(False)
    def adopt(self, module: nn.Module, weights: Weights) -> None:
        """Make these weights the parameters of a module. Tensors that cannot be parameters as they are get copied."""
        own = weights.with_tensors({name: t.detach() for name, t in weights.tensors.items()})
        if not _can_be_parameters(own.tensors.values()):
            self._leave(weights)
            tensors = {
                name: t.to(own.W_V, copy=True).contiguous() for name, t in own.tensors.items()
            }
            own = own.with_tensors(tensors)
        self._share(module, own)

    @torch.inference_mode(False)
    def of(
        self, module: nn.Module, model: ModelConfig, *, d_x: int, d_y: int, scale: float
    ) -> Weights:
        """Current weights of a module, in the memory of its parameters.

        Raises:
            ValueError: If weights that the model has left were edited since, a weight is not a parameter of the module
                (a parametrized one, for example), or the parameters differ in dtype or device.
        """
        self._require_unedited()
        named = dict(module.named_parameters(remove_duplicate=False))
        _require_plain(named)
        known = self._weights
        if known is not None and (known.model, known.scale) == (model, scale):
            views = self._views
            if views.keys() == named.keys() and all(_same(named[n], views[n]) for n in views):
                return known
        with lock_of(module):
            kinds = sorted({f"{each.dtype} on {each.device}" for each in named.values()})
            if len(kinds) > 1:
                raise ValueError(
                    f"the weights must have one dtype and one device, got {', '.join(kinds)}."
                )
            own = Weights.of_names(
                model, d_x, d_y, {n: each.detach().clone() for n, each in named.items()}, scale
            )
            if known is not None:
                self._leave(known)
            if len({id(each) for each in named.values()}) < len(named):
                self._leave(own)  # tied parameters: the copy cannot share their memory
                return own
            self._share(module, own)
            return own

    def follow(self, module: nn.Module) -> None:
        """Share memory again after the parameters of a module were replaced, if the weights have been read."""
        if (known := self._weights) is not None:
            with suppress(ValueError):  # raised when the weights are read
                sizes = {"d_x": known.d_x, "d_y": known.d_y}
                self.of(module, known.model, scale=known.scale, **sizes)

    def _share(self, module: nn.Module, weights: Weights) -> None:
        """Put the parameters of a module into the memory of these weights."""
        views = weights.by_name
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, last = name.rpartition(".")
            if parameter.is_inference():
                parameter = nn.Parameter(views[name], requires_grad=parameter.requires_grad)
                module.get_submodule(owner).register_parameter(last, parameter)
            else:
                parameter.data = views[name]
        self._weights, self._views = weights, views

    def _leave(self, weights: Weights) -> None:
        """Note tensors that the model leaves, so that later edits of them are refused."""
        self._former += [(ref(tensor), tensor._version) for tensor in weights.tensors.values()]

    def _require_unedited(self) -> None:
        self._former = [each for each in self._former if each[0]() is not None]
        # No tensor in a local variable: the traceback of the error would keep it.
        if any(_edited_since(*each) for each in self._former):
            raise ValueError(
                "weights that the model has left (by .to, .double, load_state_dict(assign=True) or tied parameters) were "
                "edited afterwards, which does not reach the model: read `weights` again, edit those, and delete the old ones."
            )


def _require_plain(names: Iterable[str]) -> None:
    """Refuse weights that are computed from other parameters, as after pruning or weight normalisation by torch.

    Raises:
        ValueError: If a parameter has a name that torch gives to the source of such a weight.
    """
    for name in names:
        owner, parametrized, rest = name.partition(".parametrizations.")
        weight = f"{owner}.{rest.split('.')[0]}" if parametrized else name.removesuffix("_orig")
        if weight != name:
            tool = "parametrize.remove_parametrizations" if parametrized else "prune.remove"
            raise ValueError(
                f"{weight} must be a parameter of its own, got one computed from {name}: make it plain by torch.nn.utils.{tool}."
            )


def _edited_since(left: "ref[Tensor]", version: int) -> bool:
    tensor = left()
    return tensor is not None and tensor._version != version


def _can_be_parameters(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are contiguous, of one dtype and device, and each has memory of its own."""
    full = [tensor for tensor in tensors if tensor.numel()]
    apart = len({tensor.untyped_storage().data_ptr() for tensor in full}) == len(full)
    kinds = {(tensor.dtype, tensor.device) for tensor in full}
    return apart and len(kinds) == 1 and all(tensor.is_contiguous() for tensor in full)


def _same(parameter: Tensor, view: Tensor) -> bool:
    """True if both are the same numbers in the same memory."""
    return (
        parameter.data_ptr() == view.data_ptr()
        and parameter.dtype == view.dtype
        and parameter.device == view.device
        and parameter.shape == view.shape
        and parameter.stride() == view.stride()
    )
