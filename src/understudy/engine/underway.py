"""A pass that was begun: what was asked of it, and what must be known when it lands."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from understudy.control.cost import CostModel, Load
from understudy.control.following import Following
from understudy.core.events import Cycle
from understudy.engine.proposal import DraftingTime, Proposal
from understudy.engine.scheduler import Share
from understudy.engine.sequence import Sequence
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Answer, Flight, Runner
from understudy.sampling.verify import Verdict


@dataclass(slots=True)
class Underway:
    """One pass of the target, from its beginning until what it said was told."""

    shares: list[Share]
    proposals: list[Proposal]
    works: list[Work]
    starts: list[int]
    """Where each text's rows begin: its cache may have moved on when the pass lands."""
    flight: Flight
    reason: str
    """Why so much was drafted."""
    load: Load
    plain: Load
    """The same pass without what was drafted; the very same if nothing was."""
    started_s: float
    drafting: DraftingTime
    launched_s: float
    """When its rows were handed to the device."""
    num_firsts: int
    """What `Runner.num_firsts` was when it began."""
    is_counted_on: bool = False
    """The next pass began before the words of this one were seen; its rows are part of their texts already."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted: then each text that speaks says one word."""
        return self.load is self.plain

    @property
    def is_idle(self) -> bool:
        """Whether all its texts have ended while it was on its way: there is nobody to tell of it."""
        return all(share.sequence.finish_reason is not None for share in self.shares)

    def count_on_words(self, first_place: int) -> None:
        """Take the rows into their texts, and let each know where its next word will be."""
        self.is_counted_on = True
        place = first_place
        for share, count in zip(self.shares, self.flight.counts, strict=True):
            sequence = share.sequence
            place += count
            if sequence.finish_reason is None:
                sequence.cache.commit(share.num_known, sequence.tokens)
                sequence.unseen = place - 1 if share.reaches_end else None

    def tell_following(self, following: Following, verdicts: Items[Verdict], cost: CostModel) -> None:
        """Let it be learned by how much words that are said sooner bring prompts forward."""
        prompts_s, num_words, has_ended = 0.0, 0, False
        for verdict in verdicts:
            num_words += len(verdict.words)
            has_ended = has_ended or verdict.cut
        if self.plain.rows > len(self.shares):
            words = Load.of([(1, share.sequence.cache.length) for share in self.shares if share.num_known == 1])
            prompts_s = cost.step_s(self.plain) - (cost.step_s(words) if words.rows else 0.0)
        following.observe(prompts_s=prompts_s, num_words=num_words, has_ended=has_ended)

    def write_down(self, verdicts: Items[Verdict], cost: CostModel, word_s: float) -> list[Sequence]:
        """Write the step into the ledgers of those who spoke in it, and return them.

        `word_s` is what a word that one of them gained makes the others wait.
        """
        plain_s = cost.step_s(self.plain)
        pass_s = plain_s if self.is_plain else cost.drafted_s(self.load, plain_s)
        step_s = pass_s + self.drafting.spent_s
        spoke = [(share, verdict) for share, verdict in zip(self.shares, verdicts, strict=True) if verdict.words]
        num_more = sum(len(verdict.words) - 1 for _, verdict in spoke)
        for share, verdict in spoke:
            # while the words that others gained are drawn, and for the prompts that these bring forward; not its own
            others_s = word_s * (num_more - (len(verdict.words) - 1))
            share.sequence.ledger.add(plain_step_s=plain_s, step_s=step_s + others_s, num_words=len(verdict.words))
        return [share.sequence for share, _ in spoke]

    def cycle(
        self, verdicts: Items[Verdict], following: Underway | None, forward_s: float, landed_s: float, sample_s: float
    ) -> Cycle:
        """What is told of it; `following` began meanwhile, and `sample_s` is all that was done since it landed."""
        if following is not None and following.started_s > landed_s:
            sample_s -= following.launched_s - following.started_s  # the next cycle tells of it
        num_draft_rows = num_scout_rows = num_accepted = 0
        if not self.is_plain:
            num_draft_rows = sum([len(verdict.draft) for verdict in verdicts])
            num_scout_rows = sum([len(proposal.scouts) for proposal in self.proposals])
            num_accepted = sum([verdict.num_accepted for verdict in verdicts])
        nums_said = [len(verdict.words) for verdict in verdicts]
        num_sampled = len(nums_said) - nums_said.count(0)
        draft_s = max(self.launched_s, min(self.drafting.ready_s, landed_s)) - self.started_s
        return Cycle(
            num_sequences=len(verdicts),
            num_prompt_rows=self.load.rows - num_draft_rows - num_scout_rows - num_sampled,
            num_draft_rows=num_draft_rows,
            num_scout_rows=num_scout_rows,
            num_emitted=sum(nums_said),
            num_accepted=num_accepted,
            context=self.load.keys,
            draft_s=draft_s,
            forward_s=forward_s,
            sample_s=sample_s,
            total_s=draft_s + forward_s + sample_s,
            reason=self.reason,
            num_rows=self.load.rows,
        )


def work_of(share: Share, proposal: Proposal, is_shown: bool) -> Work:
    """What one sequence computes."""
    sequence, num_known, reaches_end = share
    return Work(
        sequence.cache,
        sequence.pending(num_known),
        proposal.bought,
        reaches_end,
        proposal.scouts,
        sequence.rows_to_score(num_known),
        sequence.dice,
        is_shown,
    )


def plain_load(shares: Items[Share]) -> Load:
    """The size of a pass in which nothing is drafted."""
    return Load.of([(share.num_known, share.sequence.cache.length) for share in shares])


def load_of(shares: Items[Share], proposals: Items[Proposal], plain: Load) -> Load:
    """The size of a pass; `plain` itself, which it would be with nothing drafted, if nothing is."""
    if not any(map(Proposal.has_rows, proposals)):
        return plain
    rows = [share.num_known + p.num_rows for share, p in zip(shares, proposals, strict=True)]
    return Load.of(zip(rows, [share.sequence.cache.length for share in shares], strict=True))


def score(share: Share, work: Work, answer: Answer) -> Answer:
    """Let the scored rows tell the log probabilities of the prompt; return the rows that words are drawn from."""
    sequence = share.sequence
    if answer.logits is None or not work.scored or sequence.finish_reason is not None:
        return answer
    try:
        sequence.score(answer.logits[: len(work.scored)])
    except FloatingPointError as error:
        sequence.end("error", str(error))
    return answer._replace(logits=answer.logits[len(work.scored) :])


def commit(runner: Runner, landed: Items[tuple[Share, Verdict]]) -> None:
    """Move caches forward over the accepted rows. The last word has no row yet: it leads the next step."""
    sources: list[int] = []
    targets: list[int] = []
    for share, verdict in landed:
        moved = share.sequence.cache.keep(share.num_known, verdict.path)
        sources += moved[0]
        targets += moved[1]
    runner.move(sources, targets)
    for share, verdict in landed:
        share.sequence.cache.commit(share.num_known + verdict.num_accepted, share.sequence.tokens)
