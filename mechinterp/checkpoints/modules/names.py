"""Parts of a model that the names of a plain torch module's weights and projections stand for."""

from dataclasses import replace

from torch import nn

from mechinterp.checkpoints.foreign.tensors.names import ATTENTION, Piece, piece_of
from mechinterp.models.hooked.followed import BY_HEAD

IN_MODULES = {"query_key_value": "qkv", "q_b_proj": "q_proj", "kv_b_proj": "kv_proj"}
"""Projections of GPT-NeoX, Bloom and Falcon (packed by head) and of DeepSeek, whose layout in files is not read."""
PROJECTION_PARTS = (*ATTENTION, BY_HEAD)
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)


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
