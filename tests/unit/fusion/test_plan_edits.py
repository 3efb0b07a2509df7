"""Plans change between two steps: tasks leave, tasks join, buckets get smaller."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.plan import Plan, add_tasks, dumps, keep_tasks
from tests.unit.fusion.test_plan import plans, task_names


@settings(deadline=None)
@given(plans(), st.sets(task_names))
def test_tasks_that_leave_are_in_no_bucket(plan: Plan, others: set[str]) -> None:
    names = others | set(plan.tasks[::2])
    left = keep_tasks(plan, names)
    assert left.tasks == tuple(name for name in plan.tasks if name in names)
    assert keep_tasks(left, names) == left
    assert keep_tasks(plan, plan.tasks) == plan, "nobody left: nothing changes, predictions neither"
    if len(left.tasks) < len(plan.tasks):
        assert (left.predicted_latency_s, left.memory_bytes) == (None, ())
        assert all(bucket.chunks == () for bucket in left.buckets)
    whole = {bucket.tasks: bucket for bucket in plan.buckets}
    for bucket in left.buckets:
        was = next(whole[tasks] for tasks in whole if set(bucket.tasks) <= set(tasks))
        assert (bucket.micro_batches, bucket.chunk, bucket.forward) == (
            was.micro_batches,
            was.chunk,
            was.forward,
        )


@settings(deadline=None)
@given(plans(), st.lists(task_names), st.integers(1, 8))
def test_tasks_that_join_are_in_a_bucket_of_their_own(plan: Plan, names: list[str], count: int) -> None:
    joined = add_tasks(plan, names, count)
    new = set(names) - set(plan.tasks)
    assert joined.tasks == (*plan.tasks, *sorted(new))
    assert joined.buckets[: len(plan.buckets)] == plan.buckets
    if new:
        assert [bucket.micro_batches for bucket in joined.buckets[len(plan.buckets) :]] == [count]
        assert joined.predicted_latency_s is None, "it was predicted without them"
    else:
        assert joined == plan
    assert add_tasks(joined, names, count) == joined
    assert Plan.from_json(json.loads(dumps(joined))) == joined
    assert add_tasks(plan, names[::-1], count) == joined, "the same on every rank"
