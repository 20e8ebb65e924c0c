"""TransformerLens' hook points on the heads and the residual stream of a plain module.

The module's forward is not replaced. torch's own hooks sit at the input of each output projection and at the start and end
of each layer; they pass the tensors to the hook points.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.arguments import Split, whole
from mechinterp.models.hooked.checked_hooks import CheckedHooks
from mechinterp.models.hooked.delta_layers import DELTA_POINTS, DeltaLayer
from mechinterp.models.hooked.followed import (
    POINTS,
    Following,
    HeadPoints,
    Inner,
    Running,
    behind_values,
    projected,
)
from mechinterp.models.hooked.stream_calls import Calls


@dataclass(frozen=True)
class Place:
    """Location of an attention block in a module."""

    output: str
    """Name of the module that gets the heads' outputs side by side: output projection or torch.nn.MultiheadAttention."""
    block: str
    """Name of the layer that contains it; "" is the whole module."""
    n_heads: int
    d_head: int
    heads_turned: bool
    """True: the heads' outputs are [pos, batch, ...]."""
    stream_turned: bool
    one_number: bool
    """True: the layer's output is one number per position, [batch, pos]."""
    inner: Inner
    """Modules that compute queries, keys and values."""


@dataclass(eq=False)
class ModuleSizes:
    """Sizes that TransformerLens' tools read from `cfg`, as far as a plain module has them."""

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
        """Switch of a hook point: None, since all points are on."""


class ModuleHooks(CheckedHooks):
    """A plain module with TransformerLens' hook points on its heads and its stream.

    Always present: `blocks.{l}.attn.hook_z`, `blocks.{l}.hook_resid_pre` and `hook_resid_post`. If the attention can be followed:
    `blocks.{l}.attn.hook_q`, `hook_k`, `hook_v`, `hook_attn_scores` and `hook_pattern`; else `unfollowed` gives the reason.
    Recurrent layers of transformers and flash-linear-attention have `hook_gate` and `hook_beta` instead of scores; their
    pattern times v is what they give to their norm, and z what the norm gives to the output projection.

    z is [batch, pos, head, d_head] and the stream [batch, pos, width], with one position if a layer runs at the query only.
    A block that runs several times is one layer per run; layers are numbered in the order in which they run. The stream is the
    input and the output of each block, or, if the sums with it stand outside the blocks, the results of torch calls.
    The module is changed: a torch.nn.MultiheadAttention applies its output projection in a hook after its forward.

    Raises:
        ValueError: When it runs, if the number of heads does not divide the width of their outputs, if a block runs
            more often than on the first input, or if the module fails on an input of a new length.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[Place],
        order: Sequence[int],
        split: Split = whole,
    ) -> None:
        """Add hook points to a module.

        Args:
            order: Index into `places` of each layer, in the order in which the layers run.
            split: Function from the input to the arguments of the module.
        """
        super().__init__()
        self.module, self.split = module, split
        self.places = tuple(places)
        self._lengths: set[int] = set()
        self.running = Running()
        self.unfollowed: dict[int, str] = {}
        """Reason why hook points of a layer are left out, by layer."""
        blocks = [_Block(places[place]) for place in order]
        self._runs = []
        for n, place in enumerate(places):
            layers = [block for at, block in zip(order, blocks, strict=True) if at == n]
            self._runs.append(_Runs(place, layers, self.running))
            self._runs[-1].attach(module)
        self.blocks, self._layers = nn.ModuleList(blocks), blocks
        parameter = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        self.cfg = ModuleSizes(  # type: ignore[assignment]
            len(order), places[0].n_heads, str(parameter.device), parameter.dtype
        )
        self.eval()
        self.setup()

    def forward(self, inputs: Tensor) -> Any:
        """The module's own output: a tensor, or anything that `read` takes."""
        length = inputs.shape[1]
        for runs in self._runs:
            runs.now = -1
        self.running.depth = self.running.begun = 0
        try:
            with ExitStack() as contexts:
                if torch.get_default_device().type == "meta":
                    # What the module itself creates needs numbers.
                    contexts.enter_context(inputs.device)
                if self._followed():
                    contexts.enter_context(Following(self.running))
                if self._stream_hooked():
                    contexts.enter_context(Calls(self.running, self._through_stream))
                # A copy, so that the module and its hooks may write into the input.
                output = self.module(*self.split(inputs.clone()))
        except (AssertionError, IndexError, RuntimeError) as error:
            if isinstance(error, ValueError) or length in self._lengths:
                raise
            reason = " ".join(str(error).split())
            raise ValueError(
                f"module must run on the input {list(inputs.shape)}, got: {reason}."
            ) from error
        self._lengths.add(length)
        return output

    @property
    def parameter_names(self) -> dict[str, str]:
        """Names in this model of the parameters of the user's module, by their names there.

        The output projection of a torch.nn.MultiheadAttention is moved to its block.
        """
        moved: dict[str, str] = {}
        for runs in self._runs:
            if isinstance(self.module.get_submodule(runs.place.output), nn.MultiheadAttention):
                block = f"blocks.{list(self.blocks).index(runs.layers[0])}.attn.projection"
                path = f"{runs.place.output}.out_proj".removeprefix(".")
                moved |= {f"{path}.{end}": f"{block}.{end}" for end in ("weight", "bias")}
        names = (name for name, _ in self.module.named_parameters())
        return {name: moved.get(name, f"module.{name}") for name in names}

    def _followed(self) -> bool:
        """True if a point within attention has a hook, so that attention must be computed step by step."""
        return any(layer.attn.is_hooked(POINTS) for runs in self._runs for layer in runs.layers)

    def _stream_points(self, layer: int) -> list[HookPoint]:
        """Hook points of the stream after this number of layers, in the order in which it passes them."""
        after = [self._layers[layer - 1].hook_resid_post] if layer else []
        before = [self._layers[layer].hook_resid_pre] if layer < len(self._layers) else []
        return after + before

    def _stream_hooked(self) -> bool:
        """True if the stream is what torch calls return, and one of its points has a hook."""
        points = (p for n in self.running.stream_calls.values() for p in self._stream_points(n))
        return any(point.fwd_hooks or point.bwd_hooks for point in points)

    def _through_stream(self, number: int, is_sum: bool, values: Tensor) -> Tensor:
        """The result of a torch call after the hook points of the stream, if it is the stream."""
        layer = self.running.stream_calls.get(number)
        for point in [] if layer is None else self._stream_points(layer):
            values = self._runs[0].through_stream(point, values)
        return values


