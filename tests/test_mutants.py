"""Would the tests notice? Each mutant breaks one thing that the promise rests on, and at least one check must fail.

The checks are those of tests/engine, with a fixed seed and cut short: a mutant that is caught is caught within a
second or so, and one that is not has run them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.control.audit import Audit
from tests.control.ledger_paths import long_path, path_that_turns
from tests.control.random_worlds import random_world
from tests.control.worlds import Run
from tests.engine import checks
from tests.engine.engines import tiny_target
from understudy.assembly import Target
from understudy.control import ledger as ledger_module
from understudy.control.controller import Controller
from understudy.control.ledger import WindowLedger
from understudy.core.draft import ROOT, Draft
from understudy.engine import engine as engine_module
from understudy.engine import sequence as sequence_module
from understudy.engine.engine import Engine
from understudy.engine.scheduler import Scheduler
from understudy.engine.sequence import Sequence
from understudy.kernels.cpu_linear import Linear
from understudy.kv.prefix import PrefixCache
from understudy.kv.sequence import SequenceCache
from understudy.runtime import inputs
from understudy.runtime.inputs import TreeNode
from understudy.sampling import verify as verify_module
from understudy.sampling.grammar import GrammarState
from understudy.sampling.noise import NoiseKey
from understudy.sampling.processors import Sampler
from understudy.sampling.verify import Verdict, Word

Floats = NDArray[np.float32]

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]

CHECKS: tuple[Callable[[Target], Any], ...] = (
    checks.tenants_apart,
    checks.choices_apart,
    checks.draws_apart,
    lambda target: checks.live_cache(target, "mutants", num_steps=1500, num_questions=25),
    lambda target: checks.same_words(target, "mutants", num_cases=60, num_questions=30),
)


# Verify: the walk that accepts.


def _any_child(draft: Draft, node: int) -> int | None:
    return next((child for child, parent in enumerate(draft.parents) if parent == node), None)


def accepts_any_child(patch: Patch) -> None:
    """The target's word is emitted, but the walk goes on below a child that carries another."""

    def walk(draft: Draft, sample: Callable[[int], int]) -> Iterator[Word]:
        node: int | None = ROOT
        while node is not None:
            row, token = node + 1, sample(node + 1)
            right = draft.child(node, token)
            node = right if right is not None else _any_child(draft, node)
            yield Word(token, row, node)

    patch.setattr(verify_module, "walk", walk)


def emits_the_drafts_token(patch: Patch) -> None:
    """Whatever was drafted is said."""

    def walk(draft: Draft, sample: Callable[[int], int]) -> Iterator[Word]:
        node: int | None = ROOT
        while node is not None:
            row, token = node + 1, sample(node + 1)
            node = _any_child(draft, node)
            yield Word(token if node is None else draft.tokens[node], row, node)

    patch.setattr(verify_module, "walk", walk)


def emits_no_bonus_after_a_rejection(patch: Patch) -> None:
    """The word on which the walk leaves the draft is replaced with the one after the root."""

    def walk(draft: Draft, sample: Callable[[int], int]) -> Iterator[Word]:
        node: int | None = ROOT
        while node is not None:
            token = sample(0 if _any_child(draft, node) is None else node + 1)
            node = draft.child(node, token)
            yield Word(token, 0, node)

    patch.setattr(verify_module, "walk", walk)


# The noise key.


def _sample_at(patch: Patch, position_of: Callable[[Sequence], int]) -> None:
    def draw(self: Sequence, logits: Any) -> int:
        allowed = None if self._grammar is None else self._grammar.allowed()
        return self._sampler.sample(
            logits, position=position_of(self), num_generated=self.num_generated, allowed=allowed
        )

    patch.setattr(Sequence, "draw", draw)


def keys_noise_by_the_row(patch: Patch) -> None:
    """The noise depends on the row that a word is drawn from: right in a plain step, and nowhere else."""
    _sample_at(patch, lambda sequence: 2 * len(sequence.tokens) - sequence.cache.length - 1)


def keys_noise_by_the_step(patch: Patch) -> None:
    """All words of a step share the noise of its first."""
    _sample_at(patch, lambda sequence: sequence.cache.length)


def keys_noise_without_the_position(patch: Patch) -> None:
    _sample_at(patch, lambda sequence: 0)


