"""Queries, keys, values, gates and strengths of recurrent layers of transformers and flash-linear-attention.

Such a layer (Qwen3-Next, Qwen3.5, OLMo Hybrid; GatedDeltaNet, DeltaNet, GatedLinearAttention, MesaNet and others) projects its
input, runs a short convolution over each channel, normalises queries and keys, and reads a state (`models.recurrence`).
A norm, often with a gate, follows. Here the parts are computed from the outputs of the layer's own modules, and the
recurrence is compared with what the layer gives to its norm: only a form that agrees to rounding gets hook points.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from mechinterp.models.recurrence import Memory

PROJECTION_NAMES: tuple[Mapping[str, str], ...] = (
    {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba"},
    {"qkv": "in_proj_qkv", "b": "in_proj_b", "a": "in_proj_a"},
    {"q": "q_proj", "k": "k_proj", "v": "v_proj", "b": "b_proj", "a": "a_proj"},
    {"q": "q_proj", "k": "k_proj", "v": "v_proj", "b": "b_proj"},
    {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gk": "gk_proj"},
)
"""Names of the projections within a layer, by what they compute: b strengths before the sigmoid, a and gk gates, z the gate
of the norm. `qkvz` and `ba` hold the parts of one head of keys after another."""
OUTPUTS = ("out_proj", "o_proj")
NORM_NAMES = ("norm", "o_norm", "g_norm", "g_norm_swish_gate")
"""Names of the output projection, and of the norm before it."""
EPSILON = 1e-6
"""Number added to squared lengths of queries and keys before their root."""
TINY = 1e-30
PARTS = ("q", "k", "v", "gate", "beta")
DELTA_POINTS = (*(f"hook_{part}" for part in PARTS), "hook_pattern")
"""Hook points of a layer whose recurrence is known."""


@dataclass(frozen=True)
class Form:
    """Steps between the projections of a layer and its state."""

    activated: str
    """Letters of q, k and v that go through silu; mesa layers do not activate values."""
    normed: bool
    """True: queries and keys have length 1."""
    doubled: bool
    """True: strengths are twice a sigmoid, so that eigenvalues may be negative."""


FORMS = tuple(Form(*each) for each in product(("qkv", "qk", "v", ""), (True, False), (False, True)))


@dataclass(frozen=True)
class DeltaNames:
    """Names of the modules of a layer."""

    container: str
    projections: Mapping[str, str]
    """Name of a child of the container by what it computes."""
    output: str
    norm: str
    """Module that takes the heads' outputs: the norm, or the output projection if there is none."""


def delta_names(module: nn.Module) -> Iterator[DeltaNames]:
    """Names of the parts of every recurrent layer in a module."""
    for path, part in module.named_modules():
        names = names_within({name for name, _ in part.named_children()}, path)
        if names is not None:
            yield names


def names_within(children: Set[str], path: str = "") -> DeltaNames | None:
    """Names of the parts of a module with these children; None if they are not those of a recurrent layer."""
    layout = next((each for each in PROJECTION_NAMES if children >= set(each.values())), None)
    output = next((name for name in OUTPUTS if name in children), None)
    if layout is None or output is None:
        return None
    before = f"{path}." if path else ""
    norm = next((name for name in NORM_NAMES if name in children), output)
    return DeltaNames(path, layout, before + output, before + norm)


def number_of_heads(container: nn.Module) -> int | None:
    """Number of heads of values, which is that of the outputs, as the layer states it."""
    for name in ("num_v_heads", "num_heads"):
        if type(number := getattr(container, name, None)) is int:
            return number
    return None


