"""Modules that take the heads' outputs side by side: by their names, or else by what a run multiplies."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.tensors.names import INNER
from mechinterp.checkpoints.modules.input import Trial
from mechinterp.checkpoints.modules.names import weights_of
from mechinterp.models.hooked.delta_layers import delta_names
from mechinterp.models.hooked.followed import BY_HEAD
from mechinterp.models.hooked.module import first_tensor

# Names of autograd's operations, without "Backward0".
_RESHAPED = """
View UnsafeView Reshape ReshapeAlias Transpose Permute Clone T Slice Select Unsqueeze Squeeze
Expand ToCopy Cat Alias Split SplitWithSizes Unbind Index Stack
"""
_RESCALED = "Mul Div Pow Rsqrt NativeLayerNorm FusedRms FusedRmsNorm NativeGroupNorm NativeDropout"
_BENT = "Add Sub Gelu Relu Silu Tanh Sigmoid Elu Softplus LeakyRelu"
BETWEEN = {*_RESHAPED.split(), *_RESCALED.split()}
"""Operations between the heads' outputs and the module that takes them."""
TRACED = {*BETWEEN, *_BENT.split()}
"""Operations through which the products behind a value are traced."""
_MATRIX_PRODUCTS = {"Addmm", "Mm"}
_SOFTMAX = "Softmax"
_PRODUCT = "Bmm"
"""Product of two batches of matrices."""
_FUSED = "ScaledDotProduct"
"""Beginning of the names of torch's own attention."""


def layer_names(trial: Trial, outputs: Sequence[str]) -> list[str]:
    """For each layer the name of the module that takes the heads' outputs, in order of running.

    A module that runs several times counts as a layer each time.

    Args:
        outputs: Stated names; empty: they are searched for.
    Raises:
        ValueError: If a stated name is not a module, none is found, or a module does not run.
    """
    given = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = dict(trial.module.named_modules())
    for name in given:
        if name not in known:
            if name in dict(trial.module.named_parameters()):
                raise _is_parameter(name)
            raise ValueError(
                f"outputs must be names of modules, as {trial.name}.named_modules() gives them, got {name!r}."
            )
    ran = run_order(trial)
    names = given or _found(trial, ran)
    for name in names:
        if name not in ran:
            raise ValueError(f"{name} must run for a prediction, got 0 times.")
    return [name for name in ran if name in names]


def _first_of_each(module: nn.Module, names: Sequence[str], ran: Sequence[str]) -> list[str]:
    """Names without those of modules that run after another one of the same parent, such as a read-out `out` after `o_proj`.

    Whole attentions and entries of a list are layers of their own.
    """
    first: dict[str, str] = {}
    layers: set[str] = set()
    for name in sorted(names, key=lambda name: ran.index(name) if name in ran else len(ran)):
        parent, _, last = name.rpartition(".")
        if last.isdecimal() or isinstance(module.get_submodule(name), nn.MultiheadAttention):
            layers.add(name)
        else:
            first.setdefault(parent, name)
    return [name for name in names if name in layers or name in first.values()]


def run_order(trial: Trial) -> list[str]:
    """Names of all modules in order of running."""
    ran: list[str] = []
    with ExitStack() as hooks:
        for name, part in trial.module.named_modules():
            note = part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
            hooks.enter_context(note)
        trial.run()
    return ran


def _found(trial: Trial, ran: Sequence[str]) -> list[str]:
    """Names of the modules that take the heads' outputs.

    Raises:
        ValueError: If none is found.
    """
    found = _first_of_each(trial.module, _by_name(trial.module), ran) or _by_run(trial, ran)
    if not found:
        raise ValueError(
            f"outputs must name the modules that take the heads' outputs, in hook_module(module, outputs=[...]): a {type(trial.module).__name__} "
            "has no MultiheadAttention, no module such as o_proj beside q_proj, k_proj and v_proj, and no projection of a product of "
            "attention weights and values. Without heads, compare_learners, name_algorithm and response take a function of prompts, "
            "such as lambda prompts: model(prompts.tokens)[:, -1, -1:]."
        )
    return found


