"""Places of the attention layers in a plain torch module, found by names and by running it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mechinterp.checkpoints.foreign.tensors.names import INNER, TABLE, piece_of
from mechinterp.checkpoints.modules.input import Trial
from mechinterp.checkpoints.modules.names import NOT_CALLED, weights_of
from mechinterp.checkpoints.modules.outputs import note_input, require_heads_outputs, run_order
from mechinterp.models.hooked.delta_layers import delta_names, number_of_heads
from mechinterp.models.hooked.followed import BY_HEAD, SOFTMAX, Inner
from mechinterp.models.hooked.module import Place, first_tensor, stream_of

HEAD_KEYS = TABLE["counts"]["n_heads"].split()
"""Attributes of a module that state its number of heads."""
_PROJECTION_SETS = ({"q", "k", "v"}, {"qkv"}, {BY_HEAD}, {"q", "kv"})


def places_of(trial: Trial, order: Sequence[str], stated: int | None) -> list[Place]:
    """Places of the attention blocks in order of their first run; all have the same number of
    heads.

    Raises:
        ValueError: If the number of heads is not stated, contradicts the module or differs between
            layers, a layer is not a separate module, or the assumed outputs of heads are the
            stream.
    """
    names, ran = list(dict.fromkeys(order)), Counter(run_order(trial))
    blocks = {name: _block(trial.module, name, names, ran) for name in names}
    require_heads_outputs(trial, blocks)
    places = [_place(trial, name, blocks[name], stated) for name in names]
    counts = sorted({place.n_heads for place in places})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        raise ValueError(f"n_heads must be the same number in every layer, got {listed}.")
    return places


def _place(trial: Trial, name: str, block: str, stated: int | None) -> Place:
    heads_in, _ = _shapes(trial, name)
    stream_in, stream_out = _shapes(trial, block)
    inner = _inner(trial.module, name, block)
    n_heads = _number_of_heads(trial, name, inner, stated)
    width, n_prompts = heads_in[-1], len(trial.tokens)
    if width % n_heads:
        raise ValueError(
            f"n_heads must divide the width of the heads' outputs, {width}, got {n_heads}."
        )
    return Place(
        output=name,
        block=block,
        n_heads=n_heads,
        d_head=width // n_heads,
        # Positions may come before prompts in the shape.
        heads_turned=heads_in[0] != n_prompts,
        stream_turned=stream_in[0] != n_prompts,
        one_number=stream_out == stream_in[:2],
        inner=inner,
    )


def _inner(module: nn.Module, output: str, block: str) -> Inner:
    """Modules that make queries, keys and values for an output, and the smallest module around
    them."""
    if isinstance(module.get_submodule(output), nn.MultiheadAttention):
        return Inner(output, {})
    delta = next((each for each in delta_names(module) if each.output == output), None)
    if delta is not None:
        before = f"{delta.container}." if delta.container else ""
        split = {part: before + name for part, name in delta.projections.items() if part in "qkv"}
        return Inner(delta.container, split if len(split) == 3 else {}, delta)
    alone = Inner(output.rpartition(".")[0], {})
    end = piece_of(f"{output}.weight")
    if end is None:
        return alone
    modules, projections = dict(module.named_modules()), {}
    for piece in weights_of(module):
        before = piece.name.removesuffix(".weight")
        if piece.part not in ("q", "k", "v", "kv", "qkv", BY_HEAD) or before not in modules:
            continue
        near = (piece.path, piece.layer) == (end.path, end.layer)
        near = near or before.rpartition(".")[0] == output.rpartition(".")[0]
        if near and piece.part in projections:
            return alone  # separate modules per head
        if near:
            projections[piece.part] = before
    if set(projections) not in _PROJECTION_SETS:
        return alone
    paths = zip(*(name.split(".")[:-1] for name in (output, *projections.values())), strict=False)
    shared = takewhile(lambda words: len(set(words)) == 1, paths)
    container = ".".join(words[0] for words in shared)
    around = container == block or not block or container.startswith(f"{block}.")
    return Inner(container, projections) if around else alone


def _shapes(trial: Trial, name: str) -> tuple[torch.Size, torch.Size]:
    """Shapes of the input and of the output of a part of the module, when it first runs."""
    shapes: list[torch.Size] = []

    def note(_: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple | dict) -> None:
        values = args[0] if args else kwargs[first_tensor(kwargs)]
        shapes.extend((values.shape, stream_of(output).shape))

    with trial.module.get_submodule(name).register_forward_hook(note, with_kwargs=True):
        trial.run()
    return shapes[0], shapes[1]


def _number_of_heads(trial: Trial, name: str, inner: Inner, stated: int | None) -> int:
    """Number of heads: from the module, or the user.

    Raises:
        ValueError: If it is unknown, or the two differ.
    """
    own, source = next(_heads_shown(trial, name, inner), (stated, ""))
    if own is None:
        raise ValueError(
            f"n_heads must be given: the module around {name} states no number; pass n_heads= (--n-heads)."
        )
    if stated not in (None, own):
        raise ValueError(f"n_heads must be {own}, the number in {source}, got {stated}.")
    return own


def _heads_shown(trial: Trial, output: str, inner: Inner) -> Iterator[tuple[int, str]]:
    """Numbers of heads that a module shows, each with its place, the most certain first."""
    module = trial.module
    container = module.get_submodule(inner.container)
    if inner.delta is not None and (number := number_of_heads(container)):
        yield number, f"{inner.container}.num_v_heads".removeprefix(".")
    attention, end = module.get_submodule(output), piece_of(f"{output}.weight")
    if isinstance(attention, nn.MultiheadAttention):
        yield attention.num_heads, f"{output}.num_heads"
    # Heads that are separate modules, such as heads.0.query.
    beside = [p for p in weights_of(module) if end and (p.path, p.layer) == (end.path, end.layer)]
    if apart := {p.head for p in beside if p.part in INNER and p.head is not None}:
        yield len(apart), f"the modules beside {output}"
    if seen := heads_in_softmax(trial, output, inner.container):
        yield seen, f"the softmax in {inner.container or trial.name}"
    for where in (output, output.rpartition(".")[0], ""):
        for key in HEAD_KEYS:
            if type(number := getattr(module.get_submodule(where), key, None)) is int:
                yield number, f"{where}.{key}".removeprefix(".")


def _block(module: nn.Module, name: str, names: Sequence[str], ran: Counter[str]) -> str:
    """Name of the largest module around a layer's outputs that contains no other layer and runs equally often."""
    words = name.split(".")
    attention = isinstance(module.get_submodule(name), nn.MultiheadAttention)
    for count in range(1, len(words) + attention):
        outer = ".".join(words[:count])
        alone = not any(other.startswith(f"{outer}.") for other in names if other != name)
        called = not isinstance(module.get_submodule(outer), NOT_CALLED)
        if alone and called and ran[outer] == ran[name]:
            return outer
    if len(names) > 1 or ran[name] > 1:
        raise ValueError(f"{name} must lie in a separate module, the layer.")
    return ""


