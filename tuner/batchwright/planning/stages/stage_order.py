"""The order of the stages of a tuning. Pure, no torch."""

from batchwright.planning.stages.baseline_probe import BaselineProbe
from batchwright.planning.stages.plan_run import PlanRun
from batchwright.planning.stages.plan_timing import PlanTiming
from batchwright.planning.stages.quick_plan import QuickPlan
from batchwright.planning.stages.size_search import Confirmation, SizeSearch
from batchwright.planning.stages.stage import Stage

Stages = tuple[Stage, ...]

SEARCH_STAGES: Stages = (Confirmation(), SizeSearch(), BaselineProbe(), PlanTiming())
"""Prove the largest size alone."""
ALL_STAGES: Stages = (Confirmation(), SizeSearch(runs_plans=True), BaselineProbe(), PlanTiming(), PlanRun())
"""Prove the largest size, and then the plan to recommend."""
QUICK_STAGES: Stages = (Confirmation(), QuickPlan(), BaselineProbe(), PlanRun())
"""Prove one plan, and search no larger one."""
