"""One GGUF file opened for reading: its metadata as plain values, its tensors as fp32 under Hugging Face names.

Llama files keep q and k with the two halves of each rotary pair side by side, where Hugging Face keeps them half a
head apart; `tensor` undoes it, so that one decoder serves both. Qwen files are not permuted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from understudy.errors import ModelError

AGAIN = "Download the file again."

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Reader(gguf.GGUFReader):
    """The package's reader, but a file that ends early is an error that says where, not a short array or a hang."""

    reading = "its metadata"

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ModelError(
                f"The file ends at byte {len(self.data)}, inside {self.reading}, which needs {end}: it is truncated.",
                AGAIN,
            )
        if self.byte_order != "I" or sys.byteorder != "little":
            return super()._get(offset, dtype, count, override_order)
        # A slice of a mapped file costs ten times as much, and a vocabulary has hundreds of thousands of strings.
        return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        built: list[Any] = []
        for field in fields:  # one at a time, so that the error above can name the tensor
            self.reading = f"the tensor {field.name}"
            super()._build_tensors(start_offs, [field])
            built += self.tensors
        self.tensors = built


class GgufFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
            self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            """Metadata: name to number, string, truth value or list of these."""
        except ModelError as error:
            raise ModelError(f"{path}: {error.message}", error.remedy) from None
        except Exception as error:  # a damaged file makes the package raise whatever its bytes happen to break
            raise ModelError(f"{path} is not a GGUF file that can be read: {error}.", AGAIN) from None
        if reader.byte_order != "I":
            raise ModelError(f"{path} has the byte order of another machine.", "Convert it with gguf-convert-endian.")
        if self.fields.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{path} is one of {self.fields['split.count']} parts.", "Merge them: gguf-split --merge.")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def names(self) -> Iterator[str]:
        """Give the name of every tensor, as in the file."""
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Give a tensor's shape in rows-first order, as Hugging Face counts it."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str, *, permuted_heads: int = 0) -> npt.NDArray[np.float32]:
        """Give a tensor in fp32; `permuted_heads` is the number of heads to bring back to half-split rotary order."""
        stored = self._tensors[name]
        try:
            values = np.asarray(gguf.quants.dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise ModelError(
                f"{self.path}: {name} is stored as {kind}, which is not supported.",
                "Use a file in F32, F16, BF16 or one of the common Q4 to Q8 forms.",
            ) from None
        if permuted_heads:
            # [heads, pairs, 2, columns] -> [heads, 2, pairs, columns]
            pairs = values.reshape(permuted_heads, -1, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        # never a view of the mapped file: the caller may write
        return np.require(values, dtype=np.float32, requirements=["C", "W"])


def hugging_face_name(name: str) -> str | None:
    """Translate a GGUF tensor name, such as blk.0.attn_q.weight; None for one that has no counterpart."""
    whole = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if whole and whole[1] in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[whole[1]]}.{whole[2]}"
    layered = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layered and layered[2] in _PER_LAYER:
        return f"model.layers.{layered[1]}.{_PER_LAYER[layered[2]]}.{layered[3]}"
    return None
