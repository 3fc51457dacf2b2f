"""The model of examples/side_by_side as a ``python`` target, for the true largest size in side_by_side.py."""

from common_task import build_model, longest_batch, loss
from torch import Tensor, nn

from batchwright.workloads.base import LossTerms


class CommonTask:
    """A ``batchwright.workloads.base.Workload`` of the functions that the scripts share."""

    def build_model(self) -> nn.Module:
        """Build the model."""
        return build_model()

    def make_batch(self, size: int) -> Tensor:
        """Make ``size`` samples of the longest length."""
        return longest_batch(size)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Compute the sum over the bytes, and their number."""
        return {"loss": loss(model, batch)}
