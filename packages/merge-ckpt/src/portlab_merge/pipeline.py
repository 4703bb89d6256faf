"""Work in threads, results in order, a bounded number of them alive: the streaming behind a merge."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


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


class BackgroundSha256:
    """A sha256 that is computed beside the writer, at most a few blocks behind it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "BackgroundSha256":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def update(self, data: bytes) -> None:
        """Add bytes after those added before."""
        self._waiting.append(self._pool.submit(self._digest.update, data))
        if len(self._waiting) > 4:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """Digest of all bytes added so far."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()