def keys_noise_without_the_choice(patch: Patch) -> None:
    patch.setattr(sequence_module, "NoiseKey", lambda seed, choice: NoiseKey(seed, 0))


def keys_noise_without_the_seed(patch: Patch) -> None:
    patch.setattr(sequence_module, "NoiseKey", lambda seed, choice: NoiseKey(0, choice))


# Rollback and commit.


def commits_a_rejected_row(patch: Patch) -> None:
    """Where a drafted row was rejected, the cache keeps one row too many."""
    commit = engine_module.commit

    def commit_one_more(runner: Any, landed: Any) -> None:
        commit(runner, landed)
        for share, verdict in landed:
            cache = share.sequence.cache
            if len(verdict.draft) > len(verdict.path) and cache.length % checks.PAGE:  # within the last block
                cache.length += 1

    patch.setattr(engine_module, "commit", commit_one_more)


def copies_no_accepted_rows(patch: Patch) -> None:
    """An accepted path that does not lie in line stays where it was written."""
    patch.setattr(SequenceCache, "keep", lambda self, num_known, path: ([], []))


def copies_accepted_rows_backwards(patch: Patch) -> None:
    """The last copy first: it overwrites what the first one needs."""
    keep = SequenceCache.keep

    def keep_backwards(self: SequenceCache, num_known: int, path: Any) -> tuple[list[int], list[int]]:
        sources, targets = keep(self, num_known, path)
        return sources[::-1], targets[::-1]

    patch.setattr(SequenceCache, "keep", keep_backwards)


def forgets_to_give_a_block_back(patch: Patch) -> None:
    def shrink(self: SequenceCache, num_blocks: int) -> None:
        del self.blocks[num_blocks:]

    patch.setattr(SequenceCache, "_shrink", shrink)


def keeps_the_length_of_the_preempted(patch: Patch) -> None:
    """A preempted sequence loses its blocks and believes that they are full."""
    preempt = Scheduler._preempt

    def preempt_and_keep(self: Scheduler, sequence: Sequence) -> None:
        length = sequence.cache.length
        preempt(self, sequence)
        sequence.cache.length = max(0, min(length, len(sequence.tokens) - 1))

    patch.setattr(Scheduler, "_preempt", preempt_and_keep)


# The ancestor table.


def _alter_rows(patch: Patch, alter: Callable[[int, int, tuple[int, ...]], tuple[int, int, tuple[int, ...]]]) -> None:
    """Change (depth, keys in line, tail) of every drafted row that names its ancestors."""
    tree_nodes, pattern = inputs.tree_nodes, inputs._pattern

    def altered(parents: tuple[int, ...], num_before: int) -> list[TreeNode]:
        return [TreeNode(*alter(*node)) if node.tail else node for node in tree_nodes(parents, num_before)]

    patch.setattr(inputs, "tree_nodes", altered)
    patch.setattr(inputs, "_pattern", pattern.__wrapped__)  # what was remembered is of trees that were not altered


def sees_its_sibling(patch: Patch) -> None:
    """A node off the line reads the key of the node that lies in line at its place as well."""
    _alter_rows(patch, lambda depth, in_line, tail: (depth, in_line + 1, tail))


def sees_its_sibling_instead_of_its_parent(patch: Patch) -> None:
    _alter_rows(patch, lambda depth, in_line, tail: (depth, in_line + len(tail), ()))


def drops_the_tails(patch: Patch) -> None:
    _alter_rows(patch, lambda depth, in_line, tail: (depth, in_line, ()))


def drops_its_parent(patch: Patch) -> None:
    _alter_rows(patch, lambda depth, in_line, tail: (depth, in_line, tail[-1:]))


def turns_the_tails_around(patch: Patch) -> None:
    """The same keys in another order: the same sum on paper, other bits."""
    _alter_rows(patch, lambda depth, in_line, tail: (depth, in_line, tail[::-1]))


def moves_tree_nodes_by_one(patch: Patch) -> None:
    """A node off the line stands one position too far."""
    _alter_rows(patch, lambda depth, in_line, tail: (depth + 1, in_line, tail))


