"""State dict of a hooked module, under names that show the part that each tensor plays.

A file shows names and shapes alone. A module in memory runs: the order of its parts shows which norm comes first, and where
the read-in and the read-out are. Wrapped projections, such as LoRA, show the matrix that they multiply by.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.names import piece_of
from mechinterp.checkpoints.module_places import PROJECTION_PARTS, weights_of
from mechinterp.checkpoints.plain_modules import HookedModule
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


@torch.no_grad()
def state_of(module: HookedModule) -> dict[str, Tensor]:
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
    parts = dict(own.named_modules())
    wrapped = [each.name.removesuffix(".weight") for each in weights_of(own)]
    wrapped += [path for path, part in parts.items() if isinstance(part, nn.Linear)]
    for path in dict.fromkeys(wrapped):
        if path in parts and f"{path}.weight" not in state:
            state = _unwrapped(state, path, parts[path])
    for place in model.places:
        state |= _keys_of_every_head(state, place)
    return _renamed(state, _known_names(module))


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


def _known_names(module: HookedModule) -> dict[str, str]:
    """Known names of modules, by path, for modules whose own name does not show the part that they play."""
    own, places = module.model.module, module.model.places
    pieces = [each for each in weights_of(own) if each.part in PROJECTION_PARTS]
    attention = {each.name.removesuffix(".weight") for each in pieces}
    attention |= {p for p, part in own.named_modules() if isinstance(part, nn.MultiheadAttention)}
    blocks = [place.block for place in places]
    before, inside, after = list[str](), {block: list[str]() for block in blocks}, list[str]()
    for path in _leaves_in_order(module):
        if any(path == each or path.startswith(f"{each}.") for each in attention):
            continue
        block = next((each for each in blocks if path.startswith(f"{each}.")), None)
        if block is not None:
            inside[block].append(path)
        else:
            (after if any(inside.values()) else before).append(path)
    roles: dict[str, str] = {}
    for block, paths in inside.items():
        norms, linear = _norms_and_linear(own, paths)
        prefix = f"{block}." if block else ""
        pairs = [*zip(norms, ("norm1", "norm2"), strict=False)]
        pairs += zip(linear, ("mlp_in", "mlp_out"), strict=False) if len(linear) == 2 else []
        roles |= {path: f"{prefix}{ROLES[part]}" for path, part in pairs if not _shows(path, part)}
    norms, linear = _norms_and_linear(own, after)
    ends = [(path, "final_norm") for path in norms[:1]]
    ends += [(path, "read_out") for path in linear if len(linear) == 1]
    _, first = _norms_and_linear(own, before)
    ends += [(path, "read_in") for path in first if len(first) == 1]
    return roles | {path: ROLES[part] for path, part in ends if not _shows(path, part)}


def _leaves_in_order(module: HookedModule) -> list[str]:
    """Paths of the modules without parts, in order of their first run."""
    ran: dict[str, None] = {}
    own = module.model.module
    with ExitStack() as hooks:
        for path, part in own.named_modules():
            if next(part.children(), None) is None:
                note = part.register_forward_pre_hook(lambda *_, path=path: ran.setdefault(path))
                hooks.enter_context(note)
        module.predict(draw_prompts(module.task, 2, seed=2, dtype=module.model.cfg.dtype))
    return list(ran)


def _norms_and_linear(own: nn.Module, paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Modules whose weight is a vector, and those whose weight is a matrix."""
    found: dict[int, list[str]] = {1: [], 2: []}
    for path in paths:
        weight = getattr(own.get_submodule(path), "weight", None)
        if isinstance(weight, Tensor) and weight.ndim in found:
            found[weight.ndim].append(path)
    return found[1], found[2]


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
