"""TransformerLens' hook points on the heads and the stream of a plain module.

Nothing of its forward is replaced: torch's own hooks stand where the heads' outputs enter the output projection, and where
a layer begins and ends, and hand what passes to the hook points.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.followed import (
    POINTS,
    Following,
    Inner,
    Running,
    attach,
    behind_values,
)
from mechinterp.models.hooked.hooks import CheckedHooks


@dataclass(frozen=True)
class Place:
    """Where a block of attention is in a module."""

    output: str
    """Name of what takes the heads' outputs side by side: a module, or a torch.nn.MultiheadAttention."""
    block: str
    """Name of the layer around it; "" is the whole module."""
    n_heads: int
    d_head: int
    heads_turned: bool
    """Whether the heads' outputs are [pos, batch, ...]."""
    stream_turned: bool
    one_number: bool
    """Whether what leaves the layer is one number for each position, [batch, pos]."""
    inner: Inner
    """What is in front of the output."""


@dataclass(eq=False)
class ModuleSizes:
    """What TransformerLens' tools look for in `cfg`, as far as a plain module has it."""

    n_layers: int
    n_heads: int
    device: str
    dtype: torch.dtype
    d_model: int = 0
    d_head: int = 0
    d_token: int = 0
    n_ctx: int = 0
    n_key_value_heads: None = None
    use_attn_in: bool = False
    use_split_qkv_input: bool = False

    def switch_of(self, name: str) -> None:
        """All hook points are on."""


class ModuleHooks(CheckedHooks):
    """A module with `blocks.{l}.attn.hook_z`, `blocks.{l}.hook_resid_pre` and `hook_resid_post`, and where its attention can be
    followed `blocks.{l}.attn.hook_q`, `hook_k`, `hook_v`, `hook_attn_scores` and `hook_pattern`; `unfollowed` says why not.

    z is [batch, pos, head, d_head], the stream [batch, pos, width], with one position where a layer is at the query only.
    A block that runs several times has points of its own for each run: layers are numbered in the order in which they run.
    The module is changed: the output projection of a torch.nn.MultiheadAttention is applied after it.

    Raises:
        ValueError: When it runs, if heads cannot be told apart in the width of what enters an output projection, a block runs
            more often than at first, or the module does not run on an input of a length that it has not run on before.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, places: Sequence[Place], order: Sequence[int]) -> None:
        """The module with hooks.

        Args:
            order: Place of each layer, in the order in which they run.
        """
        super().__init__()
        self.module = module
        self._lengths: set[int] = set()
        self._running = Running()
        self.unfollowed: dict[int, str] = {}
        """Why points of a layer are left out, by its number."""
        blocks = [_Block(places[place]) for place in order]
        self._runs = [
            _Runs(place.block, [block for at, block in zip(order, blocks, strict=True) if at == n])
            for n, place in enumerate(places)
        ]
        for place, runs in zip(places, self._runs, strict=True):
            _attach(module, place, runs)
            attach(module, place.inner, runs, place.heads_turned, self._running)
        self.blocks = nn.ModuleList(blocks)
        parameter = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        self.cfg = ModuleSizes(  # type: ignore[assignment]
            len(order), places[0].n_heads, str(parameter.device), parameter.dtype
        )
        self.eval()
        self.setup()

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's own output."""
        length = inputs.shape[1]
        for runs in self._runs:
            runs.now = -1
        try:
            with Following(self._running) if self._followed() else nullcontext():
                # Hooks that write in place leave the caller's input alone.
                output = self.module(inputs.clone())
        except (AssertionError, IndexError, RuntimeError) as error:
            if isinstance(error, ValueError) or length in self._lengths:
                raise
            reason = " ".join(str(error).split())
            raise ValueError(
                f"module must run on the input {list(inputs.shape)}, got: {reason}."
            ) from error
        self._lengths.add(length)
        return output

    def _followed(self) -> bool:
        """Whether a hook is on a point within attention, so that it is computed step by step."""
        points = [getattr(b.attn, name, None) for b in self.blocks for name in POINTS]
        return any(point is not None and (point.fwd_hooks or point.bwd_hooks) for point in points)


@dataclass(eq=False)
class _Runs:
    """The layers that one block of a module stands for, one for each of its runs."""

    block: str
    layers: list["_Block"]
    now: int = -1
    """Number of the run that goes on."""

    @property
    def layer(self) -> "_Block":
        return self.layers[self.now]

    @property
    def heads(self) -> "_Heads":
        return self.layer.attn

    def begin(self) -> None:
        """Go on to the next run.

        Raises:
            ValueError: If there were only so many on the first input.
        """
        self.now += 1
        if self.now == len(self.layers):
            raise ValueError(
                f"{self.block} must run as often as on the first input, {len(self.layers)} times, got one more run."
            )


