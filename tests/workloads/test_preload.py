"""Modules that are imported before memory is measured."""

from batchwright.workloads.preload import late_imports
from tests.support.factories import python_spec


def test_the_target_of_an_integration_is_imported_early() -> None:
    """Its library would otherwise count against a limit on the CPU. A module of the user is not imported early."""
    ours = late_imports(python_spec("batchwright.integrations.training_module:TrainingModule"))
    users = late_imports(python_spec("my_project.workloads:build"))

    assert set(ours) - set(users) == {"batchwright.integrations.training_module"}
    assert users == late_imports()
