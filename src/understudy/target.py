"""A loaded target, and what drafts beside it: a smaller model, or a network that reads the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.config import MODEL
from understudy.core.weights import Device, WeightType
from understudy.kernels.devices import device_facts, packing
from understudy.kernels.interface import Kernels
from understudy.models.decoder import Decoder
from understudy.models.draft_check import num_parameters
from understudy.models.heads.files import TrainedHead
from understudy.models.weights import LoadedModel
from understudy.models.widen import WIDENED
from understudy.runtime.fingerprint import system_fingerprint
from understudy.text.tokenizer import Tokenizer
from understudy.text.vocabulary import VocabularyMap


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model: what several engines can share."""

    decoder: Decoder
    vocabulary: VocabularyMap
    name: str
    num_bytes: int
    """Memory of its weights; nothing where they are the target's own."""

    @property
    def kind(self) -> str:
        """The name of the drafter that uses it."""
        return MODEL

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take in its own cache."""
        return self.decoder.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A loaded trained draft: what several engines can share."""

    trained: TrainedHead
    name: str
    num_bytes: int
    """Memory of its weights as they were loaded; embedding and output layer are the target's own."""

    @property
    def kind(self) -> str:
        """The name of the drafter that uses it."""
        return self.trained.spec.kind

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take in its own cache, in fp32; medusa has none."""
        spec = self.trained.spec
        num_layers = 0 if spec.kind == "medusa" else spec.num_layers
        return 2 * 4 * num_layers * spec.target.num_kv_heads * spec.target.head_dim


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model: what several engines can share."""

    decoder: Decoder
    tokenizer: Tokenizer
    page_tokens: int
    name: str
    source_hash: str
    place: str | Path | None
    """Where the model was loaded from; None for the embedded one."""
    is_row_invariant: bool = True
    """What the start-up self-test found; without it every row is computed by itself."""
    draft: DraftModel | TrainedDraft | None = None
    device: Device = "cpu"
    draft_problem: str = ""
    """Why the draft that was to be beside it is not there."""

    @property
    def trained_hash(self) -> str:
        """The hash that drafts for it were trained for: its own, or that of the model before it was widened."""
        return self.source_hash.partition(WIDENED)[0]

    @property
    def draft_kind(self) -> str | None:
        """The name of the drafter that uses its draft."""
        return None if self.draft is None else self.draft.kind

    @property
    def weights(self) -> WeightType:
        """How the linear layers' weights are held."""
        return self.decoder.weights

    @property
    def num_bytes(self) -> int:
        """Memory of all weights as they are packed: layers, embedding and output layer."""
        return self.decoder.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take."""
        return self.decoder.kv_bytes_per_token

    @property
    def device_facts(self) -> dict[str, str]:
        """What names the GPU that computes it, and what it computes with; nothing for the CPU."""
        return device_facts(self.device)

    @property
    def system_fingerprint(self) -> str:
        """Names everything besides the request that the words are a function of."""
        return system_fingerprint(
            self.source_hash, weights=self.weights, is_row_invariant=self.is_row_invariant, device=self.device
        )


def pack(loaded: LoadedModel, kernels: Kernels, *, weights: WeightType, int8_output: bool = False) -> Decoder:
    """Pack a model's weights where they are computed with."""
    with packing(loaded.name, wanted_bytes=num_parameters(loaded.config) * kernels.number_bytes):
        return Decoder(loaded.config, loaded.tensors, kernels, weights=weights, int8_output=int8_output)
