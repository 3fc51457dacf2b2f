"""The stages of a tuning's course, each of which names probes and takes in their results. Pure, no torch.

``course`` holds the recorded probes and what they have established; stages keep no state of their own. In order:

1. ``size_search.Confirmation`` probes the size of a stored recommendation, which that probe alone may confirm.
2. ``size_search.SizeSearch`` probes until the largest size that fits is proven.
3. ``baseline_probe`` probes the size of the plan in use until now, for the gain over it.
4. ``plan_timing`` times plans, for an objective whose choice rests on their times.
5. ``plan_run`` runs the plan itself, unless a probe was at least as demanding.

``undivided_batch`` takes the place of all of them where only the whole batch in one micro-batch is exact.
``stage_order`` has the tuples of stages.

Where a new stage goes: a module here that implements ``stage``, and its place in ``stage_order``.
"""
