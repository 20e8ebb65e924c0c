"""Weights as the tensors of our own files, which carry HookedTransformer's names and shapes."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.folders import require_tensors
from mechinterp.config import ExperimentConfig
from mechinterp.models.deep import DeepWeights, deep_from_parameters
from mechinterp.models.functional import AttentionWeights, unmerged

PREFIX = "blocks.0.attn."


def state_dict(weights: AttentionWeights | DeepWeights) -> dict[str, Tensor]:
    """The hooked model's tensors by name; in one layer W_O and b_O get their x columns, which are zero."""
    tensors = weights.parameters
    if isinstance(weights, AttentionWeights):
        for name in {"W_O", "b_O"} & set(tensors):
            tensors[name] = pad(tensors[name], (weights.d_x, 0))
        tensors = {PREFIX + name: tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def weights_from(
    tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path
) -> AttentionWeights:
    """The weights of one layer among a file's tensors.

    Raises:
        CheckpointError: If they are missing, not finite or not those of such a model.
    """
    if config.model.context_only:
        raise CheckpointError(
            f"{file}: model.context_only must be false for weights of one layer, got true; mechinterp.load reads "
            "the folders of such models."
        )
    _require_one_layer(file, tensors, config)
    found = unmerged({name: tensors[PREFIX + name] for name in parameter_shapes(config)})
    for name in {"W_O", "b_O"} & set(found):
        found[name] = found[name][..., config.task.d_x :].contiguous()
    return AttentionWeights(
        **found,
        scale=config.d_head**-0.5,
        score=config.model.score,
        score_slope=config.model.score_slope,
        attend_to_self=config.model.attend_to_self,
        merged_qk=config.model.merged_qk,
    )


def deep_weights_from(
    tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path
) -> DeepWeights:
    """The weights of a context-only model among a file's tensors.

    Raises:
        CheckpointError: If they are missing, not finite or not those of such a model.
    """
    there = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    if config.model.n_layers != there:  # before a name is made for each
        raise CheckpointError(
            f"{file}: model.n_layers must be that of the weights, {there}, got {config.model.n_layers}."
        )
    shapes = deep_shapes(config)
    require_tensors(file, tensors, shapes)
    return deep_from_parameters(
        {name: tensors[name] for name in shapes},
        d_y=config.task.d_y,
        scale=config.d_head**-0.5,
        score=config.model.score,
        score_slope=config.model.score_slope,
    )


def parameter_shapes(config: ExperimentConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a model of one layer, by their names in its attention, with their shapes."""
    wide = (config.model.n_heads, config.d_model, config.d_head)
    scores = ("W_QK",) if config.model.merged_qk else ("W_Q", "W_K")
    expected: dict[str, tuple[int, ...]] = {name: wide for name in (*scores, "W_V")}
    expected["W_O"] = (wide[0], wide[2], wide[1])
    if config.model.biases:
        expected |= {name: (wide[0], wide[2]) for name in ("b_Q", "b_K", "b_V")}
        expected["b_O"] = (wide[1],)
    return expected


def deep_shapes(config: ExperimentConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a context-only model, by their names in the hooked model, with their shapes.

    Example:
        >>> from mechinterp.presets import preset
        >>> list(deep_shapes(preset("sparse-h4")))[-3:]
        ['blocks.3.attn.W_O', 'W_in', 'unembed.W_U']
    """
    heads, width, d_head = config.model.n_heads, config.d_model, config.d_head
    layer = dict.fromkeys(("W_Q", "W_K", "W_V"), (heads, width, d_head))
    layer["W_O"] = (heads, d_head, width)
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{index}.attn.{name}": shape
        for index in range(config.model.n_layers)
        for name, shape in layer.items()
    }
    if config.model.d_model is not None:
        shapes["W_in"] = (config.task.d_x + config.task.d_y, width)
        shapes["unembed.W_U"] = (width, config.task.d_y)
    return shapes


def require_fit(
    path: Path, weights: AttentionWeights | DeepWeights, config: ExperimentConfig
) -> None:
    """Refuse weights that would not be the same after a trip through a checkpoint of this config.

    Raises:
        CheckpointError: If they are; the message names what differs.
    """
    stated: dict[str, object] = {"score": weights.score, "score_slope": weights.score_slope}
    if isinstance(weights, DeepWeights):
        _require_stated(path, config, {"context_only": True} | stated)
        state, shapes = state_dict(weights), deep_shapes(config)
        require_tensors(path, state, shapes)
        for name in sorted(state.keys() - shapes.keys()):
            raise CheckpointError(f"{path}: {name} has no place in a model of this config.")
    else:
        stated |= {name: getattr(weights, name) for name in ("merged_qk", "attend_to_self")}
        stated |= {"context_only": False, "biases": weights.b_O is not None}
        _require_stated(path, config, stated)
        _require_one_layer(path, state_dict(weights), config)
    if not math.isclose(weights.scale, config.d_head**-0.5):
        raise CheckpointError(
            f"{path}: scale must be 1/sqrt(d_head) = {config.d_head**-0.5:.6g}, got {weights.scale:.6g}."
        )


def _require_stated(path: Path, config: ExperimentConfig, stated: Mapping[str, object]) -> None:
    for name, found in stated.items():
        expected = getattr(config.model, name)
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} must be the config's {expected!r}, got {found!r}."
            )


def _require_one_layer(file: Path, tensors: Mapping[str, Tensor], config: ExperimentConfig) -> None:
    expected = parameter_shapes(config)
    require_tensors(file, tensors, {PREFIX + name: shape for name, shape in expected.items()})
    for name in {"W_O", "b_O"} & set(expected):
        unread = tensors[PREFIX + name][..., : config.task.d_x]
        if unread.any():
            raise CheckpointError(
                f"{file}: the x columns of {PREFIX}{name} must be zero, got {unread.abs().max().item():.3g}."
            )
