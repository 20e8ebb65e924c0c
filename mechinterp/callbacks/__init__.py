"""Callbacks that call a `Monitor` in other libraries' training loops; each needs its library."""

from mechinterp.rooms import names_of

HOMES = {
    "HuggingFaceCallback": "mechinterp.callbacks.hugging_face",
    "LightningCallback": "mechinterp.callbacks.lightning",
}
__all__ = [*HOMES]
__getattr__ = names_of(__name__, HOMES)
