"""Plain torch modules from files with recurrent layers of transformers and flash-linear-attention.

Weights of this package have no short convolutions and no norms of heads. Such a file therefore becomes a module with the
file's names, and `hook_module` finds its heads as it does in the layers of those libraries.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.recurrent_kinds import (
    BY_CHANNEL,
    LAYER_KINDS,
    layer_kind_of,
    positive_number,
)
from mechinterp.checkpoints.foreign.tensors.names import piece_of, shown
from mechinterp.checkpoints.foreign.tensors.refusals import HOOK, require_numbers
from mechinterp.checkpoints.io.files import naming, read_json
from mechinterp.checkpoints.io.tensor_files import folder_file, read_file
from mechinterp.models.hooked.delta_layers import DeltaLayer, DeltaNames, Form, names_within

_CONFIG = "config.json"
_MOST_PARENTS = 64
"""Largest number of modules around a tensor; a larger value would only serve broken names."""


def recurrent_module(
    weights: str | Path | Mapping[str, Tensor],
    *,
    config: Mapping[str, object] | None = None,
    residual: bool = True,
) -> nn.Module:
    """Plain torch module from the weights of recurrent layers between a read-in and a read-out.

    Layers are GatedDeltaNet of Qwen3-Next, Qwen3.5 and OLMo Hybrid (transformers), and GatedDeltaNet, DeltaNet, MesaNet,
    GatedLinearAttention and SimpleGatedLinearAttention (flash-linear-attention). Tokens [batch, pos, d_x + d_y] go through the read-in, the layers in
    the order of their numbers, and the read-out; the output is [batch, pos, d_y]. The names of its state dict are the file's.

    Args:
        weights: State dict, or path of a file or folder with one.
        config: Settings in the words of the layer's class, where the weights do not show them; None: those of config.json
            beside the file. A setting that is not stated has the default of the class.
        residual: True: a layer's output is added to the stream. False: it replaces the stream.
    Raises:
        ValueError: If no such layer is found, a tensor belongs to something else, a number of heads is needed and not
            stated, or a setting makes another layer; CheckpointError if the file cannot be read.
    Source:
        transformers' modeling_qwen3_next, modeling_qwen3_5 and modeling_olmo_hybrid; fla.layers of flash-linear-attention.
    See also:
        `hook_module`, `load`.
    Example:
        >>> import torch
        >>> tensors = {f"layer.{x}_proj.weight": torch.randn(6, 4) for x in "qkv"}
        >>> tensors |= {"layer.b_proj.weight": torch.randn(2, 4), "layer.o_norm.weight": torch.ones(3)}
        >>> tensors |= {"layer.o_proj.weight": torch.randn(4, 6)}
        >>> module = recurrent_module(tensors)
        >>> tuple(module(torch.randn(5, 9, 4)).shape), set(module.state_dict()) == set(tensors)
        ((5, 9, 4), True)
    """
    if isinstance(weights, Mapping):
        return _model_of(weights, config or {}, residual=residual)
    path = Path(weights)
    with naming(path):
        file, (tensors, _) = folder_file(path) if path.is_dir() else (path, read_file(path))
        beside = file.parent / _CONFIG
        if config is None and beside.is_file():
            stated = read_json(beside)
            if not isinstance(stated, dict):
                raise ValueError(f"{_CONFIG} beside the weights must hold a mapping of settings.")
            inner = stated.get("text_config")  # settings of the language model of a larger one
            config = {**stated, **(inner if isinstance(inner, dict) else {})}
        return _model_of(tensors, config or {}, residual=residual)


def _model_of(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], *, residual: bool
) -> nn.Module:
    for name, tensor in tensors.items():
        require_numbers(tensor, name)
        if name.count(".") > _MOST_PARENTS:
            raise ValueError(f"{shown(name)} must lie within {_MOST_PARENTS} modules or fewer.")
    tree = _tree(tensors, config)
    layers = [name for name, part in tree.named_modules() if isinstance(part, RecurrentLayer)]
    if not layers:
        listed = ", ".join(map(shown, sorted(tensors)[:8])) or "none"
        raise ValueError(
            f"weights must hold a layer of {', '.join(kind.name for kind in LAYER_KINDS)}; got {listed}."
        )
    if isinstance(tree, RecurrentLayer):
        return tree
    return RecurrentModel(tree, sorted(layers, key=_in_order), _ends(tensors, layers), residual)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Key that sorts names by their words, and numbers among the words by size."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _ends(tensors: Mapping[str, Tensor], layers: list[str]) -> dict[str, str]:
    """Names of the modules that read in and read out.

    Raises:
        ValueError: If a tensor belongs to something else.
    """
    ends: dict[str, str] = {}
    for name in tensors:
        if any(name.startswith(f"{layer}.") for layer in layers):
            continue
        piece, path = piece_of(name), name.rpartition(".")[0]
        part = "" if piece is None else piece.part
        if part not in ("read_in", "read_out") or ends.setdefault(part, path) != path:
            raise ValueError(
                f"{shown(name)} is no part of recurrent layers, of one read-in or of one read-out; {HOOK}."
            )
    return ends


def _tree(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> nn.Module:
    """Modules by the names of the tensors: layers, linear maps, and modules that only hold tensors."""
    inner: dict[str, dict[str, Tensor]] = {}
    own: dict[str, nn.Parameter] = {}
    for name, tensor in tensors.items():
        word, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(word, {})[rest] = tensor
        else:
            own[name] = nn.Parameter(tensor.detach().clone())
    children = {word: _tree(each, config) for word, each in inner.items()}
    names = names_within(children.keys())
    if names is not None:
        return RecurrentLayer(names, children, own, config)
    if not children and "weight" in own and own.keys() <= {"weight", "bias"}:
        return _Weighted(own)
    return _holding(nn.Module(), children, own)


def _holding(
    module: nn.Module, children: Mapping[str, nn.Module], own: Mapping[str, nn.Parameter]
) -> nn.Module:
    """The module with these children and parameters.

    Raises:
        ValueError: If a name is taken or empty.
    """
    try:
        for name, child in children.items():
            module.add_module(name, child)
        for name, parameter in own.items():
            module.register_parameter(name, parameter)
    except KeyError as error:
        raise ValueError(f"a tensor has a name that no module can have: {error.args[0]}.") from None
    return module


class _Weighted(nn.Module):
    """Given weight and bias; a call is the linear map, which convolutions and norms do not use."""

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.weight: nn.Parameter = own["weight"]
        self.bias: nn.Parameter | None = own.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Chain(nn.Module):
    """Linear maps one after another."""

    def __init__(self, maps: Mapping[str, nn.Module]) -> None:
        super().__init__()
        _holding(self, maps, {})

    def forward(self, x: Tensor) -> Tensor:
        for _, each in self.named_children():
            x = each(x)
        return x


def _chained(module: nn.Module) -> nn.Module:
    """Two maps "0" and "1" as one projection of low rank; any other module as it is."""
    maps = dict(module.named_children())
    both = [maps.get("0"), maps.get("1")]
    two = maps.keys() == {"0", "1"} and all(isinstance(each, _Weighted) for each in both)
    return _Chain({n: maps[n] for n in ("0", "1")}) if two else module


class _Norm(nn.Module):
    """Root mean square norm of each head, times silu of a gate if there is one."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, z: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(z, z.shape[-1:], self.weight, self.eps)
        return normed if gate is None else normed * F.silu(gate)


