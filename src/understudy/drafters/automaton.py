"""A suffix automaton that grows token by token: what was said before, and how often each token came next.

A state stands for all strings that end at the same places of the text, so one state per place where the past
forks is enough to know every substring: at most 2 states and 3 edges per token. Walking it from the root reads
any substring; falling back along the links forgets its oldest tokens first. Several texts may be learned one after
the other, each beginning at the root, so that no substring runs from one text into the next.

    states [capacity, 5] int32   LENGTH     tokens of the longest string of the state
                                 LINK       the state of its longest suffix that also ends elsewhere; NONE for the root
                                 FIRST_EDGE head of the list of edges that leave it, or NONE
                                 COUNT      places where its strings end
                                 LAST_END   the latest of these places
    edges  [capacity, 4] int32   OWNER, TOKEN, TARGET, NEXT_EDGE (of the same owner, or NONE)
    table  [power of 2]  int32   open addressing from (owner, token) to an edge, at most half full
    header [6]           int64   NUM_STATES, NUM_EDGES, NUM_TOKENS, LAST (state of the whole text), and the match:
                                 MATCH_STATE, MATCH_LENGTH (see `read`)

Counts are kept up online: an extension adds one along the links from the new state, the state of the whole text,
towards the root. Text such as one token 8000 times has links 8000 deep, so this stops after `MAX_HOPS` states: a
string whose occurrence lies more than that many links above the whole text misses that occurrence. Counts are
exact for text that does not repeat itself at more than `MAX_HOPS` lengths at once, and too low, never too high,
for the short strings of text that does.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit
from understudy.sampling.noise import Purpose, uniform

Ints = NDArray[np.int32]
Header = NDArray[np.int64]
Tree = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]

ROOT = 0
NONE = -1
LENGTH, LINK, FIRST_EDGE, COUNT, LAST_END = 0, 1, 2, 3, 4
OWNER, TOKEN, TARGET, NEXT_EDGE = 0, 1, 2, 3
NUM_STATES, NUM_EDGES, NUM_TOKENS, LAST, MATCH_STATE, MATCH_LENGTH = 0, 1, 2, 3, 4, 5

MAX_HOPS = 64
"""States whose counts one new token may raise."""

MAX_EDGES = 128
"""Edges looked at when a node gets its children; a state that more tokens followed predicts little anyway."""

DOUBT = 3.0
"""Weight of the continuation that was never seen, for a match of one token; it falls with the match's length.

