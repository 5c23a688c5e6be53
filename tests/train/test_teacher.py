"""The teacher reads as the serving decoder does, for every architecture: the same logits at every position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.engines import ARCHITECTURES
from tests.tiny_models import TinyArchitecture, write_tiny_model
from understudy.models.load import load_model
from understudy.train.teacher import Teacher


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agrees_with_transformers(architecture: TinyArchitecture, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path, architecture, num_hidden_layers=3, **ARCHITECTURES[architecture])
    loaded = load_model(tmp_path)
    teacher = Teacher(loaded.config, loaded.tensors)
    tokens = torch.randint(0, 304, (2, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    reading = teacher.read(tokens, (1, 2))
    np.testing.assert_allclose(teacher.logits(reading.last_hidden), expected.logits, rtol=1e-3, atol=1e-3)
    for place, layer in enumerate((1, 2)):  # transformers' number 0 is the embedding: after n layers is n there too
        np.testing.assert_allclose(reading.features[:, :, place], expected.hidden_states[layer], rtol=1e-3, atol=1e-3)


def test_what_fills_a_text_up_changes_nothing(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path))
    teacher = Teacher(loaded.config, loaded.tensors)
    tokens = torch.randint(0, 304, (1, 20), generator=torch.Generator().manual_seed(0))
    filled = torch.cat([tokens, torch.zeros(1, 7, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(teacher.read(filled).last_hidden[:, :20], teacher.read(tokens).last_hidden)
    assert teacher.read(tokens).features.shape == (1, 20, 0, 64)
