"""A second device for machines that have one only: it computes on the processor and refuses to meet its tensors.

PyTorch sees the device "meta", behind whose tensors lie numbers here: what comes out can be compared, bit for bit,
with the processor's. As on a GPU, an operation on tensors of both devices raises, but for numbers, indices and
copies, and so does `.numpy()`. Every copy to the processor and every generator is counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = "meta"
aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class Held(Tensor):
    """A tensor of the pretended device; `held` are its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Held":
        found = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE),
        )
        found.held = held
        return found

    # PyTorch makes the indices of a list where no mode sees them, and they would hold nothing.
    def __getitem__(self, index):
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index, value) -> None:
        super().__setitem__(_without_lists(index), value)

    # As every tensor has them, but for subclasses.
    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if not force:
            raise TypeError("can't convert a tensor of the pretended device to numpy.")
        return self.detach().cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, op, types, args: Sequence = (), kwargs: Mapping | None = None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        found = op(*_inside(args), **_inside(kwargs))
        if device is not None and torch.device(device).type == "cpu":
            return found  # asked for there, a copy or a new tensor: numbers of its own
        if op is aten.copy_.default and not isinstance(args[0], Held):
            return args[0]
        found = tree_map_only(Tensor, Held, found)
        return return_and_correct_aliasing(op, args, kwargs, found)


class Pretended(TorchDispatchMode):
    """The rules of the device, and the count of what a host waits for."""

    def __init__(self):
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, op, types, args: Sequence = (), kwargs: Mapping | None = None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if not isinstance(tensor, Held)]
        away = kwargs.get("device") == torch.device(DEVICE)
        if len(here) == len(tensors):
            if not away:
                return op(*args, **kwargs)
            return Held(op(*args, **kwargs | {"device": torch.device("cpu")}))
        self._require_one_device(op, args, here)
        self._count(op, args, kwargs)
        return op(*args, **kwargs)

    def _require_one_device(self, op, args: Sequence, here: list[Tensor]) -> None:
        strangers = [tensor for tensor in here if tensor.ndim or torch.Tag.pointwise not in op.tags]
        if op in INDEXED:
            indices = [index for index in args[1] if index is not None]
            strangers = [one for one in strangers if not any(one is index for index in indices)]
        if strangers and op is not aten.copy_.default:
            raise RuntimeError(
                f"{op}: expected all tensors to be on the same device, got one of "
                f"{list(strangers[0].shape)} on the processor."
            )

    def _count(self, op, args: Sequence, kwargs: Mapping) -> None:
        if op is aten._local_scalar_dense.default:
            self.seen["item"] += 1
        to_processor = op is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if to_processor or (op is aten.copy_.default and not isinstance(args[0], Held)):
            self.seen["copy"] += 1
        by_mask = op in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or op in (aten.nonzero.default, aten.masked_select.default):
            self.seen["size"] += 1  # a shape that depends on numbers


@contextmanager
def pretended() -> Iterator[Counter[str]]:
    """A context with the device, which gives the counts of "item", "copy", "size" and "generator"."""
    mode = Pretended()

    with mode, generators(mode.seen), fused_adam():
        yield mode.seen


@contextmanager
def generators(seen: Counter[str]) -> Iterator[None]:
    """A context in which a generator of any device can be had; those of other devices than the processor count."""

    class Generator(torch.Generator):
        """Of the processor, under the name of the device that is asked for."""

        def __new__(cls, device: torch.device | str = "cpu"):
            own = super().__new__(cls, device="cpu")
            own.named = torch.device(device)
            seen["generator"] += own.named.type != "cpu"
            return own

        @property
        def device(self) -> torch.device:
            return self.named

    with mock.patch("torch.Generator", Generator):
        yield


@contextmanager
def fused_adam() -> Iterator[None]:
    """A context in which PyTorch's fused Adam is not refused on a device that is none."""
    with mock.patch("torch.optim.adam._device_dtype_check_for_fused", return_value=None):
        yield


def _without_lists(index):
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    if isinstance(index, list | np.ndarray):
        return torch.as_tensor(index, dtype=None if len(index) else torch.long)
    return index


def _inside(tree):
    return tree_map_only(Held, lambda tensor: tensor.held, tree)
