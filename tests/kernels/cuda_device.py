"""Where the tests of the GPU's kernels run: on a GPU if there is one, else small, on the CPU, in Triton's interpreter.

Import this before anything of understudy.kernels.cuda: the interpreter is chosen when a kernel is defined. Without
Triton the importing module is skipped. The interpreter knows no bf16 products, so there the tests run in fp16.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed; `pip install triton` adds it for these tests")

if not ON_GPU:
    from triton.runtime import interpreter

    def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """A product whose sums are added up in one order, as on a tensor core.

        The interpreter's own is numpy's: on some machines its bits depend on the number of rows.
        """
        total = d.data
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for place in range(left.shape[-1]):
            total = total + left[..., :, place : place + 1] * right[..., place : place + 1, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
PRECISION = 2.0**-8 if ON_GPU else 2.0**-11
"""The largest relative error of one rounding to DTYPE."""

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA GPU")


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_host(tensor: Tensor) -> NDArray[np.float64]:
    """The numbers, exactly."""
    return tensor.double().cpu().numpy()


def ints(*values: int) -> Tensor:
    """Integers as the kernels read them."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