class _Block(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.attn = HeadPoints(place.n_heads, place.d_head)
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()


@dataclass(eq=False)
class _Runs:
    """Layers of one block, one per run, and the hooks that pass the block's tensors through their hook points.

    The hooks are methods, not closures, so that a copied model uses its own hook points.
    """

    place: Place
    layers: list[_Block]
    running: Running
    now: int = -1
    """Index of the current run."""

    @property
    def heads(self) -> HeadPoints:
        return self.layers[self.now].attn

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on the parts of the block."""
        place, inner, part = self.place, self.place.inner, module.get_submodule
        output, block, container = part(place.output), part(place.block), part(inner.container)
        if inner.delta is not None:
            delta = DeltaLayer(container, inner.delta, place.n_heads)
            delta.attach()
            for layer in self.layers:
                layer.attn.delta = delta
            part(inner.delta.norm).register_forward_pre_hook(self._before_norm)
        if isinstance(output, nn.MultiheadAttention):
            # This hook also keeps torch from its fused layer, which would skip the hook points.
            projection, output.out_proj = output.out_proj, _identity(output.out_proj)
            for layer in self.layers:
                layer.attn.projection, layer.attn.output = projection, (projection,)
            output.register_forward_hook(self._project)
        else:
            for layer in self.layers:
                layer.attn.output = (output,)
            output.register_forward_pre_hook(self._before_projection)
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end)
        container.register_forward_pre_hook(self._enter)
        container.register_forward_hook(self._leave, always_call=True)
        for parts, name in inner.projections.items():
            part(name).register_forward_hook(partial(self._note_projected, parts))

    def _begin(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Start the next run.

        Raises:
            ValueError: If the block runs more often than on the first input.
        """
        self.now += 1
        self.running.depth += 1
        self.running.begun += 1
        if self.now == len(self.layers):
            raise ValueError(
                f"{self.place.block} must run as often as on the first input, {len(self.layers)} times, got one more run."
            )
        if self.running.stream_calls:
            return args, kwargs
        through = partial(self.through_stream, self.layers[self.now].hook_resid_pre)
        if args:
            return (through(args[0]), *args[1:]), kwargs
        first = first_tensor(kwargs)
        return args, {**kwargs, first: through(kwargs[first])}

    def _end(
        self, block: nn.Module, args: tuple, output: Tensor | tuple | dict
    ) -> Tensor | tuple | dict:
        self.running.depth -= 1
        if self.running.stream_calls:
            return output
        point, one_number = self.layers[self.now].hook_resid_post, self.place.one_number
        stream = self.through_stream(point, stream_of(output), one_number=one_number)
        if isinstance(output, dict):  # Hugging Face's ModelOutput
            return type(output)(**{**output, first_tensor(output): stream})
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    def through_stream(
        self, point: HookPoint, values: Tensor, *, one_number: bool = False
    ) -> Tensor:
        """The values after a hook point, which sees them as [batch, pos, width]."""
        if values.ndim < 3:
            axes = (len(values), -1, 1) if one_number else (len(values), 1, -1)
            return passed(point, values.reshape(axes)).reshape(values.shape)
        turned = self.place.stream_turned
        values = values.transpose(0, 1) if turned else values
        return passed(point, values).transpose(0, 1) if turned else passed(point, values)

    def _enter(self, container: nn.Module, args: tuple) -> None:
        # Attention of a known recurrence is not looked for among the calls of torch.
        self.running.heads = None if self._recurrence() is not None else self.heads
        self.heads.passed.clear()

    def _leave(self, container: nn.Module, args: tuple, output: object) -> None:
        if self.running.heads is not None:
            self.running.heads.passed.clear()
        self.running.heads = None
        if self.heads.delta is not None:
            self.heads.delta.leave()

    def _recurrence(self) -> DeltaLayer | None:
        """The recurrent layer, if its form is known."""
        delta = self.heads.delta
        return None if delta is None or delta.form is None else delta

    def _note_projected(
        self, parts: str, projection: nn.Module, args: tuple, output: Tensor
    ) -> Tensor:
        if self._recurrence() is not None:
            return output
        return projected(self.heads, parts, output, turned=self.place.heads_turned)

    def _before_norm(self, norm: nn.Module, args: tuple) -> tuple:
        """Values that a recurrent layer reads from its state, after the hook points of its parts."""
        if self.heads.delta is not None:
            self.heads.delta.noted["z"] = args[0]
        delta = self._recurrence()
        if delta is None or not self.heads.is_hooked(DELTA_POINTS):
            return args
        return delta.through(self.heads, args[0]), *args[1:]

    def _before_projection(self, output: nn.Module, args: tuple) -> tuple:
        return self._through_heads(args[0]), *args[1:]

    def _project(self, attention: nn.MultiheadAttention, args: tuple, output: tuple) -> tuple:
        _require_identity(attention.out_proj, self.place.output)
        values, pattern = output
        return self.heads.projection(self._through_heads(values)), pattern

    def _through_heads(self, values: Tensor) -> Tensor:
        """The heads' outputs side by side after the hook point, which sees them as [batch, pos, head, d_head]."""
        n_heads, turned = self.place.n_heads, self.place.heads_turned
        if values.shape[-1] % n_heads:
            raise ValueError(
                f"n_heads must divide the width of the heads' outputs, {values.shape[-1]}, got {n_heads}."
            )
        if values.ndim == 2:  # at the query only
            return self._through_heads(values[:, None])[:, 0]
        z = values.unflatten(-1, (n_heads, -1))
        z = self.heads.hook_z(behind_values(self.heads, z.transpose(0, 1) if turned else z))
        return (z.transpose(0, 1) if turned else z).flatten(-2)


def _identity(projection: nn.Linear) -> NonDynamicallyQuantizableLinear:
    """Identity projection, created without random numbers so that the global generator is not advanced."""
    weight, width = projection.weight, len(projection.weight)
    factory: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    biased = projection.bias is not None
    same = nn.utils.skip_init(NonDynamicallyQuantizableLinear, width, width, bias=biased, **factory)
    with torch.no_grad():
        same.weight.copy_(torch.eye(width, **factory))
        if biased:
            same.bias.zero_()
    return same.requires_grad_(False).eval()


def _require_identity(projection: nn.Linear, name: str) -> None:
    """Refuse an edit of the identity that replaces an output projection.

    Raises:
        ValueError: If its weights were edited or loaded.
    """
    weight, bias = projection.weight, projection.bias
    identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    if not torch.equal(weight, identity) or (bias is not None and bias.any()):
        raise ValueError(
            f"module.{name}.out_proj must stay the identity in a hooked copy, got other weights: the projection itself is "
            "blocks[l].attn.projection. To load weights, load them into your module and call hook_module again."
        )


def passed(point: HookPoint, values: Tensor) -> Tensor:
    """The values after a hook point; a copy of what its hooks got, since the module may write into it."""
    after = point(values)
    return after.clone() if point.fwd_hooks or point.bwd_hooks else after


def stream_of(output: Tensor | tuple | dict) -> Tensor:
    """The stream tensor in the output of a layer."""
    if isinstance(output, dict):
        return output[first_tensor(output)]
    return output[0] if isinstance(output, tuple) else output


def first_tensor(arguments: dict) -> str:
    """Name of the first tensor among named values."""
    return next(name for name, value in arguments.items() if isinstance(value, Tensor))
