"""The queue of requests that wait for a slot: most urgent first, then in the order of submission."""

from __future__ import annotations

import heapq

from aspire.scheduler.request import Request, RequestState


class WaitingQueue:
    """A heap by (priority, submission order). Requests that ended while they waited are left in it until they come up,
    or until they are the most of it: so thousands can be aborted without a search for each."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._ended = 0

    def push(self, request: Request) -> None:
        """Queue ``request``, whose ``order`` is its place among those of its priority."""
        heapq.heappush(self._heap, (request.priority, request.order, request))

    def head(self) -> Request | None:
        """The next request; None when nobody waits."""
        while self._heap and self._heap[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._heap)
            self._ended -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Take out what `head` returned."""
        return heapq.heappop(self._heap)[2]

    def note_ended(self) -> None:
        """A request in the queue has ended; its state says so."""
        self._ended += 1
        if 2 * self._ended > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state is RequestState.WAITING]
            heapq.heapify(self._heap)
            self._ended = 0
