"""The first import of the process from which tracing processes are forked: the stand-in for CUDA, and then torch.

Without a C++ compiler there is no stand-in, as in a tracing process.
"""

from contextlib import suppress

from batchwright.estimation.cuda_shim import NoCompilerError, load_shim
from batchwright.workloads.preload import import_early, late_imports

with suppress(NoCompilerError):
    load_shim()
import_early(
    (
        "batchwright.estimation.tracing.worker",
        "batchwright.estimation.tracing.sized_workload",
        "batchwright.estimation.tracing.peak_curve",
        *late_imports(),
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "peft",
    )
)
