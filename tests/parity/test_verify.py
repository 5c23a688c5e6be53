import json
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from tests.parity.broken import FailingDrafter, SilentDrafter, believing_walk, careless_keep
from tests.parity.conftest import PROMPTS
from understudy.assembly import Target
from understudy.bench.prompts import Prompt
from understudy.config import DRAFTERS
from understudy.core.request import SpeculationCounts
from understudy.errors import InvalidRequest
from understudy.parity.cases import LEAST_CASES, Case, CaseSet, make_cases
from understudy.parity.report import show, to_json
from understudy.parity.run import Happenings
from understudy.parity.settings import Setting, every_setting, pairwise
from understudy.parity.verify import Report, SettingReport, Targets, scarce, vacuous_reasons, verify

MERGED = ("suffix", "ngram", "lookahead", "model")
HARDEST = Setting(MERGED, 0.0, 4, True, True, "int8")
PLAIN_CHAIN = Setting(("ngram",), 0.0, 1, False, False, "fp32")
SCOUTING = Setting(("lookahead",), 0.7, 1, False, False, "fp32")
TREES = Setting(MERGED, 1.0, 1, False, False, "fp32")


@pytest.fixture(scope="module")
def cases(target: Target) -> CaseSet:
    return make_cases(PROMPTS, target, count=8, max_tokens=64)


@pytest.fixture(scope="module")
def report(targets: Targets, cases: CaseSet) -> Report:
    return verify(targets, cases, pairwise(every_setting()))


def test_the_words_are_the_same_under_every_pair_of_settings(report: Report) -> None:
    assert report.differences == []
    assert [line.vacuous for line in report.settings] == [[] for _ in report.settings]
    assert report.compared == report.identical > 180
    assert report.proven
    assert report.cut == []


def test_what_a_setting_claims_did_happen(report: Report) -> None:
    for line in report.settings:
        happenings = line.happenings
        assert min(happenings.counts.drafted, happenings.counts.accepted, happenings.counts.rejected) > 0
        assert happenings.most_sequences == line.setting.concurrency
        assert bool(happenings.cached_tokens) == line.setting.prefix_cache
        assert bool(happenings.preemptions) == line.setting.preemption
        assert bool(happenings.num_scout_rows) == ("lookahead" in line.setting.drafters)
        assert set(happenings.accepted_by_drafter) <= set(line.setting.drafters)
        assert sum(happenings.accepted_by_drafter.values()) == happenings.counts.accepted
    assert {line.setting.weights for line in report.settings} == {"int8", "fp32"}


def test_each_kind_of_weights_has_words_of_its_own(report: Report, targets: Targets, cases: CaseSet) -> None:
    """Were int8 compared with the words of fp32, the proof would be of something else."""
    assert set(report.system_fingerprints) == {"int8", "fp32"}
    assert len(set(report.system_fingerprints.values())) == 2
    proven = verify(targets, cases, [TREES])
    assert set(proven.system_fingerprints) == {"fp32"}


@pytest.mark.full
def test_the_words_are_the_same_under_every_setting(targets: Targets, cases: CaseSet) -> None:
    report = verify(targets, cases, every_setting())
    assert report.differences == []
    assert len(report.settings) == 180
    assert report.proven


def test_a_report_can_be_written_and_shown(report: Report, cases: CaseSet) -> None:
    value = json.loads(json.dumps(to_json(report, cases)))
    assert value["compared"] == value["identical"] == report.compared
    assert value["vacuous"] == value["differences"] == value["cut"] == []
    assert set(value["settings"]) == {line.setting.name for line in report.settings}
    assert (value["model"], value["draft"]) == ("tiny", "tiny, its first 1 layers")
    assert sorted(value["weights"]) == ["fp32", "int8"]
    assert value["system_fingerprints"] == report.system_fingerprints
    assert {line["weights"] for line in value["settings"].values()} == {"fp32", "int8"}
    assert value["settings"][HARDEST.name]["accepted_by_drafter"]["model"] > 0
    assert value["settings"][HARDEST.name]["scout_rows"] > 0
    assert len(value["prompts"]) == LEAST_CASES
    assert {"drafted", "accepted", "rejected", "cached_tokens", "preemptions", "most_sequences"} <= set(
        value["settings"][HARDEST.name]
    )
    console = Console(width=160, record=True, quiet=True)
    show(report, cases, console)


