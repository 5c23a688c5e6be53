"""Trained drafts on disk for tiny targets, and a drafter that stands in for theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tiny_heads import NUM_DRAFT_IDS, tiny_spec
from understudy.assembly import Target
from understudy.core.draft import ROOT, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.tree import Shape
from understudy.models.config import ModelConfig
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import WEIGHTS_FILE, TrainedHead, save_head
from understudy.models.heads.shipped import SHIPPED
from understudy.models.heads.spec import HeadKind
from understudy.train.run import new_head

NAMES: dict[HeadKind, str] = {"block": SHIPPED[0], "eagle": SHIPPED[1], "medusa": SHIPPED[2]}


def write_draft(
    folder: Path, kind: HeadKind, target: Target, *, config: ModelConfig | None = None, **overrides: Any
) -> Path:
    """An untrained draft for a target of four layers, or of another shape."""
    config = config or target.decoder.config
    spec = tiny_spec(kind, config, **{"target_name": target.name, "target_hash": target.source_hash, **overrides})
    vocabulary = DraftVocabulary(torch.arange(NUM_DRAFT_IDS), config.vocab_size)
    save_head(folder, TrainedHead(spec, new_head(spec, seed=1), vocabulary, {}))
    return folder


def truncate(folder: Path) -> Path:
    """Cut off the end of a draft's weights."""
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    return folder


@dataclass
class StandIn:
    """Guesses what followed the last word before, and at each place other words besides, as many as its shape says."""

    name: str
    shape: Shape
    proposed: list[Draft] = field(default_factory=list)

    def start(self, context: Context) -> None:
        pass

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [self._guess(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        self.proposed += drafts
        return drafts

    def stop(self, context: Context, *, finished: bool) -> None:
        pass

    def _guess(self, context: Context, budget: Budget) -> Draft:
        text = context.tokens
        before = [place for place in range(len(text) - 1) if text[place] == text[-1]]
        chain = text[before[-1] + 1 :][: budget.max_depth] if before else [len(text) % 50 + 3]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for word in chain:
            first = len(tokens)
            children = [word, *((word + place) % 300 for place in range(1, self.shape.num_children))]
            if first + len(children) > budget.max_rows:
                break
            tokens += children
            parents += [parent] * len(children)
            parent = first
        return Draft(tuple(tokens), tuple(parents), (0.9,) * len(tokens), (self.name,) * len(tokens))


@dataclass
class Maker:
    """Stands in for `drafters/trained.py`, and for its twin on a GPU, and remembers what it made."""

    made: list[StandIn] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    def make(self, trained: TrainedHead, *place: Any, shape: Shape, **options: Any) -> StandIn:
        if self.error is not None:
            raise self.error
        self.made.append(StandIn(trained.spec.kind, shape))
        self.options.append({"place": place, **options})
        return self.made[-1]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    found = Maker()
    module = ModuleType("understudy.drafters.trained")
    module.make_trained_drafter = found.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the package's drafts."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr("understudy.models.heads.shipped.drafts_folder", lambda: folder)
    return folder
