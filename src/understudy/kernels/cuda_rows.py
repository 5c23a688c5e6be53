"""The rows of one forward pass on a device: kernels/rows.py's arrays there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from understudy.kernels.rows import Rows

PAGE: int = 32
"""Keys in a page"""

GROUP_ROWS: int = 4
"""The most rows that a group may have: their queries share one product on the tensor cores."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """As `Rows`, every array int32 on the device, and what a launch must know of them on the host."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    group_starts: Tensor
    group_tables: Tensor
    prefix_lens: Tensor
    tail_starts: Tensor
    tail_slots: Tensor
    logit_rows: Tensor
    words: Tensor
    """Words that passes drew: a token id of -1 - n is the one at place n"""
    most_keys: int
    """Keys of the row that has the most"""

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return self.positions.shape[0]

    @property
    def num_groups(self) -> int:
        """Groups of rows that read keys together."""
        return self.group_tables.shape[0]


def place_rows(rows: Rows, device: torch.device) -> PlacedRows:
    """Move rows to a device."""
    assert np.diff(rows.group_starts).max() <= GROUP_ROWS
    arrays = {
        name: np.ascontiguousarray(getattr(rows, name), np.int32)
        for name in ("token_ids", "positions", "slots", "tables", "group_starts", "group_tables", "prefix_lens",
                     "tail_starts", "tail_slots", "logit_rows")
    }  # fmt: skip
    together = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays.values()])).to(device)
    ends = np.cumsum([array.size for array in arrays.values()])
    placed = {
        name: together[end - array.size : end].view(array.shape)
        for (name, array), end in zip(arrays.items(), ends, strict=True)
    }
    words = torch.zeros(1, dtype=torch.int32, device=device)  # all tokens are known
    return PlacedRows(**placed, words=words, most_keys=int(rows.positions.max()) + 1)