With 3 the confidence of a first token is its hit rate on Python source and on prose in English, within 0.1.
"""

TAKEN = -1.0
"""In place of its survival: an open node that is a row of the tree now."""

_SAMPLE = int(Purpose.SAMPLE)


@jit
def _slot(edges: Ints, table: Ints, owner: int, token: int) -> int:
    """Return the slot of the edge (owner, token), or the free one where it belongs."""
    key = (np.uint64(owner) << np.uint64(32)) | np.uint64(token)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64: no text makes it cluster
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mask = len(table) - 1
    slot = int(key >> np.uint64(32)) & mask
    while table[slot] != NONE:
        edge = table[slot]
        if edges[edge, OWNER] == owner and edges[edge, TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return slot


@jit
def _add_edge(header: Header, states: Ints, edges: Ints, table: Ints, owner: int, token: int, target: int) -> None:
    edge = header[NUM_EDGES]
    header[NUM_EDGES] += 1
    table[_slot(edges, table, owner, token)] = edge
    edges[edge, OWNER] = owner
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT_EDGE] = states[owner, FIRST_EDGE]
    states[owner, FIRST_EDGE] = edge


@jit
def _add_state(header: Header, states: Ints, length: int) -> int:
    state = int(header[NUM_STATES])
    header[NUM_STATES] += 1
    states[state, LENGTH] = length
    states[state, LINK] = ROOT
    states[state, FIRST_EDGE] = NONE
    states[state, COUNT] = 0
    states[state, LAST_END] = NONE
    return state


@jit
def _split(header: Header, states: Ints, edges: Ints, table: Ints, parent: int, token: int, old: int) -> int:
    """Give the strings of `old` that `parent` + token reaches, its short ones, a state of their own.

    They are about to end at a place where the long ones do not.
    """
    short = _add_state(header, states, states[parent, LENGTH] + 1)
    states[short, LINK] = states[old, LINK]
    states[short, COUNT] = states[old, COUNT]
    states[short, LAST_END] = states[old, LAST_END]
    states[old, LINK] = short
    edge = states[old, FIRST_EDGE]
    while edge != NONE:
        _add_edge(header, states, edges, table, short, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT_EDGE]
    while parent != NONE:
        edge = table[_slot(edges, table, parent, token)]
        if edge == NONE or edges[edge, TARGET] != old:
            break
        edges[edge, TARGET] = short
        parent = states[parent, LINK]
    return short


@jit
def _target(header: Header, states: Ints, edges: Ints, table: Ints, parent: int, token: int, edge: int) -> int:
    """Return the state of exactly longest(parent) + token, which `edge` leads to, splitting it off if need be."""
    target = edges[edge, TARGET]
    if states[target, LENGTH] == states[parent, LENGTH] + 1:
        return int(target)
    return _split(header, states, edges, table, parent, token, target)


@jit
def _extend(header: Header, states: Ints, edges: Ints, table: Ints, token: int) -> None:
    """Append one token to the text; the arrays have room (`Automaton.reserve`)."""
    last = header[LAST]
    edge = table[_slot(edges, table, last, token)]
    if edge != NONE:  # only when a second text begins like an earlier one
        whole = _target(header, states, edges, table, last, token, edge)
    else:
        whole = _add_state(header, states, states[last, LENGTH] + 1)
        parent = last
        while parent != NONE:
            edge = table[_slot(edges, table, parent, token)]
            if edge != NONE:
                break
            _add_edge(header, states, edges, table, parent, token, whole)
            parent = states[parent, LINK]
        if parent != NONE:
            states[whole, LINK] = _target(header, states, edges, table, parent, token, edge)
    header[LAST] = whole
    state = whole
    for _ in range(MAX_HOPS):
        if state == ROOT:
            break
        states[state, COUNT] += 1
        states[state, LAST_END] = header[NUM_TOKENS]
        state = states[state, LINK]
    header[NUM_TOKENS] += 1


@jit
def learn(header: Header, states: Ints, edges: Ints, table: Ints, tokens: Ints) -> None:
    """Add one more text, tokens [count]."""
    header[LAST] = ROOT
    for token in tokens:
        _extend(header, states, edges, table, token)


@jit
def _holding(states: Ints, state: int, length: int) -> int:
    """Return the state of the last `length` tokens of a string of `state`."""
    while state != ROOT and states[states[state, LINK], LENGTH] >= length:
        state = states[state, LINK]
    return state


@jit
def read(header: Header, states: Ints, edges: Ints, table: Ints, tokens: Ints, max_match: int) -> tuple[int, int]:
    """Continue the one text and keep the match: its longest suffix, up to `max_match`, that occurs earlier in it.

    That suffix is the link of the whole text. Where it is longer than `max_match`, walking down to the state of
    that length could take as many steps as the context has tokens, so the match takes one step from where it was.
    It needs at most two links then: one for the length, one if the state it stood on was just split.
    """
    for token in tokens:
        _extend(header, states, edges, table, token)
        state = int(states[header[LAST], LINK])
        length = int(states[state, LENGTH])
        if length > max_match:  # so the match before this token had length max_match, too
            before = _holding(states, header[MATCH_STATE], max_match)
            after = edges[table[_slot(edges, table, before, token)], TARGET]
            state = _holding(states, after, max_match)
            length = max_match
        header[MATCH_STATE] = state
        header[MATCH_LENGTH] = length
    return header[MATCH_STATE], header[MATCH_LENGTH]


@jit
def follow(
    states: Ints, edges: Ints, table: Ints, state: int, length: int, tokens: Ints, max_match: int
) -> tuple[int, int]:
    """Move a cursor of another sequence over `tokens`: the longest suffix of its text that occurs here.

    A state that nothing leaves (all its strings end a text) predicts nothing and cannot be extended: its link is
    taken at once, which loses no later match.
    """
    for token in tokens:
        edge = table[_slot(edges, table, state, token)]
        while edge == NONE and state != ROOT:
            state = int(states[state, LINK])
            length = int(states[state, LENGTH])
            edge = table[_slot(edges, table, state, token)]
        if edge != NONE:
            length = min(length + 1, max_match)
            state = _holding(states, edges[edge, TARGET], length)
    while state != ROOT and states[state, FIRST_EDGE] == NONE:
        state = int(states[state, LINK])
        length = int(states[state, LENGTH])
    return state, length


@jit
def _children(
    states: Ints,
    edges: Ints,
    state: int,
    position: int,
    temperature: float,
    seed: np.uint64,
    choice: int,
    best: Ints,
    weights: NDArray[np.float64],
) -> tuple[int, float]:
    """Fill best and weights [max_width] with the best edges of a state, best first; return how many, and all weight.

    Temperature 0: the weight is the count, of equals the latest wins. Above it the target draws the largest of
    logit / T + gumbel, whose law is softmax(logit / T). What was said was drawn from that tempered law, so log(count)
    estimates logit / T itself up to a constant, and dividing by T again would temper twice. The best guess of the
    draw is the largest log(count) + gumbel, with the noise of the position that the child would occupy. The weight is
    its exponential: exp(log(count) - log(-log u)) = count / -log u.
    """
    num_best, total = 0, 0.0
    edge = states[state, FIRST_EDGE]
    for _ in range(MAX_EDGES):
        if edge == NONE:
            break
        target = edges[edge, TARGET]
        weight = np.float64(states[target, COUNT])
        if temperature > 0.0:
            token = np.uint32(edges[edge, TOKEN])
            u = uniform(seed, token, np.uint32(position), np.uint32(choice), np.uint32(_SAMPLE))
            weight = weight / -math.log(u)
        total += weight
        place = num_best
        while place > 0:
            rival = edges[best[place - 1], TARGET]
            later = states[target, LAST_END] > states[rival, LAST_END]
            if weight < weights[place - 1] or (weight == weights[place - 1] and not later):
                break
            place -= 1
        if place < best.shape[0]:
            num_best = min(num_best + 1, best.shape[0])
            for behind in range(num_best - 1, place, -1):
                best[behind], weights[behind] = best[behind - 1], weights[behind - 1]
            best[place], weights[place] = edge, weight
        edge = edges[edge, NEXT_EDGE]
    return num_best, total


@jit
def grow(
    states: Ints,
    edges: Ints,
    state: int,
    length: int,
    position: int,
    max_rows: int,
    max_depth: int,
    max_width: int,
    min_survival: float,
    temperature: float,
    seed: np.uint64,
    choice: int,
) -> Tree:
    """Grow a tree from a match of `length` tokens, the likeliest node first: tokens, parents, confidence [rows].

    `position` is that of the first drafted token. The confidence of a child is its share of the weight, where the
    continuation that nobody has seen weighs DOUBT / length: the longer the text that agrees, the less doubt. The
    survival of a node is the product of the confidences on its path, and nodes below `min_survival` are left out.
    """
    tokens, parents = np.empty(max_rows, np.int64), np.empty(max_rows, np.int64)
    confidence = np.empty(max_rows, np.float64)
    best, weights = np.empty(max_width, np.int32), np.empty(max_width, np.float64)
    # Open nodes may still become rows; they are never more than these, since a row opens max_width at most.
    open_edges, open_parents = np.empty((2, (max_rows + 1) * max_width), np.int64)
    open_depths = np.empty((max_rows + 1) * max_width, np.int64)
    open_survival, open_confidence = np.empty((2, (max_rows + 1) * max_width), np.float64)
    num_rows, num_open = 0, 0
    parent, depth, survival = NONE, 0, 1.0
    while True:
        if depth < max_depth:
            num_best, total = _children(
                states, edges, state, position + depth, temperature, seed, choice, best, weights
            )
            for i in range(num_best):
                share = weights[i] / (total + DOUBT / (length + depth))
                if survival * share >= min_survival:
                    open_edges[num_open], open_parents[num_open], open_depths[num_open] = best[i], parent, depth + 1
                    open_survival[num_open], open_confidence[num_open] = survival * share, share
                    num_open += 1
        if num_open == 0 or num_rows == max_rows:
            break
        pick = np.argmax(open_survival[:num_open])  # of equals the first, which is the better sibling
        edge, depth, survival = open_edges[pick], open_depths[pick], open_survival[pick]
        if survival == TAKEN:
            break
        open_survival[pick] = TAKEN
        tokens[num_rows], parents[num_rows] = edges[edge, TOKEN], open_parents[pick]
        confidence[num_rows] = open_confidence[pick]
        state, parent = int(edges[edge, TARGET]), num_rows
        num_rows += 1
    return tokens[:num_rows], parents[:num_rows], confidence[:num_rows]


@jit
def _fill_table(edges: Ints, num_edges: int, table: Ints) -> None:
    for edge in range(num_edges):
        table[_slot(edges, table, edges[edge, OWNER], edges[edge, TOKEN])] = edge


class Automaton:
    """The arrays of one automaton, which double when they are full; 120 bytes per token that there is room for."""

    __slots__ = ("_capacity_tokens", "edges", "header", "states", "table")

    def __init__(self, *, capacity_tokens: int = 256) -> None:
        self._capacity_tokens = 0
        self.header: Header = np.zeros(6, np.int64)
        self.states: Ints = np.empty((0, 5), np.int32)
        self.edges: Ints = np.empty((0, 4), np.int32)
        self.table: Ints = np.empty(0, np.int32)
        self.reserve(max(capacity_tokens, 1))
        self.header[NUM_STATES] = 1
        self.states[ROOT] = (0, NONE, NONE, 0, NONE)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its texts. Since they are never taken back, this is also the version of the automaton."""
        return int(self.header[NUM_TOKENS])

    @property
    def num_bytes(self) -> int:
        """Memory held, used or not."""
        return self.header.nbytes + self.states.nbytes + self.edges.nbytes + self.table.nbytes

    def reserve(self, num_more_tokens: int) -> None:
        """Make room. N tokens need at most 2 N + 1 states and 3 N edges."""
        needed = self.num_tokens + num_more_tokens
        if needed <= self._capacity_tokens:
            return
        self._capacity_tokens = 1 << (needed - 1).bit_length()
        num_states, num_edges = int(self.header[NUM_STATES]), int(self.header[NUM_EDGES])
        states = np.empty((2 * self._capacity_tokens + 1, 5), np.int32)
        edges = np.empty((3 * self._capacity_tokens, 4), np.int32)
        states[:num_states] = self.states[:num_states]
        edges[:num_edges] = self.edges[:num_edges]
        self.states, self.edges = states, edges
        self.table = np.full(1 << (2 * len(edges) - 1).bit_length(), NONE, np.int32)
        _fill_table(edges, num_edges, self.table)

    def learn(self, tokens: Ints) -> None:
        """Add a text, tokens [count]."""
        self.reserve(len(tokens))
        learn(self.header, self.states, self.edges, self.table, tokens)

    def read(self, tokens: Ints, max_match: int) -> tuple[int, int]:
        """Continue the one text; return the state and length of its longest suffix that occurs earlier in it."""
        self.reserve(len(tokens))
        match: tuple[int, int] = read(self.header, self.states, self.edges, self.table, tokens, max_match)
        return match

    def follow(self, state: int, length: int, tokens: Ints, max_match: int) -> tuple[int, int]:
        """Move the cursor (state, length) of a text outside over its next tokens."""
        cursor: tuple[int, int] = follow(self.states, self.edges, self.table, state, length, tokens, max_match)
        return cursor
