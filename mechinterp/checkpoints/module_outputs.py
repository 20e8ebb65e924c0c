"""Modules that take the heads' outputs side by side: by their names, or else by what a run multiplies."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.foreign.names import INNER
from mechinterp.checkpoints.module_input import Trial
from mechinterp.checkpoints.module_names import weights_of
from mechinterp.models.hooked.delta_layers import delta_names
from mechinterp.models.hooked.followed import BY_HEAD
from mechinterp.models.hooked.module import first_tensor