class RecurrentLayer(nn.Module):
    """A layer of one of `LAYER_KINDS` with the weights of a file; its attributes have the names of those classes."""

    def __init__(
        self,
        names: DeltaNames,
        children: Mapping[str, nn.Module],
        own: Mapping[str, nn.Parameter],
        config: Mapping[str, object],
    ) -> None:
        super().__init__()
        children = {name: _chained(child) for name, child in children.items()}
        _holding(self, children, own)
        by_channel = {BY_CHANNEL} if isinstance(children.get("gk_proj"), _Chain) else set()
        self.names, self.kind = names, layer_kind_of(names, {*children, *own, *by_channel}, config)
        for name in {*names.projections.values(), names.output} - (
            {"gk_proj"} if by_channel else set()
        ):
            _weight(children[name])
        self.num_v_heads = self._heads(config) if by_channel else _n_heads(names, children)
        self.num_k_heads = self._key_heads(config)
        width = _weight(children[names.output]).shape[-1]
        if self.num_v_heads == 0 or width % self.num_v_heads:
            raise ValueError(
                f"{names.output} must take a multiple of the {self.num_v_heads} heads, got {width} entries."
            )
        self.head_v_dim = width // self.num_v_heads
        self.gate_logit_normalizer = positive_number(config, "gate_logit_normalizer", 16)
        self.lambda_lower_bound = positive_number(config, "lambda_lower_bound", 0.25)
        self.form = self._form(config)
        if names.norm != names.output:
            weight = _weight(children[names.norm])
            self.add_module(names.norm, _Norm(weight, positive_number(config, *self.kind.eps)))

    def _heads(self, config: Mapping[str, object]) -> int:
        """Number of heads that the config states.

        Raises:
            ValueError: If it states none.
        """
        number = config.get("num_heads")
        if type(number) is not int or number < 1:
            raise ValueError(
                f"config must state num_heads, an integer >= 1, got {number}: the weights of {self.kind.name} do not show it."
            )
        return number

    def _key_heads(self, config: Mapping[str, object]) -> int:
        """Number of heads of keys.

        Raises:
            ValueError: If it must be stated and is not, or does not divide the number of heads.
        """
        name = self.kind.key_heads
        if not name or self.num_v_heads == 1:
            return self.num_v_heads
        number = config.get(name)
        if type(number) is not int or number < 1 or self.num_v_heads % number:
            raise ValueError(
                f"config must state {name}, which divides the {self.num_v_heads} heads of values, got {number}: "
                f"the weights of {self.kind.name} do not show it."
            )
        return number

    def _form(self, config: Mapping[str, object]) -> Form:
        """Activations, norms and strengths of the class."""
        conv = {"conv1d", "q_conv1d"} & {name for name, _ in self.named_children()}
        plain = self.kind.plain
        activated = "qk" if self.kind.name == "MesaNet" else "" if plain and not conv else "qkv"
        name, default = self.kind.doubled
        return Form(activated, normed=not plain, doubled=bool(config.get(name, default)))

    def forward(self, x: Tensor) -> Tensor:
        layer = DeltaLayer(self, self.names, self.num_v_heads, self.form)
        layer.noted = {
            part: self.get_submodule(name)(x) for part, name in self.names.projections.items()
        }
        parts = layer.parts(self.form)
        factor = 1.0 if layer.rule == "mesa" else parts["q"].shape[-1] ** -0.5
        z = layer.memory(parts).read(factor * parts["q"], range(1, x.shape[1] + 1))
        if self.names.norm != self.names.output:
            gate = self._gate(x, layer.noted)
            norm = self.get_submodule(self.names.norm)
            z = norm(z) if gate is None else norm(z, gate.reshape(z.shape))
        return self.get_submodule(self.names.output)(z.flatten(2))

    def _gate(self, x: Tensor, noted: Mapping[str, Tensor]) -> Tensor | None:
        """Gate of the norm [batch, pos, width]; None if there is none."""
        if not self.kind.gate:  # the last rows of each head of keys
            rows = noted["qkvz"].unflatten(-1, (self.num_k_heads, -1))
            return rows[..., -self.head_v_dim * self.num_v_heads // self.num_k_heads :].flatten(-2)
        children = dict(self.named_children())
        return children[self.kind.gate](x) if self.kind.gate in children else None


def _n_heads(names: DeltaNames, children: Mapping[str, nn.Module]) -> int:
    """Number of heads of values: each has one strength or gate."""
    if "ba" in names.projections:
        return len(_weight(children[names.projections["ba"]])) // 2
    part = "b" if "b" in names.projections else "gk"
    return len(_weight(children[names.projections[part]]))


def _weight(module: nn.Module) -> nn.Parameter:
    """Weight of a module whose only tensor is a weight.

    Raises:
        ValueError: If it holds something else.
    """
    if not isinstance(module, _Weighted) or module.weight.ndim == 0:
        listed = ", ".join(name for name, _ in module.named_parameters())
        raise ValueError(
            f"projections and norms must be one weight with or without bias, got {listed}; {HOOK}."
        )
    return module.weight


class RecurrentModel(nn.Module):
    """Read-in, recurrent layers and read-out of a file, under its names."""

    def __init__(
        self, tree: nn.Module, layers: list[str], ends: Mapping[str, str], residual: bool
    ) -> None:
        super().__init__()
        _holding(self, dict(tree.named_children()), dict(tree.named_parameters(recurse=False)))
        self.layer_names, self.ends, self.residual = layers, ends, residual

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self._end("read_in", tokens)
        for name in self.layer_names:
            output = self.get_submodule(name)(stream)
            stream = stream + output if self.residual else output
        return self._end("read_out", stream)

    def _end(self, part: str, x: Tensor) -> Tensor:
        return self.get_submodule(self.ends[part])(x) if part in self.ends else x
