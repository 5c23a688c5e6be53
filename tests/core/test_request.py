from understudy.core.request import SpeculationCounts


def test_a_walk_counts_the_positions_it_came_to() -> None:
    counts = SpeculationCounts()
    counts.add_walk([True, True, False])
    counts.add_walk([False])
    counts.add_walk([])
    counts.add_walk([True])  # all that was drafted matched, or the text was cut off there
    assert counts.reached_by_position == [3, 1, 1]
    assert counts.matched_by_position == [2, 1, 0]


def test_counts_of_several_walks_add_up_by_position() -> None:
    first, second = SpeculationCounts(cycles=1, accepted=2, rows=3), SpeculationCounts(cycles=2, drafted=4, rejected=1)
    first.add_walk([True, True, False])
    second.add_walk([False])
    first.add(second)
    assert first == SpeculationCounts(3, 4, 2, 1, 3, [2, 1, 1], [1, 1, 0])
    assert second.reached_by_position == [1], "the other is left as it was"
    second.add(first)
    assert second.reached_by_position == [3, 1, 1]
