"""Blocks of committed text that later requests may share.

A tree of whole blocks: a node is known by its parent and the tokens in its block, compared token by token, so two
texts can never be taken for one another. Each tenant has a root of its own. Only tokens that the target has
committed enter; a drafted one never does. The least recently used leaf goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from understudy.kv.pool import BlockPool

_MOST_TENANTS = 4096
"""Beyond this many, tenants with nothing cached are forgotten."""


@dataclass(slots=True, eq=False)
class Node:
    """One cached block; `block` is -1 in a tenant's root."""

    parent: Node | None
    tokens: tuple[int, ...]
    block: int
    num_children: int = 0


class PrefixCache:
    """Finds and keeps committed blocks."""

    def __init__(self, pool: BlockPool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[str, Node] = {}
        # by the parent's identity, which is unique while a child that refers to it is in here
        self._nodes: OrderedDict[tuple[int, tuple[int, ...]], Node] = OrderedDict()  # least recently used first
        pool.reclaim = self._drop_oldest

    def root(self, tenant: str) -> Node:
        """Return the empty prefix of a tenant."""
        if tenant not in self._roots and len(self._roots) >= _MOST_TENANTS:
            self._roots = {name: root for name, root in self._roots.items() if root.num_children}
        return self._roots.setdefault(tenant, Node(None, (), -1))

    def find(self, tenant: str, tokens: Sequence[int], limit: int) -> list[Node]:
        """Return the nodes of the longest cached prefix of tokens[:limit], each with a reference for the caller."""
        node, found = self.root(tenant), []
        for start in range(0, limit - self._page_tokens + 1, self._page_tokens):
            child = self._nodes.get((id(node), tuple(tokens[start : start + self._page_tokens])))
            if child is None:
                break
            self._pool.share(child.block)
            found.append(child)
            node = child
        for child in reversed(found):  # a parent stays younger than its children, so that leaves go first
            self._nodes.move_to_end((id(child.parent), child.tokens))
        return found

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Keep a committed block; where the same text is kept already, that one stays and is returned.

        The caller then takes the kept block in place of its own: the bits are the same, and whoever uses a node
        refers to all its ancestors, so a block in use never hangs under one that could be dropped.
        """
        key = (id(parent), tokens)
        node = self._nodes.get(key)
        if node is None:
            node = Node(parent, tokens, block)
            parent.num_children += 1
            self._nodes[key] = node
            self._pool.keep(block)
            ancestor = parent
            while ancestor.parent is not None:  # the new leaf must not be younger than its ancestors
                self._nodes.move_to_end((id(ancestor.parent), ancestor.tokens))
                ancestor = ancestor.parent
        return node

    def blocks(self) -> list[int]:
        """Every block that the cache refers to."""
        return [node.block for node in self._nodes.values()]

    def _drop_oldest(self) -> bool:
        for key, node in self._nodes.items():
            if self._pool.is_idle(node.block) and not node.num_children:
                del self._nodes[key]
                assert node.parent is not None
                node.parent.num_children -= 1
                self._pool.drop(node.block)
                return True
        return False
