from __future__ import annotations

import pytest

from understudy.control.rules import memory_notice, start_depth


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 4), (0.4, 4), (0.5, 3), (1.0, 2), (1.5, 1), (9.0, 1)])
def test_depth_to_begin_with_falls_with_the_temperature(temperature: float, depth: int) -> None:
    assert start_depth(temperature) == depth


def test_memory_of_a_draft_in_sequences() -> None:
    assert memory_notice(draft_bytes=99, kv_bytes_per_sequence=100) == ""
    assert "1 more sequence of full length" in memory_notice(draft_bytes=100, kv_bytes_per_sequence=100)
    notice = memory_notice(draft_bytes=512 * 2**20, kv_bytes_per_sequence=100 * 2**20)
    assert "512 MiB" in notice
    assert "5 more sequences" in notice
