"""A plain torch module as a model that the analyses and the report take.

Its layers of attention are found by their names, in the order in which they run.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.checkpoints.errors import one_line
from mechinterp.checkpoints.foreign.names import INNER, piece_of
from mechinterp.checkpoints.foreign.options import HEAD_KEYS
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.adapter import HookedPredictor
from mechinterp.models.predictor import Predictor
from mechinterp.models.tokens import require_sizes

if TYPE_CHECKING:
    from mechinterp.models.module_hooks import ModuleHooks, Place

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class HookedModule:
    """A module of somebody's with hooks on its heads; every analysis of heads and `write_report` take it."""

    name: str
    task: TaskConfig
    """The law of its prompts."""
    hooked: HookedPredictor
    outputs: tuple[str, ...]
    """Of each layer the name of the module that takes the heads' outputs side by side."""
    history: None = field(default=None, init=False)
    snapshots: Mapping[int, object] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        layers, heads = self.hooked.n_layers, self.hooked.n_heads
        return (
            f"HookedModule({self.name}: {layers} x {heads} heads, before {', '.join(self.outputs)})"
        )

    @property
    def model(self) -> "ModuleHooks":
        """The hooked model, for `run_with_cache` and `run_with_hooks`."""
        return self.hooked.model  # type: ignore[return-value]

    @property
    def predictor(self) -> Predictor:
        """The model as the analyses take it."""
        hooked = self.hooked
        return Predictor(hooked.n_layers, hooked.n_heads, lambda: hooked, task=self.task)

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query."""
        return self.hooked.predict(prompts)


def hook_module(
    module: nn.Module,
    *,
    heads: int | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
    embed: Callable[[Prompts], Tensor] | None = None,
    outputs: Sequence[str] = (),
    task: TaskConfig | None = None,
) -> HookedModule:
    """A copy of a module, in evaluation mode, with hooks on the heads and the stream of each layer of attention.

    Layers are every torch.nn.MultiheadAttention, and every module with a usual name for the outputs of heads (o_proj,
    out_proj, to_out, c_proj, ...) beside those for queries, keys and values (q_proj, to_q, W_q, qkv, c_attn, ...). What is
    between them may be anything.

    Args:
        heads: Heads of every layer; None: as the modules of attention say it (num_heads, n_heads, ...).
        read: From the module's output to the prediction, [batch, d_y]; None: the output itself if it is that, else the last
            d_y entries at the last position.
        embed: From prompts to the module's input, [batch, pos, width]; None: tokens (x, y), the query last with y = 0.
        outputs: Names of the modules that take the heads' outputs side by side, where none are found, or the wrong ones.
        task: Law of the prompts; None: the softmax paper's setting.
    Raises:
        ValueError: If no layer is found, heads are not stated, do not divide a width or differ between layers, a layer does
            not run, runs twice or is not in a module of its own, the module does not run on its input, or the prediction has
            another shape.
    Example:
        >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> hook_module(layer)
        HookedModule(TransformerEncoderLayer: 1 x 2 heads, before self_attn)
    """
    from mechinterp.models.module_hooks import ModuleHooks

    task = TaskConfig() if task is None else task
    own = copy.deepcopy(module).eval()
    parameter = next(own.parameters(), torch.empty(0))

    def enter(prompts: Prompts) -> Tensor:
        tokens = _pairs(prompts, task) if embed is None else embed(prompts)
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"embed must give one tensor, got {type(tokens).__name__}; a module of several inputs goes into one that splits them."
            )
        return tokens.to(parameter.device, parameter.dtype)

    # As many as no axis of positions is long.
    trial = sample_prompts(task, 2, dtype=parameter.dtype)
    if enter(trial).shape[1] == len(trial):
        trial = sample_prompts(task, 3, dtype=parameter.dtype)
    with torch.no_grad():
        tokens = enter(trial)
        _require_run(own, tokens)
        names = _as_they_run(own, tuple(outputs) or _outputs(own), tokens)
        places = _places(own, names, heads, tokens)
        model = ModuleHooks(own, places)
        hooked = HookedPredictor(
            model=model,
            n_layers=len(places),
            n_heads=places[0].n_heads,
            embed=enter,
            read=partial(_last_entries, d_y=task.d_y) if read is None else read,
            restarts=False,
        )
        _note_sizes(hooked, trial)
    return HookedModule(type(module).__name__, task, hooked, tuple(names))


def _pairs(prompts: Prompts, task: TaskConfig) -> Float[Tensor, "batch pos d_token"]:
    """Tokens (x, y), the query last, of prompts that are of the task's sizes."""
    require_sizes(prompts, d_x=task.d_x, d_y=task.d_y)
    return prompts.tokens


