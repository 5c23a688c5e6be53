"""Tensors that are made when they are taken: a model that would not fit in memory twice is packed one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping

from torch import Tensor

from understudy.models.weights import Progress


class LazyTensors(MutableMapping[str, Tensor]):
    """A mapping of names to tensors that holds none of them.

    Reading one makes it, anew each time; `pop` also lets go of what it was made from.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]], *, progress: Progress | None = None) -> None:
        self._makers = dict(makers)
        self._num_tensors = len(makers)
        self._progress = progress

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._makers[name] = lambda: tensor

    def __delitem__(self, name: str) -> None:
        del self._makers[name]
        if self._progress is not None:
            self._progress(self._num_tensors - len(self._makers), self._num_tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
