"""State dict of a hooked module, under names that show the part that each tensor plays.

A file shows names and shapes alone. A module in memory runs: the order of its parts shows which norm comes first, and where
the read-in and the read-out are. Wrapped projections, such as LoRA, show the matrix that they multiply by.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.tensors.layout import layout_of
from mechinterp.checkpoints.foreign.tensors.names import piece_of
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.checkpoints.modules.names import PROJECTION_PARTS, weights_of
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.module import Place

ROLES = {
    "norm1": "norm1",
    "norm2": "norm2",
    "final_norm": "final_norm",
    "mlp_in": "mlp.0",
    "mlp_out": "mlp.2",
    "read_in": "read_in",
    "read_out": "read_out",
}
"""Known name of a module for each part of a model."""


@dataclass(frozen=True)
class BlockParts:
    """Paths of the norms and the linear parts of a block outside its attention, in order of running."""

    prefix: str
    """Path under which files have the attention of the block, up to the number of its layer."""
    before: tuple[tuple[str, ...], tuple[str, ...]]
    """Norms and linear parts that run before the attention."""
    after: tuple[tuple[str, ...], tuple[str, ...]]
    alone: bool
    """True: there is no other block, so that a read-in, a read-out and a last norm may lie in it."""

    @property
    def mlp(self) -> tuple[str, ...]:
        """The two matrices of the MLP; empty if there is no plain one."""
        linear = self.after[1]
        return linear[:2] if len(linear) == 2 or (self.alone and len(linear) == 3) else ()

    @property
    def ends(self) -> dict[str, str]:
        """Read-in, read-out and last norm in the only block: the part by path."""
        rest, norms = self.after[1][len(self.mlp) :], self.after[0]
        ends = {}
        if self.alone and len(self.before[1]) == 1:
            ends[self.before[1][0]] = "read_in"
        if self.alone and len(rest) == 1:
            ends[rest[0]] = "read_out"
        if self.alone and self.before[0] and len(norms) == (2 if self.mlp else 1):
            ends[norms[-1]] = "final_norm"
        return ends

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of the layer."""
        return tuple(path for path in (*self.before[0], *self.after[0]) if path not in self.ends)

    @property
    def place(self) -> str | None:
        """Place of the norms: "before" or "after"; None if it is not clear."""
        if self.before[0]:
            return "before"
        return "after" if len(self.norms) == (2 if self.mlp else 1) else None

    @property
    def roles(self) -> dict[str, str]:
        """Part that each of them plays, by path; a lone norm between attention and MLP is the MLP's."""
        lone = len(self.norms) == 1 and not self.before[0] and self.mlp
        names = ("norm2",) if lone else ("norm1", "norm2")
        of_mlp = zip(self.mlp, ("mlp_in", "mlp_out"), strict=False)
        return {**dict(zip(self.norms, names, strict=False)), **dict(of_mlp)}


@dataclass(frozen=True)
class ModuleParts:
    """Parts of a module outside its attention, by the order in which they run."""

    blocks: tuple[BlockParts, ...]
    ends: Mapping[str, str]
    """Read-in, read-out and final norm: the part by path."""


@torch.no_grad()
def state_of(module: HookedModule, parts: ModuleParts) -> dict[str, Tensor]:
    """Tensors of the module as the user wrote it, under known names where the order of running shows the part."""
    own, model = module.model.module, module.model
    state = dict(own.state_dict())
    for layer, block in enumerate(module.hooked.blocks):
        path = model.places[block].output
        if isinstance(
            own.get_submodule(path), nn.MultiheadAttention
        ):  # hooks took out its projection
            projection = model.blocks[layer].get_submodule("attn.projection")
            state |= {f"{path}.out_proj.{n}": t for n, t in projection.state_dict().items()}
    modules = dict(own.named_modules())
    wrapped = [each.name.removesuffix(".weight") for each in weights_of(own)]
    wrapped += [path for path, part in modules.items() if isinstance(part, nn.Linear)]
    for path in dict.fromkeys(wrapped):
        if path in modules and f"{path}.weight" not in state:
            state = _unwrapped(state, path, modules[path])
    for place in model.places:
        state |= _keys_of_every_head(state, place)
    return _without_unknown(_renamed(state, _known_names(parts)))