def _last_entries(output: Tensor, d_y: int) -> Tensor:
    """The output itself if it is a prediction, else the last entries at the last position."""
    return output if output.ndim == 2 else output[:, -1, -d_y:]


def _outputs(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the heads' outputs, by the table of names."""
    found = {
        name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)
    }
    pieces = [
        (name.rpartition(".")[0], piece)
        for name, _ in module.named_parameters()
        if name.endswith(".weight") and (piece := piece_of(name)) is not None
    ]
    inner = {(piece.path, piece.layer) for _, piece in pieces if piece.part in INNER}
    found |= {
        name for name, piece in pieces if piece.part == "o" and (piece.path, piece.layer) in inner
    }
    if not found:
        raise ValueError(
            f"outputs must name the modules that take the heads' outputs: a {type(module).__name__} has no "
            "MultiheadAttention, and no module such as o_proj beside q_proj, k_proj and v_proj."
        )
    return tuple(found)


def _require_run(module: nn.Module, inputs: Tensor) -> None:
    """Refuse a module that does not run on what it is given, in its own words."""
    try:
        module(inputs)
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"module must run on the input {list(inputs.shape)} of {len(inputs)} prompts, got: {one_line(error)}; "
            "embed= makes the input from prompts, and task= says d_x and d_y."
        ) from None


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


def _places(
    module: nn.Module, names: Sequence[str], heads: int | None, tokens: Tensor
) -> "list[Place]":
    """Where each layer is, all of as many heads."""
    places = [_place(module, name, names, heads, tokens) for name in names]
    counts = sorted({place.n_heads for place in places})
    if len(counts) > 1:
        raise ValueError(
            f"heads must be as many in every layer, got {', '.join(map(str, counts))}."
        )
    return places


def _place(
    module: nn.Module, name: str, names: Sequence[str], heads: int | None, tokens: Tensor
) -> "Place":
    from mechinterp.models.module_hooks import Place

    block = _block(module, name, names)
    return Place(
        output=name,
        block=block,
        n_heads=heads or _stated_heads(module, name),
        heads_turned=_is_turned(module, name, tokens),
        stream_turned=_is_turned(module, block, tokens),
    )


def _is_turned(module: nn.Module, name: str, tokens: Tensor) -> bool:
    """Whether positions come before prompts in what enters a part of the module."""
    from mechinterp.models.module_hooks import first_tensor

    shapes: list[torch.Size] = []

    def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
        values = args[0] if args else kwargs[first_tensor(kwargs)]
        shapes.append(values.shape)

    handle = module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    module(tokens)
    handle.remove()
    return shapes[0][0] != len(tokens)


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


def _note_sizes(hooked: HookedPredictor, prompts: Prompts) -> None:
    """Sizes of the stream and of heads, where TransformerLens' tools look for them.

    Raises:
        ValueError: If the prediction has not the shape of the prompts' y_query.
    """
    names = [f"blocks.0.{name}" for name in ("hook_resid_pre", "attn.hook_z")]
    output, (stream, z) = hooked.activations(prompts, names)
    hooked.prediction(output, prompts)
    tokens = hooked.embed(prompts)
    sizes = {"d_model": stream.shape[-1], "d_head": z.shape[-1], "d_token": tokens.shape[-1]}
    vars(hooked.model.cfg).update(sizes, n_ctx=2 * tokens.shape[1])
