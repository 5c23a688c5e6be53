from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.config import DRAFTERS, TRAINED_DRAFTERS
from understudy.parity.settings import Setting, by_weights, every_setting, pairwise

MERGED = ("suffix", "ngram", "lookahead", "model")


def test_every_drafter_is_proven() -> None:
    found = {name for setting in every_setting(trained=TRAINED_DRAFTERS) for name in setting.drafters}
    assert found == set(DRAFTERS)
    assert {name for setting in every_setting() for name in setting.drafters} == set(MERGED)


def test_trained_drafts_are_proven_as_chains_and_as_trees() -> None:
    product = every_setting(trained=("block", "eagle"))
    assert {setting.drafters for setting in product if setting.trained} == {("block",), ("eagle",), ("suffix", "block")}
    assert len(product) == len(set(product)) == (5 + 2 * 3) * 3 * (2 + 4) * 2
    chosen = pairwise(product)
    assert _pairs(chosen) == _pairs(product)
    assert {(s.trained, s.draft_tree) for s in chosen} == {
        (None, 1),
        *((k, n) for k in ("block", "eagle") for n in (1, 3)),
    }
    assert len({setting.name for setting in product}) == len(product)
    assert not Setting(("suffix",), 0.0, 1, False, False, "int8", 3).is_valid


def test_each_kind_of_weights_is_needed_once() -> None:
    chosen = pairwise(every_setting())
    ordered = by_weights(chosen)
    num_int8 = sum(setting.weights == "int8" for setting in chosen)
    assert [setting.weights for setting in ordered] == ["int8"] * num_int8 + ["fp32"] * (len(chosen) - num_int8)
    for weights in ("int8", "fp32"):
        assert [s for s in ordered if s.weights == weights] == [s for s in chosen if s.weights == weights]


def test_the_product_holds_every_valid_combination_once() -> None:
    product = every_setting()
    assert len(product) == len(set(product)) == 5 * 3 * (2 + 4) * 2
    assert {setting.temperature for setting in product} == {0.0, 0.7, 1.0}
    assert {setting.weights for setting in product} == {"int8", "fp32"}
    assert {setting.drafters for setting in product} == {*((name,) for name in MERGED), MERGED}


def test_nothing_is_preempted_alone() -> None:
    assert all(setting.concurrency == 4 for setting in every_setting() if setting.preemption)
    assert not Setting(("ngram",), 0.0, 1, False, True, "int8").is_valid


def test_names_are_readable_and_unique() -> None:
    product = every_setting()
    assert len({setting.name for setting in product}) == len(product)
    assert Setting(("suffix", "ngram"), 0.7, 4, True, True, "int8").name == (
        "suffix+ngram, temperature 0.7, 4 at once, prefix cache, preemption, int8"
    )
    assert Setting(("ngram",), 0.0, 1, False, False, "fp32").name == "ngram, temperature 0, 1 at once, fp32"


def _pairs(chosen: list[Setting]) -> set[object]:
    return {pair for setting in chosen for pair in combinations(setting.values(), 2)}


def test_every_pair_of_values_that_can_meet_does_meet() -> None:
    product = every_setting()
    chosen = pairwise(product)
    assert _pairs(chosen) == _pairs(product)
    assert len(chosen) <= 18  # fifteen are the fewest: five times three, drafters and temperatures
    assert len(chosen) == len(set(chosen))
    assert chosen == pairwise(every_setting())


def test_the_list_begins_with_the_most_demanding_setting() -> None:
    assert pairwise(every_setting())[0] == Setting(MERGED, 0.0, 4, True, True, "int8")


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 179), min_size=1))
def test_any_part_of_the_product_is_covered(places: set[int]) -> None:
    product = every_setting()
    part = [product[place] for place in sorted(places)]
    chosen = pairwise(part)
    assert set(chosen) <= set(part)
    assert _pairs(chosen) == _pairs(part)


def test_nothing_is_covered_by_nothing() -> None:
    assert pairwise([]) == []
