"""Tensors of a file in plain form: masks of pruning, factors of norms and low-rank additions are multiplied out, and matrices
packed per head are put in the usual order."""

import re
from collections.abc import Mapping

from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.names import Tensors, shown

PER_HEAD = "query_key_value"
"""Name of a qkv matrix that is packed per head."""
NORMED = (
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
"""Names of length and direction, under the old and the new weight_norm."""
PARAMETRIZED = "parametrizations.weight."
SPECTRAL = (
    ("weight_orig", "weight_u", "weight_v"),
    (f"{PARAMETRIZED}original", f"{PARAMETRIZED}0._u", f"{PARAMETRIZED}0._v"),
)
"""Names of a matrix and its first singular vectors, under the old and the new spectral_norm."""
TOOLS = {
    "weight_g": "torch.nn.utils.remove_weight_norm(module)",
    "weight_orig": "torch.nn.utils.remove_spectral_norm(module), or torch.nn.utils.prune.remove(module, 'weight') if it is pruned",
    f"{PARAMETRIZED}original0": "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
    f"{PARAMETRIZED}original": "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
}
"""Calls that write a plain weight, by the end of the name of a tensor that is left over."""


def folded(tensors: Tensors, settings: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors, with one plain weight for each pruned, normed or adapted one.

    Args:
        settings: `lora_scale`, the factor on the product of LoRA's matrices, if a config states it.
    Raises:
        ValueError: If a LoRA has no stated scale, or a tensor of a changed weight is missing.
    Example:
        >>> import torch
        >>> state = {"q.weight_orig": torch.ones(2, 2), "q.weight_mask": torch.eye(2)}
        >>> folded(state, {})["q.weight"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    plain = dict(tensors)
    for name in tensors:
        stem = name.removesuffix("weight_mask")
        if name.endswith("weight_mask") and f"{stem}weight_orig" in plain:
            plain[f"{stem}weight"] = plain.pop(f"{stem}weight_orig") * plain.pop(name)
    for names, join in ((NORMED, _normed), (SPECTRAL, _spectral)):
        for words in names:
            for name in tensors:
                stem = name.removesuffix(words[0])
                parts = [stem + word for word in words]
                if name.endswith(words[0]) and all(part in plain for part in parts):
                    plain[f"{stem}weight"] = join(*(plain.pop(part) for part in parts))
    for name in plain:
        for end, tool in TOOLS.items():
            if name == end or name.endswith(f".{end}"):
                raise ValueError(
                    f"{shown(name)} is a changed weight, of which other tensors are missing; write state_dict() after {tool}."
                )
    return _with_low_rank(plain, settings.get("lora_scale"))


def _normed(length: Tensor, direction: Tensor) -> Tensor:
    """Direction scaled to this length: a number, or one entry for each index of an axis."""
    axes = tuple(i for i, size in enumerate(length.shape) if size == 1)
    return direction * length / direction.norm(dim=axes or None, keepdim=True)


def _spectral(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return weight / (left @ weight.flatten(1) @ right)


def _with_low_rank(tensors: dict[str, Tensor], scale: object) -> dict[str, Tensor]:
    """Weights with the product of LoRA's matrices added."""
    for name in list(tensors):
        found = re.fullmatch(r"(.*)[.]lora_A(?:[.]\w+)?[.]weight", name)
        if found is None:
            continue
        other = name.replace(".lora_A", ".lora_B")
        base = next(
            (n for n in (f"{found[1]}.base_layer.weight", f"{found[1]}.weight") if n in tensors), ""
        )
        if not isinstance(scale, float) or other not in tensors or not base:
            raise ValueError(
                f"{name} is a LoRA, whose {'scale is not stated (no adapter_config.json beside the file)' if base else 'base weights are not in the file'}; "
                "write model.merge_and_unload().state_dict()."
            )
        added = tensors.pop(other) @ tensors.pop(name)
        tensors[f"{found[1]}.weight"] = tensors.pop(base) + scale * added
        if (bias := tensors.pop(f"{found[1]}.base_layer.bias", None)) is not None:
            tensors[f"{found[1]}.bias"] = bias
    return tensors


def repacked(tensors: Tensors, names: list[str], n_heads: int) -> dict[str, Tensor]:
    """The tensors, with these packed matrices and biases in the order of all queries, all keys, all values.

    Raises:
        ValueError: If the number of heads does not divide a matrix.
    """
    changed = dict(tensors)
    for name in names:
        tensor = tensors[name]
        axis = 1 if tensor.ndim == 2 and tensor.shape[1] == 3 * tensor.shape[0] else 0
        size = tensor.shape[axis]
        if size % (3 * n_heads):
            raise ValueError(
                f"packing=per_head needs {3 * n_heads} parts of {name}, got {size} rows."
            )
        split = tensor.unflatten(axis, (n_heads, 3, -1)).transpose(axis, axis + 1)
        changed[name] = split.flatten(axis, axis + 2).contiguous()
    return changed