@dataclass(eq=False)
class DeltaLayer:
    """A running recurrent layer: what its projections gave, and the form of its recurrence once it is known."""

    container: nn.Module
    names: DeltaNames
    n_heads: int
    form: Form | None = None
    factor: float = 1.0
    """Factor on queries; 1 / sqrt(d_head), mostly."""
    noted: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of the projections, and z, in the current run."""

    def attach(self) -> None:
        """Note the outputs of the projections when the layer runs."""
        for part, name in self.names.projections.items():
            child = self.container.get_submodule(name)
            child.register_forward_hook(partial(self._note, part))

    def _note(self, part: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.noted[part] = output

    @property
    def rule(self) -> str:
        """Rule of the recurrence, a score of this package."""
        if hasattr(self.container, "lambda_params"):
            return "mesa"
        projections = self.names.projections
        if "gk" in projections:
            return "gated"
        return "gated_delta" if {"a", "ba"} & projections.keys() else "delta"

    @property
    def has(self) -> frozenset[str]:
        """ "gate" and "beta", as far as the layer has them."""
        parts = self.names.projections.keys()
        named = {"gate": {"a", "ba", "gk"}, "beta": {"b", "ba"}}
        return frozenset(name for name, words in named.items() if words & parts)

    def z_of(self, values: Tensor) -> Tensor:
        """Heads' outputs [batch, pos, head, d_value] in the input of the norm."""
        first = next(iter(self.noted.values()))
        return values.reshape(*first.shape[:2], self.n_heads, -1)

    def leave(self) -> None:
        """Forget the tensors of a run; before the form is known they are kept for `settle`."""
        if self.form is not None:
            self.noted.clear()

    def through(self, heads: Any, values: Tensor) -> Tensor:
        """Heads' outputs after the hook points of the layer; unchanged bits if no hook changes anything.

        Args:
            heads: Module with the hook points, `followed.HeadPoints`.
            values: Input of the norm.
        """
        assert self.form is not None
        own = self.parts(self.form)
        changed = {name: heads.through(f"hook_{name}", each.clone()) for name, each in own.items()}
        rows = range(1, own["q"].shape[1] + 1)
        before, after = (
            self.memory(each).pattern(self.factor * each["q"], rows) for each in (own, changed)
        )
        after = heads.through("hook_pattern", after)
        change = _read(after, changed["v"]) - _read(before, own["v"])  # 0 if no hook changes a part
        return (self.z_of(values) + change).reshape(values.shape)

    def settle(self) -> bool:
        """Find the form whose recurrence gives the z of the last run, to rounding; False if there is none."""
        projected = [each for part, each in self.noted.items() if part != "z"]
        shapes = {each.shape[:2] if each.ndim == 3 else None for each in projected}
        # The norm of that name may not run, and projections may run token by token.
        if "z" not in self.noted or len(shapes) != 1 or None in shapes:
            return False
        z = self.z_of(self.noted["z"])
        for form in FORMS:
            try:
                parts = self.parts(form)
                own = self.memory(parts).read(parts["q"], range(1, z.shape[1] + 1))
            except (
                RuntimeError,
                AttributeError,
                KeyError,
            ):  # other widths or parts than the names promise
                return False
            factor = float((z * own).sum() / own.square().sum().clamp_min(TINY))
            limit = 1e-4 * float(z.abs().max())
            if float((factor * own - z).abs().max()) <= limit:
                self.form, self.factor = form, factor
                self.noted.clear()
                return True
        return False

    def memory(self, parts: Mapping[str, Tensor]) -> Memory:
        """Memory of the layer with these parts."""
        ridge = None
        if self.rule == "mesa":
            own: Any = self.container
            lowest = getattr(own, "lambda_lower_bound", 0.0)
            ridge = (F.softplus(own.lambda_params.float()) + lowest).to(parts["k"])
            ridge = ridge.reshape(self.n_heads, -1)
        given = (parts["k"], parts["v"], parts.get("gate"), parts.get("beta"), ridge)
        return Memory(self.rule, *given)

    def parts(self, form: Form) -> dict[str, Tensor]:
        """q and k [batch, pos, head, d_k], v [batch, pos, head, d_v], gate and beta [batch, pos, head], or gate [batch, pos, head,
        d_k]; q without factor."""
        q, k, v, b, a = self._projected()
        own: Any = self.container
        n_keys: int = getattr(own, "num_k_heads", getattr(own, "num_heads", self.n_heads))
        widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
        channels = self._convolved(torch.cat([q, k, v], -1), widths).split(widths, -1)
        q, k, v = (
            F.silu(each) if name in form.activated else each
            for name, each in zip("qkv", channels, strict=True)
        )
        q, k = (each.unflatten(-1, (n_keys, -1)) for each in (q, k))
        if form.normed:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
        times = self.n_heads // n_keys
        q, k = (each.repeat_interleave(times, dim=2) for each in (q, k))
        parts = {"q": q, "k": k, "v": v.unflatten(-1, (self.n_heads, -1))}
        if b is not None:
            parts["beta"] = torch.sigmoid(b) * (1 + form.doubled)
        if a is not None:
            parts["gate"] = self._gate(a)
        return parts

    def _gate(self, a: Tensor) -> Tensor:
        own: Any = self.container
        if "gk" in self.names.projections:
            gate = (F.logsigmoid(a) / getattr(own, "gate_logit_normalizer", 1)).exp()
            return (
                gate if gate.shape[-1] == self.n_heads else gate.unflatten(-1, (self.n_heads, -1))
            )
        if self.rule == "mesa":
            return torch.sigmoid(a)
        return (-own.A_log.float().exp() * F.softplus(a.float() + own.dt_bias)).exp().to(a)

    def _projected(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values side by side over heads, and strengths and gates before their sigmoids."""
        noted = self.noted
        own: Any = self.container
        if "qkvz" in noted:
            n_keys = own.num_k_heads
            own_v = own.head_v_dim * (self.n_heads // n_keys)
            each = noted["qkvz"].unflatten(-1, (n_keys, -1))
            d_k = (each.shape[-1] - 2 * own_v) // 2
            q, k, v, _ = (x.flatten(-2) for x in each.split([d_k, d_k, own_v, own_v], -1))
            b, a = noted["ba"].unflatten(-1, (n_keys, 2, -1)).unbind(-2)
            return q, k, v, b.flatten(-2), a.flatten(-2)
        if "qkv" in noted:
            d_values = self.n_heads * own.head_v_dim
            d_keys = (noted["qkv"].shape[-1] - d_values) // 2
            q, k, v = noted["qkv"].split([d_keys, d_keys, d_values], -1)
        else:
            q, k, v = (noted[name] for name in "qkv")
        return q, k, v, noted.get("b"), noted.get("a", noted.get("gk"))

    def _convolved(self, channels: Tensor, widths: list[int]) -> Tensor:
        """The channels after the short causal convolution of the layer, if it has one."""
        own: Any = self.container
        if hasattr(own, "conv1d"):
            return convolved(channels, own.conv1d.weight, own.conv1d.bias)
        parts = []
        for name, part in zip("qkv", channels.split(widths, -1), strict=True):
            conv = getattr(own, f"{name}_conv1d", None)
            parts.append(part if conv is None else convolved(part, conv.weight, conv.bias))
        return torch.cat(parts, -1)


def _read(pattern: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v)


def convolved(channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal convolution of each channel over positions.

    Example:
        >>> convolved(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[[10.0, 1.0]]]), None).flatten()
        tensor([ 1., 12., 23.])
    """
    n_channels, size = channels.shape[-1], weight.shape[-1]
    weight = weight.reshape(n_channels, 1, size)
    along = F.conv1d(channels.mT, weight, bias, padding=size - 1, groups=n_channels)
    return along[..., : channels.shape[1]].mT
