"""Write the OpenAPI document: ``python -m batchwright_service.entrypoints.export_openapi > openapi/openapi.json``."""

from __future__ import annotations

import json
import sys

from batchwright.system.temporary_folders import TemporaryFolder
from batchwright_service.bootstrap import app_of, build
from batchwright_service.settings import Settings


def export_openapi() -> str:
    """Return the OpenAPI document of a service with default settings, as JSON that ends with a newline."""
    with TemporaryFolder() as folder:
        settings = Settings(data_dir=folder, database_url=None)
        system = build(settings, devices=())
        try:
            return json.dumps(app_of(system, settings).openapi(), indent=2, ensure_ascii=False) + "\n"
        finally:
            system.stop()


if __name__ == "__main__":
    sys.stdout.write(export_openapi())
