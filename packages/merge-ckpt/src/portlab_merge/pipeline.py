"""Work in threads, results in order, a bounded number of them alive: the streaming behind a merge."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


def in_order[T, R](work: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R]:
    """Map over items with a pool, yielding in the items' order; at most 2 * threads results wait."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Behind[T]:
    """A function that is called in a thread of its own, in the order of the calls, a few of them behind the caller.

    A context manager: leaving it waits for the last call. What a call raises is raised by a later one, or then.
    """

    def __init__(self, function: Callable[[T], object], limit: int = 4) -> None:
        self._function, self._limit = function, limit
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[object]] = deque()

    def __call__(self, item: T) -> None:
        """Call the function with `item`, soon; waits if too many calls are due before."""
        self._waiting.append(self._pool.submit(self._function, item))
        if len(self._waiting) > self._limit:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Until the last call is done."""
        while self._waiting:
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)
