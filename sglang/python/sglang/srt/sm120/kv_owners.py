# SPDX-License-Identifier: Apache-2.0
"""Who holds a KV slot: rows of running requests and nodes of the radix tree.

A text is a path of nodes, whose slots every request on it repeats in its row, and behind it the row of one request. Slots
may move where every holder is known. A node counts the requests that hold it (``lock_ref``): when that is more than
the requests of the batch, somebody else is there (a chunked prefill, say), and the node stays where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch


@dataclass(frozen=True)
class Text:
    """The slots of one text and all their holders.

    nodes    (first position, node) from the root on
    holders  (request, positions it shares, counted from the first); the text's own request comes first
    start, stop  positions whose slots may move
    """

    nodes: tuple[tuple[int, Any], ...]
    holders: tuple[tuple[Any, int], ...]
    start: int
    stop: int

    def slots(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """int64 [stop - start], a copy. `table` is the int32 [rows, positions] table of the requests' slots."""
        if self.holders:
            return table[self.holders[0][0].req_pool_idx, start:stop].to(torch.int64)
        return torch.cat([node.value for _, node in self.nodes])[start:stop]

    def repoint(self, table: torch.Tensor, start: int, slots: torch.Tensor) -> None:
        """Let every holder say `slots` (int64) from position `start` on.

        All writes go into tensors that exist, on the current stream: their memory belongs to the scheduler's stream,
        which waits for the forward pass before it touches them again.
        """
        stop = start + len(slots)

        def write(target: torch.Tensor, first: int, limit: int) -> None:
            """`target` holds the positions from `first` up to `limit`."""
            begin, end = max(start, first), min(stop, limit)
            if begin < end:
                target[begin - first : end - first] = slots[begin - start : end - start]

        for first, node in self.nodes:
            write(node.value, first, first + len(node.value))
        for req, shared in self.holders:
            write(table[req.req_pool_idx], 0, shared)
            # Only a prefill reads these again, but a stale copy of a slot has no place anywhere.
            write(req.prefix_indices, 0, min(shared, len(req.prefix_indices)))


def path_to(root: Any, node: Any) -> list[Any] | None:
    """The nodes below `root` down to `node`; None when the tree has lost it."""
    path = []
    while node is not root:
        parent = getattr(node, "parent", None)
        if parent is None or parent.children.get(node.key.child_key()) is not node:
            return None
        path.append(node)
        node = parent
    return path[::-1]


def text_of_request(req: Any, batch: Sequence[Any], root: Any) -> Text:
    """The text of a running request.

    Args:
        batch: every request that runs, `req` among them.
        root: of the radix tree.
    """
    paths = {id(other): _path_of(other, root) for other in batch}
    known = Counter(id(node) for path in paths.values() for node in path or ())
    stop = int(req.kv_committed_len)
    path = paths[id(req)]
    if path is None:
        return Text((), ((req, stop),), stop, stop)
    nodes, position, start = [], 0, 0
    for node in path:
        nodes.append((position, node))
        position += len(node.value)
        if node.lock_ref != known[id(node)]:
            start = position
    others = [(other, _shared(path, paths[id(other)] or ())) for other in batch if other is not req]
    return Text(tuple(nodes), ((req, stop), *(pair for pair in others if pair[1])), start, stop)


def text_of_leaf(leaf: Any, root: Any) -> Text | None:
    """A cached text that nobody uses, or None if that is not so (any more)."""
    path = path_to(root, leaf)
    if not path or any(node.lock_ref for node in path):
        return None
    nodes, position = [], 0
    for node in path:
        nodes.append((position, node))
        position += len(node.value)
    return Text(tuple(nodes), (), 0, position)


def leaves(root: Any) -> Iterator[Any]:
    """The nodes that end a cached text."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        if node.children:
            waiting.extend(node.children.values())
        else:
            yield node


def _path_of(req: Any, root: Any) -> list[Any] | None:
    """The request's path, or None when its row and the tree disagree about what they share."""
    path = path_to(root, req.last_node)
    if path is None or sum(len(node.value) for node in path) != req.cache_protected_len:
        return None
    return path


def _shared(path: Sequence[Any], other: Sequence[Any]) -> int:
    """Positions that two paths have in common."""
    common = takewhile(lambda pair: pair[0] is pair[1], zip(path, other, strict=False))
    return sum(len(node.value) for node, _ in common)
