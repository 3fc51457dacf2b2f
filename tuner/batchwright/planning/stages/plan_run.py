"""The last stage: run the plan to recommend. Pure, no torch."""

from typing_extensions import override

from batchwright.errors import SearchError
from batchwright.planning.accumulation import probe_window
from batchwright.planning.proofs.plan_proof import format_window
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.stage import Stage
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ProbeResult


class PlanRun(Stage):
    """Run the plan, where no fit was at least as demanding (``batchwright.planning.proofs.plan_proof``)."""

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        proof = course.proof
        plan = None if proof is None else course.plan_proof(proof)
        if plan is None or not plan.needs_run:
            return None
        conditions = course.conditions
        return conditions.probe(
            plan.window[0], share=plan.share, runs_plan=True, counts_plan=conditions.request.command is not None
        )

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        if not result.runs_plan or result.measures_time or course.proof is None:  # a quick one runs before a proof
            return False
        expected = self.ask(course)
        if expected is None or probe_window(expected) != result.micro_batch_sizes:
            window = format_window(result.micro_batch_sizes)
            raise SearchError(f"the plan in micro-batches of {window} is not the one to run now")
        return True