def heads_in_softmax(trial: Trial, output: str, container: str) -> int:
    """Number of heads in the only softmax of a part; 0 if there is none over [batch, head, query, key], or several.

    Differential attention has two softmaxes for each head. So the first head of the softmax is set to 0: if this changes
    2/n of the heads' outputs, there are n/2 heads. If it changes all outputs, heads are mixed (talking heads), and the number
    is that of the softmax.

    Args:
        output: Name of the module that takes the heads' outputs.
        container: Name of the part.
    """
    seen, before = _softmaxes(trial, output, container, without_first=False)
    if len(seen) != 1:
        return 0
    _, after = _softmaxes(trial, output, container, without_first=True)
    changed, width = int((before != after).flatten(0, -2).any(0).sum()), before.shape[-1]
    if changed * seen[0] <= width or changed == width:
        return seen[0]
    return 0 if width % changed else width // changed


def _softmaxes(
    trial: Trial, output: str, container: str, without_first: bool
) -> tuple[list[int], Tensor]:
    """Numbers of heads of the softmaxes in the first run of a part, and the heads' outputs."""
    mode = _Softmaxes(len(trial.tokens), without_first)
    part = trial.module.get_submodule(container)
    entered: dict[str, Tensor] = {}

    def enter(*_: Any) -> None:
        mode.inside, mode.runs = mode.runs == 0, mode.runs + 1

    def leave(*_: Any) -> None:
        mode.inside = False

    note = partial(note_input, noted=entered, name=output)
    outputs = trial.module.get_submodule(output)
    with (
        part.register_forward_pre_hook(enter),
        part.register_forward_hook(leave),
        outputs.register_forward_pre_hook(note, with_kwargs=True),
        mode,
    ):
        trial.run()
    return mode.seen, entered[output]


class _Softmaxes(TorchFunctionMode):
    """Records the number of heads of each softmax over [batch, head, query, key] while it is inside
    a part."""

    def __init__(self, n_prompts: int, without_first: bool) -> None:
        super().__init__()
        self.n_prompts, self.without_first = n_prompts, without_first
        self.inside, self.runs, self.seen = False, 0, list[int]()

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Make the call and record its number of heads."""
        result = func(*args, **(kwargs or {}))
        if not self.inside or func not in (*SOFTMAX, F.scaled_dot_product_attention):
            return result
        axes, n = result.ndim, self.n_prompts
        if (axes == 4 and len(result) == n) or (axes == 3 and len(result) % n == 0):
            by_head = result.reshape(n, -1, *result.shape[-2:])
            self.seen.append(by_head.shape[1])
            if self.without_first:
                kept = torch.ones_like(by_head)
                kept[:, 0] = 0
                return (by_head * kept).reshape(result.shape)
        return result
