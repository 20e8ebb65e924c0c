"""Places of the attention layers in a plain torch module, found by names and by running it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mechinterp.checkpoints.foreign.names import ATTENTION, INNER, TABLE, Piece, piece_of
from mechinterp.checkpoints.module_input import Trial
from mechinterp.models.hooked.delta_layers import delta_names, number_of_heads
from mechinterp.models.hooked.followed import BY_HEAD, SOFTMAX, Inner
from mechinterp.models.hooked.module import Place, first_tensor, stream_of

IN_MODULES = {"query_key_value": "qkv", "q_b_proj": "q_proj", "kv_b_proj": "kv_proj"}
"""Projections of GPT-NeoX, Bloom and Falcon (packed by head) and of DeepSeek, whose layout in files is not read."""
HEAD_KEYS = TABLE["counts"]["n_heads"].split()
"""Attributes of a module that state its number of heads."""
PROJECTION_PARTS = (*ATTENTION, BY_HEAD)
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
_PROJECTED = ({"q", "k", "v"}, {"qkv"}, {BY_HEAD}, {"q", "kv"})
# Names of autograd's operations, without "Backward0".
SUMS = (
    "Add Sub Mul Div Pow Rsqrt NativeLayerNorm FusedRms FusedRmsNorm NativeGroupNorm NativeDropout"
)
SHAPES = """
View UnsafeView Reshape ReshapeAlias Transpose Permute Clone T Slice Select Unsqueeze Squeeze
Expand ToCopy Cat Alias Split SplitWithSizes Unbind Index Stack
"""
HIDDEN = "Gelu Relu Silu Tanh Sigmoid Elu Softplus LeakyRelu"
_PASSED = {*SUMS.split(), *SHAPES.split(), *HIDDEN.split()}
"""Operations through which the products behind a value are traced."""
_PROJECTIONS = {"AddmmBackward0", "MmBackward0"}


def layer_names(trial: Trial, outputs: Sequence[str]) -> list[str]:
    """For each layer the name of the module that takes the heads' outputs, in order of running.

    A module that runs several times counts as a layer each time.

    Args:
        outputs: Stated names; empty: they are searched for.
    Raises:
        ValueError: If a stated name is not a module, none is found, or a module does not run.
    """
    given = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = dict(trial.module.named_modules())
    for name in given:
        if name not in known:
            if name in dict(trial.module.named_parameters()):
                raise _is_parameter(name)
            raise ValueError(
                f"outputs must be names of modules, as {trial.name}.named_modules() gives them, got {name!r}."
            )
    ran = _order(trial)
    names = given or _first_of_each(trial.module, _outputs(trial.module), ran)
    for name in names:
        if name not in ran:
            raise ValueError(f"{name} must run for a prediction, got 0 times.")
    return [name for name in ran if name in names]


def _first_of_each(module: nn.Module, names: Sequence[str], ran: Sequence[str]) -> list[str]:
    """Names without those of modules that run after another one of the same parent, such as a read-out `out` after `o_proj`.

    Whole attentions and entries of a list are layers of their own.
    """
    first: dict[str, str] = {}
    layers: set[str] = set()
    for name in sorted(names, key=lambda name: ran.index(name) if name in ran else len(ran)):
        parent, _, last = name.rpartition(".")
        if last.isdecimal() or isinstance(module.get_submodule(name), nn.MultiheadAttention):
            layers.add(name)
        else:
            first.setdefault(parent, name)
    return [name for name in names if name in layers or name in first.values()]


def _order(trial: Trial) -> list[str]:
    """Names of all modules in order of running."""
    ran: list[str] = []
    with ExitStack() as hooks:
        for name, part in trial.module.named_modules():
            note = part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
            hooks.enter_context(note)
        trial.run()
    return ran


def _outputs(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the heads' outputs, by the table of known names."""
    modules = dict(module.named_modules())
    names = {name for name, part in modules.items() if isinstance(part, nn.MultiheadAttention)}
    pieces = [
        each
        for each in weights_of(module)
        if not any(each.name.startswith(f"{attention}.") for attention in names)
    ]
    inner = {(each.path, each.layer) for each in pieces if each.part in (*INNER, BY_HEAD)}
    found = [p.name for p in pieces if p.part == "o" and (p.path, p.layer) in inner]
    names |= modules.keys() & {name.removesuffix(".weight") for name in found}
    names |= {each.output for each in delta_names(module)}
    if not names and found:
        raise _is_parameter(found[0])
    if not names:
        raise ValueError(
            f"outputs must name the modules that take the heads' outputs: a {type(module).__name__} has no "
            "MultiheadAttention, and no module such as o_proj beside q_proj, k_proj and v_proj. Without heads, compare_learners, "
            "name_algorithm and response take a function of prompts, such as lambda prompts: model(prompts.tokens)[:, -1, -1:]."
        )
    return tuple(names)


def weights_of(module: nn.Module) -> list[Piece]:
    """Parts of a model that the names of a module's weights, or of its projections, stand for.

    The tensors of a wrapped projection have other names (LoRA's base_layer, parametrizations, int8), so the path of
    the module counts as well.
    """
    # Layers that share a tensor list it under several names.
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    pieces = [piece for name in names if (piece := _piece(name)) is not None]
    for path, part in module.named_modules(remove_duplicate=False):
        name = f"{path}.weight"
        if _has_numbers(part) and not any(
            f"{each.name}.".startswith(f"{path}.") for each in pieces
        ):
            piece = _piece(name)
            pieces += [piece] if piece is not None and piece.part in PROJECTION_PARTS else []
    paths = [each.name.removesuffix(".weight") for each in pieces]
    outer = {path for path in paths if any(each.startswith(f"{path}.") for each in paths)}
    return [each for each, path in zip(pieces, paths, strict=True) if path not in outer]


