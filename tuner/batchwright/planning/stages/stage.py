"""The interface of the stages of a tuning. Pure, no torch."""

from abc import ABC, abstractmethod

from batchwright.planning.stages.course import Course
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ProbeResult


class Stage(ABC):
    """A part of a tuning's course. What it asks for depends on the recorded probes alone."""

    @abstractmethod
    def ask(self, course: Course) -> ProbeRequest | None:
        """The next probe of this stage; None when the stage is over, or has not all that it needs."""

    def tell(self, course: Course, result: ProbeResult) -> bool:
        """Take in a result, before it is recorded; return False for one of another stage.

        Raises:
            SearchError: when no stage can have asked for it.
        """
        del course, result
        return False