@pytest.mark.parametrize(
    ("place", "broken", "setting", "fields"),
    [
        ("understudy.sampling.verify.walk", believing_walk, PLAIN_CHAIN, {"token_ids", "text", "logprobs"}),
        ("understudy.sampling.verify.walk", believing_walk, HARDEST, {"token_ids", "text", "logprobs"}),
        # wrong keys change every number, and with it some words
        ("understudy.kv.sequence.SequenceCache.keep", careless_keep, TREES, {"token_ids", "text", "logprobs"}),
    ],
)
def test_a_broken_engine_is_found_out(
    targets: Targets,
    cases: CaseSet,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    broken: object,
    setting: Setting,
    fields: set[str],
) -> None:
    monkeypatch.setattr(place, broken)
    report = verify(targets, cases, [setting])
    assert not report.proven
    assert report.identical < report.compared
    first = report.differences[0]
    assert first.setting == setting.name
    assert first.position is not None
    assert {difference.field for difference in report.differences} >= fields
    console = Console(width=160, record=True, quiet=True)
    show(report, cases, console)
    assert to_json(report, cases)["differences"][0]["position"] == first.position


def test_a_drafter_that_says_nothing_proves_nothing(
    targets: Targets, cases: CaseSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.assembly.make_drafter", lambda *name, **room: SilentDrafter())
    report = verify(targets, cases, [PLAIN_CHAIN])
    assert report.identical == report.compared
    assert not report.proven
    assert [line.setting for line in report.vacuous] == [PLAIN_CHAIN]
    assert "no token was drafted" in report.vacuous[0].vacuous
    assert to_json(report, cases)["vacuous"] == [PLAIN_CHAIN.name]


def test_a_drafter_that_fails_is_told(targets: Targets, cases: CaseSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.assembly.make_drafter", lambda *name, **room: FailingDrafter())
    report = verify(targets, cases, [PLAIN_CHAIN])
    assert report.identical == report.compared
    assert any("no more" in reason for reason in report.vacuous[0].vacuous)


def test_prompts_below_a_block_prove_nothing_of_the_prefix_cache(target: Target, targets: Targets) -> None:
    short = make_cases([Prompt(text=f"the cat and {word}") for word in "abcdefgh"], target, count=8, max_tokens=16)
    report = verify(targets, short, [replace(PLAIN_CHAIN, prefix_cache=True)])
    assert any("prefix cache" in reason for reason in report.vacuous[0].vacuous)


ALL = dict.fromkeys(DRAFTERS, 1)
ALL_BUT_NGRAM = {name: count for name, count in ALL.items() if name != "ngram"}


@pytest.mark.parametrize(
    ("setting", "changes", "reason"),
    [
        (PLAIN_CHAIN, {"most_sequences": 0}, "never 1"),
        (HARDEST, {"most_sequences": 3}, "never 4"),
        (HARDEST, {"preemptions": 0}, "preempted"),
        (HARDEST, {"num_cache_hits": 0}, "prefix cache"),
        (HARDEST, {"num_scout_rows": 0}, "no row was scouted"),
        (SCOUTING, {"num_scout_rows": 0}, "no row was scouted"),
        (HARDEST, {"accepted_by_drafter": Counter(suffix=9)}, "only one drafter's"),
        (SCOUTING, {"counts": SpeculationCounts(drafted=2, accepted=2, proposed=ALL)}, "rejected"),
        (SCOUTING, {"counts": SpeculationCounts(drafted=2, rejected=2, proposed=ALL)}, "accepted"),
        (HARDEST, {"fallbacks": ["drafter ngram: switched off"]}, "switched off"),
        (HARDEST, {"counts": SpeculationCounts(drafted=2, accepted=1, rejected=1, proposed=ALL_BUT_NGRAM)}, "ngram"),
    ],
)
def test_each_reason_for_being_vacuous(setting: Setting, changes: dict[str, object], reason: str) -> None:
    happenings = Happenings(
        counts=SpeculationCounts(drafted=2, accepted=1, rejected=1, proposed=ALL),
        num_cache_hits=1,
        cached_tokens=32,
        preemptions=1,
        most_sequences=4,
        num_scout_rows=8,
        accepted_by_drafter=Counter(suffix=1, model=1),
    )
    assert vacuous_reasons(setting, happenings) == []
    for name, value in changes.items():
        setattr(happenings, name, value)
    (found,) = vacuous_reasons(setting, happenings)
    assert reason in found


def test_an_answer_with_an_error_proves_nothing(
    targets: Targets, cases: CaseSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding may end with the same error: the answers would be equal."""
    from understudy.parity import run

    answer = run._answer
    monkeypatch.setattr(run, "_answer", lambda *args: replace(answer(*args), error="broken"))
    report = verify(targets, cases, [PLAIN_CHAIN])
    assert report.identical == report.compared
    assert not report.proven
    assert any("ended with an error (broken)" in reason for reason in report.vacuous[0].vacuous)


class Notes:
    """Remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.reports: list[SettingReport] = []

    def at(self, what: str, done: int, total: int) -> None:
        self.seen.append((what, done, total))

    def finished(self, report: SettingReport) -> None:
        self.reports.append(report)


def test_a_small_budget_runs_one_setting_and_names_the_rest(targets: Targets, cases: CaseSet) -> None:
    notes = Notes()
    settings = [PLAIN_CHAIN, TREES, HARDEST]
    report = verify(targets, cases, settings, budget_s=1e-6, watcher=notes)
    assert [line.setting for line in report.settings] == [line.setting for line in notes.reports] == [PLAIN_CHAIN]
    assert report.cut == [TREES, HARDEST]
    assert report.proven
    assert to_json(report, cases)["cut"] == [TREES.name, HARDEST.name]
    done = [done for _, done, _ in notes.seen]
    assert done == sorted(done)
    assert done[-1] == 2 * len(cases.cases)


def test_the_bar_is_full_at_the_end(targets: Targets, cases: CaseSet) -> None:
    notes = Notes()
    verify(targets, cases, [HARDEST], watcher=notes)
    assert notes.seen[-1][1] == notes.seen[-1][2]


def test_few_prompts_are_joined_by_our_own(target: Target) -> None:
    made = make_cases(PROMPTS[:2], target, count=8, max_tokens=8)
    assert len(made.cases) == LEAST_CASES
    assert made.num_left_out == 0
    assert {0, 1} <= {case.index for case in made.cases}
    assert len({case.prompt_ids for case in made.cases}) == LEAST_CASES


def test_cases_are_always_the_same_and_the_shortest_comes_first(target: Target, cases: CaseSet) -> None:
    assert make_cases(PROMPTS, target, count=8, max_tokens=64) == cases
    lengths = [len(case.prompt_ids) for case in cases.cases]
    assert lengths == sorted(lengths)
    assert len({case.seed for case in cases.cases}) == len(cases.cases)
    for case in cases.cases:
        assert case.sampling(0.7).temperature == 0.7
        assert case.sampling(0.0).logprobs == 2


def test_prompts_that_do_not_fit_are_left_out_and_counted(target: Target) -> None:
    long = Prompt(text="the cat " * 600)
    made = make_cases([*PROMPTS, long], target, count=9, max_tokens=500)
    assert made.num_left_out == 1
    assert all(case.num_tokens <= target.decoder.config.max_positions for case in made.cases)
    with pytest.raises(InvalidRequest, match="None of the 1 prompts fits"):
        make_cases([long], target, count=8, max_tokens=8)


def _case(num_prompt: int, max_tokens: int) -> Case:
    return Case(0, "other", "", tuple(range(num_prompt)), {}, max_tokens)


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [
        ([40, 50, 60, 70], 64),
        ([40, 50, 60, 70, 160], 64),
        ([5, 5, 5, 5], 512),
        ([10, 10, 10, 3000, 8000], 64),
        ([1000] * 8, 64),
    ],
)
def test_scarce_blocks_let_four_start_but_not_end(lengths: list[int], max_tokens: int) -> None:
    cases = [_case(length, max_tokens) for length in lengths]
    kept, num_blocks = scarce(cases, 32)
    first = cases[:4]
    assert kept[:4] == first
    assert all(case.num_tokens <= num_blocks * 32 for case in kept)
    assert sum(len(case.prompt_ids) // 32 + 1 for case in first) + 3 <= num_blocks
    assert sum(-(-case.num_tokens // 32) for case in first) > num_blocks


def test_an_interrupt_keeps_what_was_proven(targets: Targets, cases: CaseSet) -> None:
    class Impatient:
        def at(self, what: str, done: int, total: int) -> None:
            if interrupt:
                raise KeyboardInterrupt

        def finished(self, report: SettingReport) -> None:
            interrupt.append(report)

    interrupt: list[SettingReport] = []
    report = verify(targets, cases, [PLAIN_CHAIN, TREES, HARDEST], watcher=Impatient())
    assert report.interrupted
    assert [line.setting for line in report.settings] == [PLAIN_CHAIN]
    assert report.cut == [TREES, HARDEST]
