"""Where the layers of attention are in a plain torch module, found by names and by running it."""

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.names import INNER, piece_of
from mechinterp.checkpoints.foreign.options import HEAD_KEYS
from mechinterp.models.hooked.followed import Inner
from mechinterp.models.hooked.module import Place, first_tensor, stream_of

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)


def layer_names(module: nn.Module, outputs: Sequence[str], inputs: Tensor) -> list[str]:
    """Of each layer the name of the module that takes the heads' outputs, in the order in which they run.

    Args:
        outputs: Names that are given; none: they are found.
    Raises:
        ValueError: If a given name is of no module, none is found, or a module does not run once.
    """
    given = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = dict(module.named_modules())
    for name in given:
        if name not in known:
            raise ValueError(
                f"outputs must be names of modules, as {type(module).__name__}.named_modules() gives them, got {name!r}."
            )
    return _as_they_run(module, given or _outputs(module), inputs)


def _outputs(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the heads' outputs, by the table of names."""
    names = {
        name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)
    }
    pieces = [
        (name.rpartition(".")[0], piece)
        for name, _ in module.named_parameters()
        if name.endswith(".weight") and (piece := piece_of(name)) is not None
    ]
    inner = {(piece.path, piece.layer) for _, piece in pieces if piece.part in INNER}
    names |= {
        name for name, piece in pieces if piece.part == "o" and (piece.path, piece.layer) in inner
    }
    if not names:
        raise ValueError(
            f"outputs must name the modules that take the heads' outputs: a {type(module).__name__} has no "
            "MultiheadAttention, and no module such as o_proj beside q_proj, k_proj and v_proj."
        )
    return tuple(names)


def _as_they_run(module: nn.Module, names: Sequence[str], inputs: Tensor) -> list[str]:
    """The names in the order in which the modules run."""
    ran: list[str] = []
    handles = [
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name in names
    ]
    module(inputs)
    for handle in handles:
        handle.remove()
    for name in names:
        if ran.count(name) != 1:
            raise ValueError(f"{name} must run once for a prediction, got {ran.count(name)} times.")
    return ran


def places_of(
    module: nn.Module, names: Sequence[str], heads: int | None, tokens: Tensor
) -> list[Place]:
    """Where each layer is, all of as many heads.

    Raises:
        ValueError: If heads are not stated or not as many in every layer, or a layer is not in a module of its own.
    """
    places = [_place(module, name, names, heads, tokens) for name in names]
    counts = sorted({place.n_heads for place in places})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        raise ValueError(f"heads must be as many in every layer, got {listed}.")
    return places


def _place(
    module: nn.Module, name: str, names: Sequence[str], heads: int | None, tokens: Tensor
) -> Place:
    block = _block(module, name, names)
    heads_in, _ = _shapes(module, name, tokens)
    stream_in, stream_out = _shapes(module, block, tokens)
    return Place(
        output=name,
        block=block,
        n_heads=_stated_heads(module, name) if heads is None else heads,
        # Positions may come before prompts.
        heads_turned=heads_in[0] != len(tokens),
        stream_turned=stream_in[0] != len(tokens),
        one_number=stream_out == stream_in[:2],
        inner=_inner(module, name),
    )


def _inner(module: nn.Module, output: str) -> Inner | None:
    """What makes queries, keys and values before an output, and the smallest module around them all."""
    if isinstance(module.get_submodule(output), nn.MultiheadAttention):
        return Inner(output, {})
    end = piece_of(f"{output}.weight")
    if end is None:
        return None
    projections: dict[str, str] = {}
    for name, _ in module.named_parameters():
        piece = piece_of(name) if name.endswith(".weight") else None
        if piece is None or piece.part not in ("q", "k", "v", "qkv"):
            continue
        before = name.removesuffix(".weight")
        near = (piece.path, piece.layer) == (end.path, end.layer)
        near = near or before.rpartition(".")[0] == output.rpartition(".")[0]
        if near and piece.part in projections:
            return None  # heads by themselves
        if near:
            projections[piece.part] = before
    if set(projections) not in ({"q", "k", "v"}, {"qkv"}):
        return None
    paths = zip(*(name.split(".")[:-1] for name in (output, *projections.values())), strict=False)
    shared = takewhile(lambda words: len(set(words)) == 1, paths)
    return Inner(".".join(words[0] for words in shared), projections)


def _shapes(module: nn.Module, name: str, tokens: Tensor) -> tuple[torch.Size, torch.Size]:
    """The shapes of what enters a part of the module and of what leaves it."""
    shapes: list[torch.Size] = []

    def note(_: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple | dict) -> None:
        values = args[0] if args else kwargs[first_tensor(kwargs)]
        shapes.extend((values.shape, stream_of(output).shape))

    handle = module.get_submodule(name).register_forward_hook(note, with_kwargs=True)
    module(tokens)
    handle.remove()
    entered, left = shapes
    return entered, left


def _stated_heads(module: nn.Module, name: str) -> int:
    for part in (module.get_submodule(name), module.get_submodule(name.rpartition(".")[0]), module):
        for each in HEAD_KEYS:
            if type(number := getattr(part, each, None)) is int:
                return number
    raise ValueError(f"heads must be given: the module around {name} does not say how many.")


def _block(module: nn.Module, name: str, names: Sequence[str]) -> str:
    """The largest module around a layer's outputs that has no other layer."""
    words = name.split(".")
    attention = isinstance(module.get_submodule(name), nn.MultiheadAttention)
    for count in range(1, len(words) + attention):
        outer = ".".join(words[:count])
        alone = not any(other.startswith(f"{outer}.") for other in names if other != name)
        if alone and not isinstance(module.get_submodule(outer), NOT_CALLED):
            return outer
    if len(names) > 1:
        raise ValueError(f"{name} must lie in a module of its own, which is the layer.")
    return ""
