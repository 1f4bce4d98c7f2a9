"""The waiting queue against a sorted list, with requests that end while they wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler import Request, RequestState
from aspire.scheduler.waiting import WaitingQueue

OPERATION = st.tuples(st.sampled_from(["push", "pop", "end"]), st.integers(0, 3), st.integers(0, 99))


@given(st.lists(OPERATION, max_size=120))
def test_it_is_a_sorted_list_without_those_that_ended(operations: list[tuple[str, int, int]]) -> None:
    queue, model = WaitingQueue(), []
    for order, (what, priority, which) in enumerate(operations):
        if what == "push":
            request = Request(str(order), 1, 1, priority=priority, order=order)
            queue.push(request)
            model.append(request)
        elif model and what == "pop":
            assert queue.head() is model[0] and queue.pop() is model.pop(0)
        elif model:
            ended = model.pop(which % len(model))
            ended.state = RequestState.FINISHED
            queue.note_ended()
        model.sort(key=lambda request: (request.priority, request.order))
        assert queue.head() is (model[0] if model else None)
        assert len(queue._heap) <= 2 * len(model) + 1, "those that ended pile up"
