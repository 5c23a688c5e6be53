from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.parity.settings import Setting, every_setting, pairwise


def test_the_product_holds_every_valid_combination_once() -> None:
    product = every_setting()
    assert len(product) == len(set(product)) == 3 * 3 * (2 + 4)
    assert {setting.temperature for setting in product} == {0.0, 0.7, 1.0}
    assert {setting.drafters for setting in product} == {("ngram",), ("suffix",), ("suffix", "ngram")}


def test_nothing_is_preempted_alone() -> None:
    assert all(setting.concurrency == 4 for setting in every_setting() if setting.preemption)
    assert not Setting(("ngram",), 0.0, 1, False, True).is_valid


def test_names_are_readable_and_unique() -> None:
    product = every_setting()
    assert len({setting.name for setting in product}) == len(product)
    assert Setting(("suffix", "ngram"), 0.7, 4, True, True).name == (
        "suffix+ngram, temperature 0.7, 4 at once, prefix cache, preemption"
    )
    assert Setting(("ngram",), 0.0, 1, False, False).name == "ngram, temperature 0, 1 at once"


def _pairs(chosen: list[Setting]) -> set[object]:
    return {pair for setting in chosen for pair in combinations(setting.values(), 2)}


def test_every_pair_of_values_that_can_meet_does_meet() -> None:
    product = every_setting()
    chosen = pairwise(product)
    assert _pairs(chosen) == _pairs(product)
    assert len(chosen) <= 12  # nine are the fewest: three drafters times three temperatures
    assert len(chosen) == len(set(chosen))
    assert chosen == pairwise(every_setting())


def test_the_list_begins_with_the_most_demanding_setting() -> None:
    assert pairwise(every_setting())[0] == Setting(("suffix", "ngram"), 0.0, 4, True, True)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 53), min_size=1))
def test_any_part_of_the_product_is_covered(places: set[int]) -> None:
    product = every_setting()
    part = [product[place] for place in sorted(places)]
    chosen = pairwise(part)
    assert set(chosen) <= set(part)
    assert _pairs(chosen) == _pairs(part)


def test_nothing_is_covered_by_nothing() -> None:
    assert pairwise([]) == []
