"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.callbacks.hugging_face import HuggingFaceCallback as HuggingFaceCallback
from mechinterp.callbacks.lightning import LightningCallback as LightningCallback
