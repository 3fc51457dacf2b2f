"""Watch over the losses, gradients and weights of a run, which ends when they are no longer finite."""

from collections.abc import Mapping

from torch import Tensor, nn

from batchwright.errors import NotFiniteError
from batchwright.schemas.training import TrainingProgress

_MOST_IN_A_ROW = 32
"""Updates without a step that a gradient scaler may need: each halves its scale, of 65,536 at first and 2**-16 then."""
_REMEDY = (
    "Lower the learning rate, clip the gradient (`gradient_clipping`), or look for a division by zero or a logarithm "
    "of zero in the loss"
)


class FiniteUpdates:
    """Record of the updates of a run whose loss or gradient was not finite.

    A scaler skips such an update and goes on with a smaller scale. Otherwise the step has made the weights infinite or
    NaN, and no later update mends them.

    Args:
        model: before training. Buffers that are not finite at that time, such as masks, may stay so.

    Attributes:
        since: the first of the newest updates in a row that were not finite; None if the newest update was finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.since: int | None = None
        self._made_step = False
        self._watched = {
            *(name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad),
            *(name for name, each in model.named_buffers(remove_duplicate=False) if _is_finite(each)),
        }

    def add(self, progress: TrainingProgress) -> None:
        """Record an update.

        Raises:
            NotFiniteError: when its step has made the weights not finite, or too many updates in a row made no step.
        """
        if progress.weights and not any(progress.weights.values()):
            return  # nothing of the update counts
        found = [name for name in ("loss", "gradient_norm") if getattr(progress, name) is None]
        if not found:
            self.since, self._made_step = None, True
            return
        self.since = self.since or progress.update
        in_a_row = progress.update - self.since + 1
        if "gradient_norm" in found and not progress.skipped:
            raise NotFiniteError(f"the gradient of update {progress.update} is not finite, and neither are the weights")
        if in_a_row >= _MOST_IN_A_ROW:
            raise NotFiniteError(
                f"the loss or the gradient has not been finite since update {self.since}, for {in_a_row} updates"
            )

    def conclude(self, newest: TrainingProgress | None) -> str | None:
        """Judge a run that has made all its updates. Return a note, if its last updates made no step.

        Raises:
            NotFiniteError: when the last loss is not finite, or no update has made a step.
        """
        if self.since is None or newest is None:
            return None
        if newest.loss is None:
            raise NotFiniteError(f"the loss or the gradient has not been finite since update {self.since}")
        if not self._made_step:
            raise NotFiniteError("no update has a finite gradient, so no step was made")
        return f"no step was made since update {self.since}, because the gradients are not finite"

    def require_finite(self, weights: Mapping[str, Tensor], update: int) -> None:
        """Check the weights of a checkpoint after ``update`` updates, before it is written.

        Raises:
            NotFiniteError: naming a weight that is infinite or NaN.
        """
        wrong = [name for name, each in weights.items() if name in self._watched and not _is_finite(each)]
        if wrong:
            self.since = self.since or update
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise NotFiniteError(f"`{wrong[0]}`{more} of the model is not finite after update {update}")

    @staticmethod
    def describe(error: NotFiniteError, kept: int | None) -> str:
        """The reason why a run has ended, with its remedy.

        Args:
            error: the error that has ended the run.
            kept: update of the newest checkpoint, whose weights are finite; None without one.
        """
        checkpoint = "No checkpoint was written" if kept is None else f"The finite checkpoint of update {kept} is kept"
        return f"{error}. {checkpoint}. {_REMEDY}"

    def state(self) -> dict[str, object]:
        """Plain state for a checkpoint."""
        return {"since": self.since, "made_step": self._made_step}

    def load_state(self, *, since: int | None, made_step: bool) -> None:
        """Continue from the state of a checkpoint."""
        self.since, self._made_step = since, made_step


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.detach().isfinite().all())