class _Block(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.attn = _Heads(place.n_heads, place.d_head)
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()


class _Heads(nn.Module):
    projection: nn.Module
    """Output projection of a torch.nn.MultiheadAttention, in its place."""
    output: tuple[nn.Module]
    """What takes the heads' outputs side by side; in a tuple, being a part of the module already."""
    hook_z: HookPoint

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_head
        self.passed: dict[str, Tensor] = {}
        """Queries, keys, values and pattern of the run that goes on, and what changes of single heads add to them."""
        self.factor = 1.0
        """Factor on the products of queries and keys."""
        self.mask = ""
        """Which keys attention without a softmax reads, a name of `LINEAR_MASKS`; "" with a softmax."""
        for name in (*POINTS, "hook_z"):
            self.add_module(name, HookPoint())

    def written(self, z: Tensor) -> Tensor:
        """What each head writes, [batch, pos, head, width], without the bias, where the heads' outputs are z."""
        (output,) = self.output
        alone = torch.eye(self.n_heads, dtype=z.dtype, device=z.device)[:, :, None]
        alone = z[:, :, :, None] * alone
        return output(alone.flatten(-2)) - output(torch.zeros_like(z).flatten(-2))[:, :, None]


# Partial functions rather than closures, so that a copy of the model runs through its own hook points.
def _attach(module: nn.Module, place: Place, runs: _Runs) -> None:
    output, block = module.get_submodule(place.output), module.get_submodule(place.block)
    heads = partial(_through_heads, runs, place.n_heads, place.heads_turned)
    if isinstance(output, nn.MultiheadAttention):
        # A hook on it also keeps torch from the fused layer, which passes it by.
        projection, output.out_proj = output.out_proj, _identity(output.out_proj)
        for layer in runs.layers:
            layer.attn.projection, layer.attn.output = projection, (projection,)
        output.register_forward_hook(partial(_project, heads, projection))
    else:
        for layer in runs.layers:
            layer.attn.output = (output,)
        output.register_forward_pre_hook(partial(_enter, heads))
    before = partial(_before, runs, place.stream_turned)
    after = partial(_after, runs, place.stream_turned, place.one_number)
    block.register_forward_pre_hook(partial(_begin, before), with_kwargs=True)
    block.register_forward_hook(partial(_end, after))


def _identity(projection: nn.Linear) -> NonDynamicallyQuantizableLinear:
    """A projection that changes nothing, made without random numbers: somebody's training may go on."""
    weight, width = projection.weight, len(projection.weight)
    factory: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    biased = projection.bias is not None
    same = nn.utils.skip_init(NonDynamicallyQuantizableLinear, width, width, bias=biased, **factory)
    with torch.no_grad():
        same.weight.copy_(torch.eye(width, **factory))
        if biased:
            same.bias.zero_()
    return same.requires_grad_(False).eval()


def _through_heads(runs: _Runs, n_heads: int, turned: bool, values: Tensor) -> Tensor:
    if values.shape[-1] % n_heads:
        raise ValueError(
            f"heads must divide the width of the heads' outputs, {values.shape[-1]}, got {n_heads}."
        )
    if values.ndim == 2:  # at the query only
        return _through_heads(runs, n_heads, turned, values[:, None])[:, 0]
    z = values.unflatten(-1, (n_heads, -1))
    z = behind_values(runs.heads, z.transpose(0, 1) if turned else z)
    z = runs.heads.hook_z(z)
    return (z.transpose(0, 1) if turned else z).flatten(-2)


def _project(
    heads: partial, projection: nn.Module, _: nn.Module, args: tuple, output: tuple
) -> tuple:
    values, pattern = output
    return projection(heads(values)), pattern


def _enter(heads: partial, _: nn.Module, args: tuple) -> tuple:
    return heads(args[0]), *args[1:]


def _before(runs: _Runs, turned: bool, values: Tensor) -> Tensor:
    runs.begin()
    return _through_stream(runs.layer.hook_resid_pre, turned, False, values)


def _after(runs: _Runs, turned: bool, one_number: bool, values: Tensor) -> Tensor:
    return _through_stream(runs.layer.hook_resid_post, turned, one_number, values)


def _through_stream(point: HookPoint, turned: bool, one_number: bool, values: Tensor) -> Tensor:
    """The values behind a hook point, where they are [batch, pos, width]."""
    if values.ndim < 3:
        axes = (len(values), -1, 1) if one_number else (len(values), 1, -1)
        return point(values.reshape(axes)).reshape(values.shape)
    return point(values.transpose(0, 1)).transpose(0, 1) if turned else point(values)


def _begin(through: partial, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if args:
        return (through(args[0]), *args[1:]), kwargs
    first = first_tensor(kwargs)
    return args, {**kwargs, first: through(kwargs[first])}


def _end(
    through: partial, _: nn.Module, args: tuple, output: Tensor | tuple | dict
) -> Tensor | tuple | dict:
    if isinstance(output, dict):  # of Hugging Face
        first = first_tensor(output)
        return type(output)(**{**output, first: through(output[first])})
    return (through(output[0]), *output[1:]) if isinstance(output, tuple) else through(output)


def stream_of(output: Tensor | tuple | dict) -> Tensor:
    """The tensor that a layer hands on, of what it returns."""
    if isinstance(output, dict):
        return output[first_tensor(output)]
    return output[0] if isinstance(output, tuple) else output


def first_tensor(arguments: dict) -> str:
    """Name of the first argument that is a tensor."""
    return next(name for name, value in arguments.items() if isinstance(value, Tensor))
