"""Define the documents that the SDK returns: those of the API, whose recommendations have the library's methods."""

from batchwright.client.documents import work
from batchwright.library.recommendation import Recommendation


class Tuning(work.Tuning):
    """A tuning whose recommendation has the methods of ``batchwright.Recommendation``."""

    recommendation: Recommendation | None = None
    """The result, when the tuning has ended. `feasible: false` is a result too."""


class Job(work.Job):
    """A job whose recommendation has the methods of ``batchwright.Recommendation``."""

    recommendation: Recommendation
    """The recommendation that the job follows."""