def rounds_by_the_number_of_rows(patch: Patch) -> None:
    """A linear layer whose last bits depend on how many rows it is given."""
    call = Linear.__call__

    def call_unevenly(self: Linear, x: Floats) -> Floats:
        y = call(self, x)
        return y * np.float32(1 + 2e-7 * (x.shape[0] > 6))

    patch.setattr(Linear, "__call__", call_unevenly)


# Stop conditions and penalties.


def checks_for_a_stop_once_per_step(patch: Patch) -> None:
    """All words of a walk are said before anybody looks for a stop."""

    def verify(self: Engine, share: Any, proposal: Any, answer: Any) -> Verdict:
        verdict = Verdict(proposal.bought)
        if not share.reaches_end:
            return verdict
        for word in verify_module.walk(proposal.bought, lambda row: share.sequence.draw(answer, row)):
            verdict.words.append(word)
            goes_on = share.sequence.append(word.token)
        verdict.cut = not goes_on
        return verdict

    patch.setattr(Engine, "_verify", verify)


def counts_drafted_tokens_for_penalties(patch: Patch) -> None:
    verify = Engine._verify

    def verify_after_counting(self: Engine, share: Any, proposal: Any, answer: Any) -> Verdict:
        for token in proposal.bought.tokens:
            share.sequence._sampler.append(token)
        return verify(self, share, proposal, answer)

    patch.setattr(Engine, "_verify", verify_after_counting)


def counts_for_penalties_once_per_step(patch: Patch) -> None:
    """Words of one walk do not see each other: the penalties hear of them when the step is over."""
    verify, append = Engine._verify, Sampler.append
    heard: list[tuple[Sampler, int]] = []

    def verify_then_count(self: Engine, share: Any, proposal: Any, answer: Any) -> Verdict:
        verdict = verify(self, share, proposal, answer)
        for sampler, token in heard:
            append(sampler, token)
        heard.clear()
        return verdict

    patch.setattr(Sampler, "append", lambda self, token: heard.append((self, token)))
    patch.setattr(Engine, "_verify", verify_then_count)


def masks_once_per_step(patch: Patch) -> None:
    """All words of a walk are drawn under the mask of its first."""
    verify, allowed = Engine._verify, GrammarState.allowed
    masks: dict[int, Any] = {}

    def verify_afresh(self: Engine, share: Any, proposal: Any, answer: Any) -> Verdict:
        masks.clear()
        return verify(self, share, proposal, answer)

    patch.setattr(GrammarState, "allowed", lambda self: masks.setdefault(id(self), allowed(self)))
    patch.setattr(Engine, "_verify", verify_afresh)


# The prefix cache.


def adopts_what_must_be_scored(patch: Patch) -> None:
    """A prompt whose log probabilities are wanted begins behind what is cached."""
    patch.setattr(Sequence, "scores_prompt", property(lambda self: False))


def shares_prefixes_between_tenants(patch: Patch) -> None:
    root = PrefixCache.root
    patch.setattr(PrefixCache, "root", lambda self, tenant: root(self, ""))


def caches_uncommitted_tokens(patch: Patch) -> None:
    """A block is entered as soon as it is full of known and drafted tokens, accepted or not."""
    commit = engine_module.commit

    def commit_drafted(runner: Any, landed: Any) -> None:
        for share, verdict in landed:
            cache = share.sequence.cache
            text = [*share.sequence.tokens[: cache.length + share.num_known], *verdict.draft.tokens]
            place = cache._num_cached_blocks
            page = tuple(text[place * checks.PAGE : (place + 1) * checks.PAGE])
            if cache._prefix is not None and len(page) == checks.PAGE:
                cache._prefix.insert(cache._node, page, cache.blocks[place])
        commit(runner, landed)

    patch.setattr(engine_module, "commit", commit_drafted)


def adopts_the_whole_prompt(patch: Patch) -> None:
    """A prompt that is cached as a whole leaves nothing to compute, and so no logits."""
    find = PrefixCache.find
    patch.setattr(PrefixCache, "find", lambda self, tenant, tokens, limit: find(self, tenant, tokens, limit + 1))


# The ledgers, which promise that speculation never costs more than a small share.


def doubles_the_allowance(patch: Patch) -> None:
    patch.setattr(ledger_module, "ALLOWED", 2 * ledger_module.ALLOWED)


