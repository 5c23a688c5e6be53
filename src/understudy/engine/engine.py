"""The engine: continuous batching around one step that you can recite.

begin   choose      who computes which known rows                    scheduler.plan
        draft       what is proposed ahead, and what of it pays      drafting.propose
        launch      one pass of the target over all those rows       runner.launch
land    verify      the target's own words along each draft          sampling.verify.walk
        commit      lengths move forward; accepted rows fall in line  cache.keep, cache.commit
tell    observe     what it cost and how good the guesses were       cost.observe, drafting.observe

Words go out before a pass is told of: on the CPU, where nobody computes meanwhile, that is what the next step begins
with. A device that draws words by itself is given its next pass before the last one is told of, and, where nobody must
look at the words first, before it has landed.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

from understudy.config import EngineConfig
from understudy.control.cost import CostModel, Load
from understudy.control.following import Following
from understudy.core.control import ControlView, Learned
from understudy.core.draft import EMPTY
from understudy.core.events import EventSink, Preempted, ignore
from understudy.core.request import Output, Request
from understudy.core.switches import Switches
from understudy.drafters.base import Drafter
from understudy.engine.disturbance import Disturbance
from understudy.engine.drafting import Drafting
from understudy.engine.preparing import Preparing
from understudy.engine.proposal import Proposal
from understudy.engine.refusal import check_request
from understudy.engine.scheduler import Scheduler, Share
from understudy.engine.sequence import Sequence
from understudy.engine.showing import without_blind
from understudy.engine.underway import Underway, commit, load_of, plain_load, score, work_of
from understudy.errors import InvalidRequest
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import PrefixCache
from understudy.kv.sequence import SequenceCache
from understudy.runtime.runner import Answer, Runner
from understudy.sampling.grammar import GrammarCompiler, GrammarError, GrammarState, grammar_compiler
from understudy.sampling.verify import Verdict, words_along
from understudy.text.detokenize import Detokenizer
from understudy.text.tokenizer import Tokenizer

_WORD_WEIGHT = 0.05


class _Untold(NamedTuple):
    """A pass that has landed, and what is yet to be told of it."""

    underway: Underway
    verdicts: list[Verdict]
    following: Underway | None
    is_disturbed: bool
    sample_s: float
    """What it took to draw its words and hand them out."""


class Engine:
    """Serves many requests at once; every answer is what it would have been alone."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        cost: CostModel,
        drafters: Items[Drafter] = (),
        config: EngineConfig | None = None,
        emit: EventSink = ignore,
        clock: Callable[[], float] = time.perf_counter,
        running: Callable[[], float] | None = None,
    ) -> None:
        """`running`: for how long the thread that steps has run, where it is what computes (disturbance.py)."""
        self.config = config or EngineConfig()
        model = runner.decoder.config
        self.max_context = min(self.config.max_context or model.max_positions, model.max_positions)
        self.cost = cost
        self._runner = runner
        self._tokenizer = tokenizer
        self._emit = emit
        self._clock = clock
        self._max_rows = self.config.max_rows_per_step or runner.decoder.kernels.rows_per_step
        self._pool = BlockPool(runner.num_blocks)
        self._prefix = PrefixCache(self._pool, runner.page_tokens) if self.config.prefix_cache else None
        able = without_blind(drafters, runner, emit)
        self._drafting = Drafting(
            able,
            cost=cost,
            vocab_size=model.vocab_size,
            emit=emit,
            policy=self.config.policy,
            control_share=self.config.control_share,
            clock=clock,
        )
        runner.feature_layers = self._drafting.showing.layers
        self.prepare = Preparing(runner, able, emit).one_more
        """For whoever has no work for it: makes a pass ready that would else take longer; False if there is none."""
        self._scheduler = Scheduler(
            self._pool,
            page_tokens=runner.page_tokens,
            max_rows=self._max_rows,
            max_sequences=self.config.max_sequences,
            on_preempt=lambda sequence: emit(Preempted(sequence.request.request_id, sequence.choice)),
        )
        self._underway: Underway | None = None
        self._untold: _Untold | None = None
        self._num_firsts = runner.num_firsts
        self._disturbance = Disturbance(running)
        self._following = Following()
        self._has_to_ask = False  # it was found already that drafters are asked in the next step
        self._forward_s = 0.0  # what the last pass took
        self._landed_s = 0.0  # when it was there
        self._word_s = 0.0
        self._ids = itertools.count()
        self._live: dict[str, list[Sequence]] = {}
        self._aborted: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._aborted)

    def submit(self, request: Request) -> list[Sequence]:
        """Queue a request, one sequence per choice. What cannot be served is refused here, with a reason."""
        if request.request_id in self._live:
            raise InvalidRequest(f"Request {request.request_id!r} is running already.", "Give each its own id.")
        check_request(
            request,
            vocab_size=self._runner.decoder.config.vocab_size,
            max_context=self.max_context,
            cache_tokens=self._runner.num_blocks * self._runner.page_tokens,
            drafters=self._drafting.names,
        )
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        states: Items[GrammarState | None] = [None] * sampling.n
        if sampling.grammar is not None:
            states = self.grammars.compile(sampling.grammar, sampling.n)
        sequences = [self._new_sequence(request, seed, *numbered) for numbered in enumerate(states)]
        self._live[request.request_id] = sequences
        for sequence in sequences:
            self._drafting.start(sequence)
            self._scheduler.waiting.append(sequence)
        return sequences

    @property
    def grammars(self) -> GrammarCompiler:
        """Made when it is first asked for, in a tenth of a second or more; a server asks before it serves."""
        model = self._runner.decoder.config
        return grammar_compiler(self._tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_ids)

    def switch(self, switches: Switches) -> None:
        """Switch speculation, or parts of it, off or on; running requests obey from the next step on."""
        self._drafting.switches = switches

    def explain(self) -> ControlView:
        """How things stand in the control plane, and what it has learned, the last step included."""
        self._tell()
        return self._drafting.explain()

    def recall(self, learned: Learned) -> None:
        """Begin with what an earlier engine has learned."""
        self._drafting.recall(learned)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free at the next step."""
        self._aborted.extend(self._live.get(request_id, ()))

    def step(self) -> list[Output]:
        """Land one pass and return what each sequence said in it; a device computes the next one meanwhile."""
        outputs = self.end_aborted()
        underway = self._underway or self._begin()
        if underway is None:
            return outputs
        following = self._begin_ahead(underway)
        verdicts = self._land(underway)
        if following is None or following.is_idle:  # one that nobody waits for would seem to last until somebody asks
            following = self._begin(idle_since_s=self._landed_s) if self._runner.draws else None
        self._underway = following
        is_disturbed = self._disturbance.leaves_out(self._landed_s, self.cost.step_s(underway.load))
        for share, proposal, verdict in zip(underway.shares, underway.proposals, verdicts, strict=True):
            verdict.count(share.sequence.counts, proposal.drafts)
            if verdict.words or verdict.cut:
                outputs.append(share.sequence.take_output())
        self._untold = _Untold(underway, verdicts, following, is_disturbed, self._clock() - self._landed_s)
        if self._runner.draws or not self.has_work:
            self._tell()
        return outputs

    def _tell(self) -> None:
        """Tell of the last pass, if that was not done: what it cost, and how good the guesses were."""
        if self._untold is None:
            return
        (underway, verdicts, following, is_disturbed, sample_s), self._untold = self._untold, None
        started = self._clock()
        self._observe(underway, verdicts, is_disturbed)
        sample_s += self._clock() - started
        self._emit(underway.cycle(verdicts, following, self._forward_s, self._landed_s, sample_s))

    def _begin(self, idle_since_s: float | None = None) -> Underway | None:
        """Choose, draft and launch a pass, if there is anything to compute.

        `idle_since_s`: the device has waited since then for words to be looked at, which plainly it need not.
        """
        started = self._clock()
        self._disturbance.begin(started)
        shares = self._scheduler.plan()
        if not shares:
            return None
        plain = plain_load(shares)
        underway = self._launch(shares, *self._draft(shares, plain, idle_since_s), plain=plain, started_s=started)
        if idle_since_s is not None and underway.is_plain:
            self._drafting.waited(self._clock() - underway.launched_s, plain)
        return underway

    def _begin_ahead(self, underway: Underway) -> Underway | None:
        """Begin the next pass before the words of this one are seen, where nobody must look at them first."""
        speaking = [share.sequence for share in underway.shares if share.reaches_end]
        if not self._runner.draws or not underway.is_plain or any(sequence.dice is None for sequence in speaking):
            return None
        if any([work.scored for work in underway.works]):  # noqa: C419 - their logits are gone when the next one begins
            return None
        is_beside = self._scheduler.has_joiner or len(speaking) < len(underway.shares)
        going_on = [sequence for sequence in speaking if sequence.finish_reason is None]
        reason = self._drafting.reason_to_rest(going_on, is_beside_prompt=is_beside)
        if not reason:
            self._has_to_ask = True
            return None
        started = self._clock()
        underway.count_on_words(self._runner.first_place)
        shares = self._scheduler.plan()
        if not shares:
            return None
        return self._launch(shares, [Proposal()] * len(shares), reason, plain=plain_load(shares), started_s=started)

    def _launch(
        self, shares: list[Share], proposals: list[Proposal], reason: str, *, plain: Load, started_s: float
    ) -> Underway:
        launched = self._clock()
        is_shown = self._drafting.showing.wants(shares, self._drafting.switches)
        works = [work_of(*item) for item in zip(shares, proposals, is_shown, strict=True)]
        load = load_of(shares, proposals, plain)
        flight = self._runner.launch(works)
        drafting = self._drafting.take_time()
        num_firsts, self._num_firsts = self._num_firsts, self._runner.num_firsts
        starts = [share.sequence.cache.length for share in shares]
        return Underway(
            shares, proposals, works, starts, flight, reason, load, plain, started_s, drafting, launched, num_firsts
        )

    def _land(self, underway: Underway) -> list[Verdict]:
        """Wait for a pass; verify and commit."""
        shares, proposals = underway.shares, self._drafting.seen(underway.proposals)  # the last guesses came before it
        underway.proposals = proposals
        answers = underway.flight.land()
        landed = self._clock()
        self._forward_s = landed - max(underway.launched_s, self._landed_s, min(underway.drafting.ready_s, landed))
        self._landed_s = landed
        # the others have ended while this pass was on its way
        alive = [index for index, share in enumerate(shares) if share.sequence.finish_reason is None]
        if any([work.scored for work in underway.works]):  # noqa: C419 - of hundreds, it is faster
            answers = [score(*item) for item in zip(shares, underway.works, answers, strict=True)]
        verdicts = [self._verify(*item) for item in zip(shares, proposals, answers, strict=True)]
        self._time_words(sum([len(verdict.words) for verdict in verdicts]), self._clock() - landed)
        if not underway.is_counted_on and not self._scheduler.waiting:  # else the next pass drafts nothing
            self._drafting.early.begin([share.sequence for share in shares], self._drafting.switches)
        for index in [i for i in alive if proposals[i].scouts.tokens]:
            self._drafting.learn(shares[index], proposals[index], answers[index])
        self._drafting.showing.keep(underway, verdicts, self._drafting.switches)
        if not underway.is_counted_on:
            commit(self._runner, [(shares[index], verdicts[index]) for index in alive])
        for share in shares:
            share.sequence.unseen = None
        for index in alive:
            if shares[index].sequence.finish_reason is not None:
                verdicts[index].cut = True
                self._remove(shares[index].sequence)
        return verdicts

    def check(self) -> None:
        """Compare the blocks' reference counts with those who hold them. For tests, and when idle."""
        owners = [sequence.cache.blocks for sequence in self._scheduler.running]
        self._pool.check([*owners, self._prefix.blocks()] if self._prefix else owners)

    @property
    def drafter_names(self) -> list[str]:
        """The drafters that it was built with."""
        return self._drafting.names

    @property
    def num_live_requests(self) -> int:
        """Requests of which some choice has not ended."""
        return len(self._live)

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self._pool.num_blocks

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Those that hold blocks, and those that hold none yet or had to give theirs back."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self._pool.num_available

    def _draft(self, shares: Items[Share], base: Load, idle_since_s: float | None) -> tuple[list[Proposal], str]:
        """Ask for drafts where the next word can be drawn and one was drawn before, and make room; also tells why.

        Beside a prompt nothing is drafted: a first word takes as long as it takes plainly.
        """
        ready = [i for i, share in enumerate(shares) if share.reaches_end and share.sequence.num_generated]
        if any(not share.sequence.num_generated for share in shares):  # its reader waits: nobody makes this step longer
            ready = [i for i in ready if shares[i].sequence.request.speculation.forced]
        found, reason = self._drafting.propose(
            [shares[i].sequence for i in ready],
            base,
            max_rows=self._max_rows - base.rows,
            num_emitting=sum(share.reaches_end for share in shares),
            has_to_ask=self._has_to_ask,
            idle_since_s=idle_since_s,
        )
        self._has_to_ask = False
        proposals = [Proposal()] * len(shares)
        for index, proposal in zip(ready, found, strict=True):
            share = shares[index]
            cache, num_rows = share.sequence.cache, share.num_known + len(proposal.bought)
            if cache.reserve(num_rows + len(proposal.scouts)):
                proposals[index] = proposal
            else:  # the rows that only teach go first
                proposals[index] = Proposal(proposal.drafts, proposal.bought if cache.reserve(num_rows) else EMPTY)
        return proposals, reason

    def _verify(self, share: Share, proposal: Proposal, answer: Answer) -> Verdict:
        """Let the target speak along the draft until it leaves it or a stop condition holds."""
        sequence = share.sequence
        verdict = Verdict(proposal.bought)
        if not share.reaches_end or sequence.finish_reason is not None:
            return verdict
        try:
            for word in words_along(proposal.bought, partial(sequence.draw, answer)):
                verdict.words.append(word)
                if not sequence.append(word.token, "" if word.node is None else verdict.draft.sources[word.node]):
                    verdict.cut = True
                    break
        except (FloatingPointError, GrammarError) as error:
            verdict.cut = True
            sequence.end("error", str(error))
        return verdict

    def _observe(self, underway: Underway, verdicts: Items[Verdict], is_disturbed: bool) -> None:
        """Learn how good the guesses were and what they cost, unless that was no usual step."""
        if is_disturbed:
            self._drafting.forget_asking()
        if self._drafting.names:
            underway.tell_following(self._following, verdicts, self.cost)
        is_learned_from = bool(self._drafting.names) and not self._drafting.is_asleep
        for share, proposal, verdict in zip(underway.shares, underway.proposals, verdicts, strict=True):
            if verdict.words and is_learned_from:
                words = [word.token for word in verdict.words]
                self._drafting.observe(share.sequence, proposal, words, verdict.path)
        if not is_learned_from:
            self._drafting.sleep_through(underway.plain, self._forward_s)
        elif is_disturbed or self._runner.num_firsts != underway.num_firsts:
            self._drafting.forget_step()
        else:
            self._drafting.showing.count(underway.shares, underway.works, underway.proposals)
            self._settle(underway, verdicts)

    def _settle(self, underway: Underway, verdicts: Items[Verdict]) -> None:
        """Write into the ledgers what the words took, and what they would have taken plainly."""
        self._drafting.settle(
            underway.write_down(verdicts, self.cost, self._word_s + self._following.word_s),
            base=underway.plain,
            load=underway.load,
            forward_s=self._forward_s,
            drafting=underway.drafting,
        )
        self.cost.observe(underway.load, self._forward_s, underway.plain)

    def _time_words(self, num_words: int, seconds: float) -> None:
        """Learn how long it takes to draw a word."""
        if num_words:
            self._word_s += _WORD_WEIGHT * (seconds / num_words - self._word_s)

    def end_aborted(self) -> list[Output]:
        """End what was aborted, and give its blocks back; whatever landed before is told of first."""
        self._tell()
        outputs = []
        for sequence in self._aborted:
            if sequence.finish_reason is None:
                sequence.end("abort")
                outputs.append(sequence.take_output())
                self._remove(sequence)
        self._aborted.clear()
        return outputs

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._drafting.stop(sequence)
        request_id = sequence.request.request_id
        if all(other.finish_reason is not None for other in self._live.get(request_id, ())):
            self._live.pop(request_id, None)

    def _new_sequence(self, request: Request, seed: int, choice: int, grammar: GrammarState | None) -> Sequence:
        model = self._runner.decoder.config
        return Sequence(
            next(self._ids),
            request,
            seed=seed,
            choice=choice,
            cache=SequenceCache(self._pool, self._runner.page_tokens, self._prefix, request.tenant),
            detokenizer=Detokenizer(self._tokenizer, request.sampling.stop),
            eos_ids=model.eos_ids,
            max_context=self.max_context,
            vocab_size=model.vocab_size,
            grammar=grammar,
        )