def _piece(name: str) -> Piece | None:
    """Part of a model that the name of a weight stands for."""
    words = name.split(".")
    piece = piece_of(".".join(IN_MODULES.get(word, word) for word in words))
    if piece is None or piece.kind != "weight":
        return None
    part = BY_HEAD if "query_key_value" in words else piece.part
    # BERT has the projections in a module "self", beside the output projection.
    path = tuple(word for word in piece.path if word != "self")
    return replace(piece, name=name, part=part, path=path)


def _has_numbers(part: nn.Module) -> bool:
    """True for a module that can be a projection: it has numbers, or is no module of torch.nn."""
    if isinstance(part, NOT_CALLED):
        return False
    own = next(part.parameters(), None) is not None or next(part.buffers(), None) is not None
    return own or not type(part).__module__.startswith("torch.nn.modules")


def _is_parameter(name: str) -> ValueError:
    last = name.rpartition(".")[2]
    return ValueError(
        f"outputs must be modules, got the Parameter {name}: make it an nn.Linear(n_heads * d_head, d_model, bias=False) "
        f"with the transpose of {last} as its weight, and call self.{last}(z) on the heads' outputs z, side by side."
    )


def places_of(trial: Trial, order: Sequence[str], heads: int | None) -> list[Place]:
    """Places of the attention blocks in order of their first run; all have the same number of
    heads.

    Raises:
        ValueError: If the number of heads is not stated, contradicts the module or differs between
            layers, a layer is not a separate module, or the assumed outputs of heads are the
            stream.
    """
    names, ran = list(dict.fromkeys(order)), Counter(_order(trial))
    blocks = {name: _block(trial.module, name, names, ran) for name in names}
    require_heads_outputs(trial, blocks)
    places = [_place(trial, name, blocks[name], heads) for name in names]
    counts = sorted({place.n_heads for place in places})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        raise ValueError(f"heads must be the same number in every layer, got {listed}.")
    return places


def _place(trial: Trial, name: str, block: str, heads: int | None) -> Place:
    heads_in, _ = _shapes(trial, name)
    stream_in, stream_out = _shapes(trial, block)
    inner = _inner(trial.module, name, block)
    n_heads = _number_of_heads(trial, name, inner, heads)
    width, n_prompts = heads_in[-1], len(trial.tokens)
    if width % n_heads:
        raise ValueError(
            f"heads must divide the width of the heads' outputs, {width}, got {n_heads}."
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
    if set(projections) not in _PROJECTED:
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


def _number_of_heads(trial: Trial, name: str, inner: Inner, heads: int | None) -> int:
    """Number of heads: from the module, or the user.

    Raises:
        ValueError: If it is unknown, or the two differ.
    """
    own, source = next(_heads_shown(trial, name, inner), (heads, ""))
    if own is None:
        raise ValueError(
            f"heads must be given: the module around {name} states no number; pass heads= (--n-heads)."
        )
    if heads not in (None, own):
        raise ValueError(f"heads must be {own}, the number in {source}, got {heads}.")
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
    """The largest module around a layer's outputs that contains no other layer and runs as often."""
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


def require_heads_outputs(trial: Trial, blocks: dict[str, str]) -> None:
    """Refuse modules whose input is the stream or hidden units of an MLP; outputs of heads are
    products of weights and values.

    Sums, norms, shape changes and activations are traced back to the products behind them.

    Raises:
        ValueError: If there is such a module; the message names the first one.
    """
    module, entered = trial.module, dict[str, Tensor]()

    def mark(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_Marked.apply(args[0]), *args[1:]), kwargs
        first = first_tensor(kwargs)
        return args, {**kwargs, first: _Marked.apply(kwargs[first])}

    others = [n for n in blocks if not isinstance(module.get_submodule(n), nn.MultiheadAttention)]
    with ExitStack() as hooks, torch.enable_grad():
        for name in others:
            block, part = module.get_submodule(blocks[name]), module.get_submodule(name)
            note = partial(_note_input, noted=entered, name=name)
            hooks.enter_context(block.register_forward_pre_hook(mark, with_kwargs=True))
            hooks.enter_context(part.register_forward_pre_hook(note, with_kwargs=True))
        with suppress(RuntimeError):  # numpy in forward does not run with gradients
            trial.run(trial.tokens.detach().clone().requires_grad_())
    for name, values in entered.items():
        made_of = set(_factors(values.grad_fn))
        what = "hidden units" if made_of and made_of <= _PROJECTIONS else ""
        what = "the residual stream" if "_MarkedBackward" in made_of else what
        if what:
            raise ValueError(
                f"outputs must name modules whose input is the heads' outputs side by side; the input of {name!r} is {what}."
            )


class _Marked(torch.autograd.Function):
    """Marks the stream, so that it is recognised in values computed from it."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor) -> Tensor:
        return stream.clone()  # a view could not be written into

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _note_input(
    _: nn.Module, args: tuple, kwargs: dict, noted: dict[str, Tensor], name: str
) -> None:
    """Hook that stores the input of a part of a module in its first run."""
    noted.setdefault(name, args[0] if args else kwargs[first_tensor(kwargs)])


def _factors(node: Any) -> Iterator[str]:
    """Names of the operations behind sums, norms, shape changes and activations."""
    seen, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().rpartition("::")[2]
        if name.partition("Backward")[0].strip("_") in _PASSED:
            ahead.extend(each for each, _ in node.next_functions)
        else:
            yield name


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

    note = partial(_note_input, noted=entered, name=output)
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