def halves_the_debt(patch: Patch) -> None:
    add = WindowLedger.add
    patch.setattr(
        WindowLedger,
        "add",
        lambda self, **numbers: add(self, **{**numbers, "debt_s": numbers["debt_s"] / 2}),
    )


def keeps_its_credit_for_ever(patch: Patch) -> None:
    add = WindowLedger.add

    def add_and_keep(self: WindowLedger, **seconds: float) -> None:
        credit_s = min(0.0, self.debt_s + seconds["debt_s"])
        add(self, **seconds)
        if not self.plain_s:  # a new window
            self.debt_s = credit_s

    patch.setattr(WindowLedger, "add", add_and_keep)


def gives_every_try_a_cycle(patch: Patch) -> None:
    """Not only the first try of a window needs no allowance."""
    permits = WindowLedger.permits

    def permits_anew(self: WindowLedger, excess_s: float) -> bool:
        self.is_tried = False
        return permits(self, excess_s) or self.debt_s < 2 * self.allowance_s

    patch.setattr(WindowLedger, "permits", permits_anew)


def drafts_what_was_refused(patch: Patch) -> None:
    patch.setattr(Controller, "refused", lambda self, rows, base, load, drafting_s: set())


def asks_while_too_much_is_owed(patch: Patch) -> None:
    patch.setattr(WindowLedger, "is_over", property(lambda self: False))


def leaves_out_what_asking_took(patch: Patch) -> None:
    settle = Controller.settle
    patch.setattr(
        Controller, "settle", lambda self, texts, **numbers: settle(self, texts, **{**numbers, "drafting_s": {}})
    )


LEDGER_MUTANTS: tuple[Mutant, ...] = (
    doubles_the_allowance,
    halves_the_debt,
    keeps_its_credit_for_ever,
    gives_every_try_a_cycle,
    drafts_what_was_refused,
    asks_while_too_much_is_owed,
    leaves_out_what_asking_took,
)

MUTANTS: tuple[Mutant, ...] = (
    accepts_any_child,
    emits_the_drafts_token,
    emits_no_bonus_after_a_rejection,
    keys_noise_by_the_row,
    keys_noise_by_the_step,
    keys_noise_without_the_position,
    keys_noise_without_the_choice,
    keys_noise_without_the_seed,
    commits_a_rejected_row,
    copies_no_accepted_rows,
    copies_accepted_rows_backwards,
    forgets_to_give_a_block_back,
    keeps_the_length_of_the_preempted,
    sees_its_sibling,
    sees_its_sibling_instead_of_its_parent,
    drops_the_tails,
    drops_its_parent,
    turns_the_tails_around,
    moves_tree_nodes_by_one,
    rounds_by_the_number_of_rows,
    checks_for_a_stop_once_per_step,
    counts_drafted_tokens_for_penalties,
    counts_for_penalties_once_per_step,
    masks_once_per_step,
    adopts_what_must_be_scored,
    shares_prefixes_between_tenants,
    caches_uncommitted_tokens,
    adopts_the_whole_prompt,
)


@pytest.fixture(scope="module")
def target() -> Target:
    """Loaded before anything is broken."""
    return tiny_target("llama")


def first_failure(target: Target) -> Exception | None:
    """Run the checks until one fails."""
    for check in CHECKS:
        try:
            check(target)
        except Exception as error:  # a mutant may make the engine raise anything
            return error
    return None


def test_without_a_mutant_every_check_passes(target: Target) -> None:
    failure = first_failure(target)
    assert failure is None, str(failure)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Mutant, target: Target, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert first_failure(target) is not None, f"nothing noticed that the engine {mutant.__name__.replace('_', ' ')}"


def broken_promise() -> Exception | None:
    """Play long paths and some worlds until the ledgers' bound is broken."""
    try:
        path_that_turns()
        for seed in range(6):
            long_path(seed)
        for seed in range(12):
            audit = Audit()
            for step in Run(random_world(seed, num_cycles=500)).steps():
                audit.add(step)
            assert audit.least_room > -1e-6
    except AssertionError as error:
        return error
    return None


def test_without_a_mutant_the_promise_holds() -> None:
    assert broken_promise() is None


@pytest.mark.parametrize("mutant", LEDGER_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_of_the_ledgers_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert broken_promise() is not None, f"nothing noticed that the ledger {mutant.__name__.replace('_', ' ')}"