def _by_name(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the heads' outputs, by the table of known names."""
    modules = dict(module.named_modules())
    names = {name for name, part in modules.items() if isinstance(part, nn.MultiheadAttention)}
    pieces = [
        each
        for each in weights_of(module)
        if not any(each.name.startswith(f"{attention}.") for attention in names)
    ]
    inner = {(each.path, each.layer) for each in pieces if each.part in (*INNER, BY_HEAD)}
    found = [p.name for p in pieces if p.part == "o" and (p.path, p.layer) in inner]
    names |= modules.keys() & {name.removesuffix(".weight") for name in found}
    names |= {each.output for each in delta_names(module)}
    if not names and found:
        raise _is_parameter(found[0])
    return tuple(names)


def _by_run(trial: Trial, ran: Sequence[str]) -> list[str]:
    """Names of the projections whose input is a product of attention weights and values, whatever they are called.

    Of several projections of the same product the first counts.
    """
    modules = dict(trial.module.named_modules())
    matrices = (name for name in dict.fromkeys(ran) if _is_matrix(modules[name]))
    first: dict[frozenset[Any], str] = {}
    for name, values in _inputs(trial, list(matrices)).items():
        products = frozenset(filter(_is_attention, _behind(values.grad_fn, BETWEEN)))
        if products:
            first.setdefault(products, name)
    return list(first.values())


def _is_matrix(part: nn.Module) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _is_attention(node: Any) -> bool:
    """True for torch's own attention, and for a product of batches of matrices of which one is made of scores."""
    if _name(node).startswith(_FUSED):
        return True
    return _is_product(node) and any(_made_of_scores(each) for each, _ in node.next_functions)


def _is_product(node: Any) -> bool:
    """True for a product of two batches of matrices, none of which is a weight or a constant."""
    if _name(node) != _PRODUCT:
        return False
    operands = [list(_behind(each, BETWEEN)) for each, _ in node.next_functions]
    return all(any(not hasattr(made, "variable") for made in each) for each in operands)


def _made_of_scores(node: Any) -> bool:
    """True if a softmax or a product of batches lies behind a value, before any projection."""
    made_of = _walked(node, lambda each: _name(each) not in _MATRIX_PRODUCTS)
    return any(_name(each) == _SOFTMAX or _is_product(each) for each in made_of)


def _is_parameter(name: str) -> ValueError:
    last = name.rpartition(".")[2]
    return ValueError(
        f"outputs must be modules, got the Parameter {name}: make it an nn.Linear(n_heads * d_head, d_model, bias=False) "
        f"with the transpose of {last} as its weight, and call self.{last}(z) on the heads' outputs z, side by side."
    )


def require_heads_outputs(trial: Trial, blocks: dict[str, str]) -> None:
    """Refuse modules whose input is the stream or hidden units of an MLP; outputs of heads are
    products of weights and values.

    Sums, norms, shape changes and activations are traced back to the products behind them.

    Args:
        blocks: For each module that takes heads' outputs, the name of its layer.
    Raises:
        ValueError: If there is such a module; the message names the first one.
    """
    module = trial.module

    def mark(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_Marked.apply(args[0]), *args[1:]), kwargs
        first = first_tensor(kwargs)
        return args, {**kwargs, first: _Marked.apply(kwargs[first])}

    others = [n for n in blocks if not isinstance(module.get_submodule(n), nn.MultiheadAttention)]
    with ExitStack() as hooks:
        for name in others:
            block = module.get_submodule(blocks[name])
            hooks.enter_context(block.register_forward_pre_hook(mark, with_kwargs=True))
        entered = _inputs(trial, others)
    for name, values in entered.items():
        made_of = {_name(node) for node in _behind(values.grad_fn, TRACED)}
        what = "hidden units" if made_of and made_of <= _MATRIX_PRODUCTS else ""
        what = "the residual stream" if "_Marked" in made_of else what
        if what:
            raise ValueError(
                f"outputs must name modules whose input is the heads' outputs side by side; the input of {name!r} is {what}."
            )


class _Marked(torch.autograd.Function):
    """Marks the stream, so that it is recognised in values computed from it."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor) -> Tensor:
        return stream.clone()  # a view could not be written into

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _inputs(trial: Trial, names: Sequence[str]) -> dict[str, Tensor]:
    """Input of the first run of each of these parts, with its graph of gradients, in order of running."""
    entered: dict[str, Tensor] = {}
    with ExitStack() as hooks, torch.enable_grad():
        for name in names:
            part = trial.module.get_submodule(name)
            note = partial(note_input, noted=entered, name=name)
            hooks.enter_context(part.register_forward_pre_hook(note, with_kwargs=True))
        with suppress(RuntimeError):  # numpy in forward does not run with gradients
            trial.run(trial.tokens.detach().requires_grad_())
    return entered


def note_input(
    _: nn.Module, args: tuple, kwargs: dict, noted: dict[str, Tensor], name: str
) -> None:
    """Hook that stores the input of a part of a module in its first run."""
    noted.setdefault(name, args[0] if args else kwargs[first_tensor(kwargs)])


def _name(node: Any) -> str:
    """Name of an operation of autograd, without "Backward0"."""
    return node.name().rpartition("::")[2].partition("Backward")[0].rstrip("_")


def _behind(node: Any, passed: set[str]) -> Iterator[Any]:
    """Operations behind a value, with those of these names passed through."""
    walked = _walked(node, lambda each: _name(each) in passed)
    return (each for each in walked if _name(each) not in passed)


def _walked(node: Any, on: Callable[[Any], bool]) -> Iterator[Any]:
    """A value's operation, and those behind each operation for which `on` is true."""
    seen, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if on(node):
            ahead.extend(each for each, _ in node.next_functions)
