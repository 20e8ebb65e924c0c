"""One interface to all hooked models: prompts in, predictions out, heads by number.

An ICLTransformer fits as it is. A TransformerLens Bridge around third-party layers needs two functions: `embed` turns
prompts into its input, and `read` turns its output into the prediction.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK, chunks, layers_bytes, require_memory, together
from mechinterp.models.hooked.contexts import hooks_on, remove_ended
from mechinterp.models.hooked.masks import (
    Head,
    Hook,
    Values,
    by_layers,
    lock_of,
    mask_heads,
    mask_mlps,
    mlp_name,
    require_heads,
    resid_name,
    z_name,
)

if TYPE_CHECKING:
    from transformer_lens import HookedRootModule
    from transformer_lens.model_bridge import TransformerBridge


DROPOUT_RATES = ("dropout", "attention_dropout")
"""Attributes with the dropout rate: in torch's MultiheadAttention and in Hugging Face's attention."""


@dataclass(frozen=True, eq=False)
class HookedPredictor:
    """A model with TransformerLens' hooks, the input it gets from prompts, and the prediction read from its output.

    Raises:
        ValueError: If the model has no hooks, lacks hooks of a layer's heads or input, has more layers than `n_layers`,
            or should restart at a layer and cannot. When it runs: if dropout is active, the number of heads differs,
            or `read` does not give [batch, d_y].
    """

    model: "HookedRootModule | TransformerBridge"
    """With `restarts`, its forward takes `start_at_layer` and `stop_at_layer` as HookedTransformer's does."""
    n_layers: int
    n_heads: int
    """Number of heads, the same in every layer."""
    embed: Callable[[Prompts], Tensor]
    """Function from prompts to the model's input, [batch, pos, width], with the query at the last position."""
    read: Callable[[Tensor], Tensor]
    """Function from the model's output to the prediction at the query, [batch, d_y]."""
    restarts: bool = True
    """True: the model can start and stop at a layer. False: each mask needs a full forward pass."""
    position: int | None = -1
    """Position of the stream at which the prediction is read; None: determined by experiment."""
    blocks: tuple[int, ...] = ()
    """Block of each layer, for models whose blocks run several times; empty: each layer is its own block."""
    read_every: Callable[[Tensor, int], Tensor] | None = None
    """Function from the model's output and the number L of pairs to the predictions at every x, [batch, L + 1, d_y]; None
    if unknown."""

    def __post_init__(self) -> None:
        kind = class_name(self.model)
        if not hasattr(self.model, "hook_dict"):
            raise ValueError(f"model must have TransformerLens' hooks (hook_dict), got a {kind}.")
        hooks = self.model.hook_dict
        for layer in range(self.n_layers):
            for name in (z_name(layer), resid_name(layer)):
                if name not in hooks:
                    raise ValueError(
                        f"A model of {self.n_layers} layers must have the hook {name}, got a {kind} without it."
                    )
        if self.n_layers < 1 or z_name(self.n_layers) in hooks:
            raise ValueError(
                f"n_layers must be the number of all layers of the {kind}, got {self.n_layers}."
            )
        for name in ("start_at_layer", "stop_at_layer"):
            if self.restarts and not _takes(self.model.forward, name):
                raise ValueError(
                    f"The model's forward must take {name}, got a {kind}'s without it."
                )

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y, on the device of the prompts."""
        with lock_of(self.model):
            prediction = self.prediction(self.model(self.inputs(prompts)), prompts)
        return prediction.to(prompts.x.device)

    def predict_at_every(self, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"] | None:
        """Output read at every x, on the device of the prompts; None if it does not have that shape."""
        if self.read_every is None:
            return None
        parts, n_pairs = [], prompts.x.shape[1]
        with lock_of(self.model):
            for rows in self.chunks(prompts, CHUNK):
                parts.append(self.read_every(self.model(self.inputs(prompts[rows])), n_pairs))
        shape = (len(prompts), n_pairs + 1, prompts.y.shape[2])
        predictions = torch.cat(parts)
        return predictions.to(prompts.x.device) if predictions.shape == shape else None

    def inputs(self, prompts: Prompts) -> Float[Tensor, "batch pos width"]:
        """Input of the model for these prompts. The model must be in evaluation mode.

        Raises:
            ValueError: If a dropout is in training mode.
        """
        # A Bridge lists only the parts it wraps; the original model also has the modules between them.
        for part in (self.model, getattr(self.model, "original_model", None)):
            if isinstance(part, nn.Module) and any(map(_drops, part.modules())):
                raise ValueError(
                    f"The model must be in evaluation mode, call .eval(); got a {class_name(self.model)} "
                    f"with dropout in training mode."
                )
        self.require_room(len(prompts), prompts)
        return self.embed(prompts)

    def require_room(self, n_prompts: int, like: Prompts) -> None:
        """Refuse a run on this many prompts like the given ones, if it does not fit into memory.

        Raises:
            ValueError: With the bytes needed and the bytes available.
        """
        needed = n_prompts * self.prompt_bytes(like)
        require_memory(needed, f"{n_prompts} prompts of {like.x.shape[1]} pairs at once")

    def prompt_bytes(self, prompts: Prompts) -> int:
        """Memory that one prompt takes while it runs through the layers, in bytes."""
        tokens = self.embed(prompts[:1])
        sizes = {
            name: getattr(self.model.cfg, name, None) or 0
            for name in ("d_model", "d_head", "d_mlp")
        }
        return layers_bytes(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_tokens=tokens.shape[1],
            width=tokens.element_size(),
            **sizes,
        )

    def chunks(self, prompts: Prompts, most: int) -> list[slice]:
        """Slices of the prompts that fit into memory, each with an even number of at most `most` prompts.

        Raises:
            ValueError: If not even two prompts fit into memory.
        """
        what = f"{self.n_layers} layers on prompts of {prompts.x.shape[1]} pairs"
        return chunks(len(prompts), together(self.prompt_bytes(prompts), what, most=most))

    def prediction(self, output: Any, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction that `read` extracts from the output for these prompts.

        Raises:
            ValueError: If its shape is not that of y_query; broadcasting would hide the mistake.
        """
        return read_prediction(self.read, output, prompts)

    def activations(self, prompts: Prompts, names: Sequence[str]) -> tuple[Any, list[Tensor]]:
        """Output of the model, and the activations at these hooks.

        Raises:
            ValueError: If a hook does not exist or does not fire, or the number of heads differs.
        """
        known = [name for name in names if name in self.model.hook_dict]
        output, cache = self.run_noting(self.inputs(prompts), known)
        for name in names:
            if name not in cache:
                reasons = getattr(self.model, "unfollowed", {})
                why = f": {next(iter(reasons.values()))}" if reasons else ""
                raise ValueError(
                    f"This needs the hook {name}, got a {class_name(self.model)} that does not run through it{why}."
                )
        for layer in range(self.n_layers):
            if z_name(layer) in names:
                self.require_z(layer, cache[z_name(layer)])
        return output, [cache[name] for name in names]

    def run(self, inputs: Tensor, hooks: Sequence[Hook] = (), **options: Any) -> Any:
        """Output of the model for its own input, with forward hooks that an interrupt takes off."""
        with hooks_on(self.model, hooks):
            return self.model(inputs, **options)

    def run_noting(
        self, inputs: Tensor, names: Iterable[str], hooks: Sequence[Hook] = (), **options: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Output of the model and the values at some hook points, with other hooks applied first."""
        noted: dict[str, Tensor] = {}

        def note(values: Tensor, hook: object, *, name: str) -> Tensor:
            noted[name] = values
            return values  # a Bridge uses the returned value

        notes = [(name, partial(note, name=name)) for name in names]
        return self.run(inputs, [*hooks, *notes], **options), noted

    def stream_name(self, layer: int) -> str:
        """Name of the hook on the residual stream after this number of layers."""
        last = self.n_layers - 1
        if layer <= last:
            return resid_name(layer)
        normed = f"blocks.{last}.hook_normalized_resid_post"
        return normed if normed in self.model.hook_dict else f"blocks.{last}.hook_resid_post"

    def require_z(self, layer: int, z: Tensor) -> None:
        """Refuse a layer with another number of heads.

        Raises:
            ValueError: If the third axis of z is not `n_heads` long.
        """
        if z.ndim != 4 or z.shape[2] != self.n_heads:
            raise ValueError(
                f"n_heads must be that of {z_name(layer)}, [batch, pos, head, d_head], "
                f"got {self.n_heads} for {list(z.shape)}."
            )

    def in_all_runs(self, heads: Sequence[Head]) -> list[Head]:
        """The heads, and the same heads in all other runs of their blocks."""
        blocks = self.blocks or tuple(range(self.n_layers))
        runs = [
            (other, head)
            for layer, head in heads
            for other, block in enumerate(blocks)
            if block == blocks[layer]
        ]
        return sorted(set(runs))

    @property
    def is_hooked(self) -> bool:
        """True if the model has forward hooks, which a shortcut around its modules would skip."""
        with lock_of(self.model):  # waits until hooks of other threads are gone
            remove_ended(self.model)
            return any(point.fwd_hooks for point in self.model.hook_dict.values())


def class_name(model: object) -> str:
    """Name of a model's class; of a module with hooks that of the user's own class."""
    return type(getattr(model, "module", model)).__name__


def read_prediction(
    read: Callable[[Any], Tensor], output: Any, prompts: Prompts
) -> Float[Tensor, "batch d_y"]:
    """Prediction that `read` extracts from a model's output for these prompts.

    Raises:
        ValueError: If its shape is not that of y_query; broadcasting would hide the mistake.
    """
    prediction, shape = read(output), list(prompts.y_query.shape)
    if list(prediction.shape) != shape:
        got = f"for these prompts, got {list(prediction.shape)}"
        raise ValueError(f"read must give [batch, d_y], {shape} {got}.")
    return prediction


@contextmanager
def masked(
    model: object,
    heads: Sequence[Head],
    *,
    values: Values | None = None,
    mlps: Sequence[int] = (),
    mlp_values: Values | None = None,
    at: int | None = None,
    runs: str = "one",
) -> Iterator[None]:
    """Context in which the model runs with these heads masked; raises if a mask never took effect.

    Args:
        model: A checkpoint, an ICLTransformer, a HookedPredictor or a predictor.
        values: As in `mask_heads`.
        mlps: Layers whose MLPs are masked, too.
        mlp_values: Replacement for the outputs of these MLPs, [layer, pos, d_model]; None: zeros.
        at: Position at which heads and MLPs are masked; None: at all.
        runs: "one": mask a head in its layer alone; "all": mask it in every run of its block.
    Raises:
        ValueError: If there is no such head; when it runs, if a layer has another number of heads; at the end,
            if a layer with masked heads never ran; if the model has no hook on an MLP that is masked.
    See also:
        `mechinterp.models.hooked.masks.mask_heads`, `ablate`.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = draw_prompts(checkpoint.task, 4, generator=generator_for(0, "eval", 0))
        >>> with masked(checkpoint.model, [(0, 0), (0, 1)]):
        ...     checkpoint.model.predict(prompts).any()
        tensor(False)
    """
    predictor = hooked_predictor(model)
    require_heads(heads, predictor.n_layers, predictor.n_heads)
    require_runs(runs)
    heads = predictor.in_all_runs(heads) if runs == "all" else heads
    by_layer = by_layers(heads)
    fired: set[int] = set()

    def note(layer: int, z: Tensor, hook: object) -> None:
        predictor.require_z(layer, z)
        fired.add(layer)

    notes = [(z_name(layer), partial(note, layer)) for layer in by_layer]
    hooked = predictor.model
    for layer in mlps:
        if mlp_name(layer) not in hooked.hook_dict:
            raise ValueError(
                f"The model ({class_name(hooked)}) has no hook {mlp_name(layer)}, where an MLP is masked."
            )
    masks = mask_heads(heads, values=values, at=at) + mask_mlps(mlps, values=mlp_values, at=at)
    with hooks_on(hooked, [*notes, *masks]):
        yield
    idle = [(layer, head) for layer, head in heads if layer not in fired]
    if idle:
        names = ", ".join(f"L{layer}H{head}" for layer, head in idle)
        raise ValueError(
            f"Masking {names} changed nothing: the hook {z_name(idle[0][0])} never fired."
        )


def require_runs(runs: str) -> None:
    """Refuse a value of `runs` other than "one" and "all".

    Raises:
        ValueError: If `runs` is another value.
    """
    if runs not in ("one", "all"):
        raise ValueError(f"runs must be 'one' or 'all', got {runs!r}.")


def hooked_predictor(model: object) -> HookedPredictor:
    """HookedPredictor of an ICLTransformer, a checkpoint or a predictor.

    Raises:
        ValueError: If the model is none of these.
    Example:
        >>> from mechinterp.config import ModelConfig
        >>> from mechinterp.models.hooked.transformer import ICLTransformer
        >>> hooked_predictor(ICLTransformer(ModelConfig(n_layers=3), d_x=5, d_y=1)).n_layers
        3
    """
    if isinstance(model, HookedPredictor):
        return model
    for holder in (model, getattr(model, "predictor", None)):
        if isinstance(hooked := getattr(holder, "hooked", None), HookedPredictor):
            return hooked
    from mechinterp.models.hooked.transformer import ICLTransformer

    if not isinstance(model, ICLTransformer):
        hint = "; hook_module makes one of it" if isinstance(model, nn.Module) else ""
        if hasattr(model, "unfollowed"):
            hint = " with hooks; pass what hook_module returned, not its .model"
        raise ValueError(
            f"model must be a checkpoint, an ICLTransformer or a HookedPredictor, got {class_name(model)}{hint}."
        )
    own, cfg = model, model.cfg
    in_turn = cfg.model.layout == "in_turn"
    return HookedPredictor(
        own,
        cfg.n_layers,
        cfg.n_heads,
        embed=lambda prompts: own.tokens(prompts).to(cfg.device, cfg.dtype),
        read=lambda output: output[:, -1],
        read_every=(lambda output, n_pairs: output[:, ::2]) if in_turn else None,
    )


def _takes(function: Callable, name: str) -> bool:
    """True if the function has an argument of this name or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _drops(module: nn.Module) -> bool:
    """True for a module in training mode that is dropout, or attention with a positive dropout rate."""
    if not module.training:
        return False
    names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else DROPOUT_RATES
    rates = [getattr(module, name, None) for name in names]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