def _without_unknown(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state without tensors that are no part of a layer by name, such as stored masks and temperatures.

    The module's predictions prove that they change nothing, or what they change, such as the scale, is seen in a run.
    """
    layout = layout_of(state)
    return {n: t for n, t in state.items() if not layout.layers or n not in layout.unknown}


def _unwrapped(state: Mapping[str, Tensor], path: str, part: nn.Module) -> dict[str, Tensor]:
    """The state with the matrix and the bias of a linear part in place of its tensors."""
    inside = {name: tensor for name, tensor in state.items() if name.startswith(f"{path}.")}
    matrices = [tensor for tensor in inside.values() if tensor.ndim == 2]
    if not matrices:
        return dict(state)
    width = max(matrices, key=Tensor.numel).shape[1]
    like = next((t for t in inside.values() if t.is_floating_point()), matrices[0])
    with suppress(RuntimeError):
        bias = part(like.new_zeros(1, width))[0]
        weight = (part(torch.eye(width).to(like)) - bias).T
        rest = {name: tensor for name, tensor in state.items() if name not in inside}
        return rest | {f"{path}.weight": weight} | ({f"{path}.bias": bias} if bias.any() else {})
    return dict(state)


def _keys_of_every_head(state: Mapping[str, Tensor], place: Place) -> dict[str, Tensor]:
    """Keys and values that heads share, repeated for each head."""
    width, repeated = place.n_heads * place.d_head, {}
    for part in ("k", "v"):
        path = place.inner.projections.get(part)
        for name in (f"{path}.weight", f"{path}.bias"):
            tensor = state.get(name)
            if tensor is None or len(tensor) == width or width % len(tensor):
                continue
            groups = tensor.unflatten(0, (-1, place.d_head))
            repeated[name] = groups.repeat_interleave(width // len(tensor), 0).flatten(0, 1)
    return repeated


def _known_names(parts: ModuleParts) -> dict[str, str]:
    """Known names of modules, by path, for modules whose own name does not show the part that they play."""
    names: dict[str, str] = {}
    for each in parts.blocks:
        prefix = f"{each.prefix}." if each.prefix else ""
        inside = each.roles.items()
        names |= {p: f"{prefix}{ROLES[part]}" for p, part in inside if not _shows(p, part)}
    return names | {p: ROLES[part] for p, part in parts.ends.items() if not _shows(p, part)}


def parts_of_module(module: HookedModule) -> ModuleParts:
    """Norms and linear parts of a module outside its attention, from one run."""
    own, places = module.model.module, module.model.places
    pieces = [each for each in weights_of(own) if each.part in PROJECTION_PARTS]
    attention = {each.name.removesuffix(".weight") for each in pieces}
    attention |= {p for p, part in own.named_modules() if isinstance(part, nn.MultiheadAttention)}
    paths = {place.block: (list[str](), list[str]()) for place in places}
    outside, seen = (list[str](), list[str]()), set[str]()
    for path in _in_order(module, attention):
        block = next((place.block for place in places if path.startswith(f"{place.block}.")), "")
        if any(path == each or path.startswith(f"{each}.") for each in attention):
            seen.add(block)
        elif block:
            paths[block][block in seen].append(path)
        else:
            outside[bool(seen)].append(path)
    before, after = (len(_norms_and_linear(own, each)[1]) for each in outside)
    block = places[0].block
    if len(places) == 1 and (before, after) == (0, 2) and paths[block] == ([], []):
        # The module is a layer itself, whose block is its attention.
        paths[block] = outside
        outside = ([], [])
    blocks = tuple(
        BlockParts(  # type: ignore[misc]
            _numbered(place.output) or place.block,
            *(_norms_and_linear(own, each) for each in paths[place.block]),  # type: ignore[arg-type]
            alone=len(places) == 1,
        )
        for place in places
    )
    (_, first), (norms, last) = (_norms_and_linear(own, each) for each in outside)
    ends = dict.fromkeys(norms[:1], "final_norm")
    ends |= dict.fromkeys(last, "read_out") if len(last) == 1 else {}
    ends |= dict.fromkeys(first, "read_in") if len(first) == 1 else {}
    inside = [item for each in blocks for item in each.ends.items()]
    return ModuleParts(blocks, ends | dict(inside))


def _numbered(path: str) -> str:
    """The path up to its last number; empty if there is none."""
    words = path.split(".")
    last = max((n for n, word in enumerate(words) if word.isdecimal()), default=-1)
    return ".".join(words[: last + 1])


def _in_order(module: HookedModule, attention: Iterable[str]) -> list[str]:
    """Paths of the modules without parts, and of the attention, in order of their first run."""
    ran: dict[str, None] = {}
    own, whole = module.model.module, set(attention)
    with ExitStack() as hooks:
        for path, part in own.named_modules():
            if path in whole or next(part.children(), None) is None:
                note = part.register_forward_pre_hook(lambda *_, path=path: ran.setdefault(path))
                hooks.enter_context(note)
        module.predict(draw_prompts(module.task, 2, seed=2, dtype=module.model.cfg.dtype))
    return list(ran)


def _norms_and_linear(
    own: nn.Module, paths: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules whose weight is a vector, and those whose weight is a matrix."""
    found: dict[int, list[str]] = {1: [], 2: []}
    for path in paths:
        weight = getattr(own.get_submodule(path), "weight", None)
        if isinstance(weight, Tensor) and weight.ndim in found:
            found[weight.ndim].append(path)
    return tuple(found[1]), tuple(found[2])


def _shows(path: str, part: str) -> bool:
    """True if the path of a module is a known name of this part."""
    piece = piece_of(f"{path}.weight")
    return piece is not None and piece.part == part


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state with the modules at these paths under other names."""
    renamed = {}
    for name, tensor in state.items():
        path, _, kind = name.rpartition(".")
        renamed[f"{names[path]}.{kind}" if path in names else name] = tensor
    return renamed
