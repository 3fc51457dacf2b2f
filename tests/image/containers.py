"""Run the image as the manifests do, and ask its API by curl from within the container's network."""

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.image.container_tools import ContainerTools, call
from tests.image.image_build import IMAGE

START_SECONDS = 180.0
WORK_SECONDS = 600.0
STOP_SECONDS = 60
"""The time to stop of every manifest."""
TEMPORARY = ("--tmpfs", "/tmp:mode=1777,size=1g")  # noqa: S108 - in a container
_HARDENED = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
)
_NO_TIMER = "--health-interval=disable"
"""The timers of health checks are systemd's: the tests run the check."""


@dataclass(frozen=True)
class Container:
    """A container of the image, with its own network in which nothing else is, or with that of another."""

    tools: ContainerTools
    name: str
    key: str
    port: int = 8000
    image: str = IMAGE
    network: str = "none"

    def inside(self, *command: str) -> str:
        """Run a command in the container, and return its output."""
        return self.tools.podman("exec", self.name, *command)

    def inspect(self, template: str) -> str:
        """Return a figure of the container."""
        return self.tools.podman("inspect", "--format", template, self.name).strip()

    def curl(self, path: str, *options: str) -> str:
        """Request a path with the key of the operator, and return the body and, in the last line, the status."""
        network = ["nsenter", "--target", self.inspect("{{.State.Pid}}"), "--net"]
        url = f"http://127.0.0.1:{self.port}{path}"
        given = ["--header", f"Authorization: Bearer {self.key}", *options]
        return call([*network, "curl", "--silent", "--max-time", "60", "--write-out", "\n%{http_code}", *given, url])

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON of a path."""
        body, _, status = self.curl(path).rpartition("\n")
        assert status == "200", body
        document: dict[str, Any] = json.loads(body)
        return document

    def status(self, path: str, *options: str) -> int:
        """Return the status of a request."""
        return int(self.curl(path, *options).rpartition("\n")[2])

    def post(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Send JSON, and return the response's."""
        text = self.curl(path, "--json", json.dumps(document))
        body, _, status = text.rpartition("\n")
        assert status in {"200", "201", "202"}, body
        response: dict[str, Any] = json.loads(body)
        return response

    def is_healthy(self) -> bool:
        """Run the image's own health check."""
        return self.tools.podman_status("healthcheck", "run", self.name)[0] == 0

    def logs(self) -> str:
        """Return what the container printed."""
        return self.tools.podman_status("logs", self.name)[1]

    def stop(self) -> float:
        """Send SIGTERM, and return the seconds until the container has ended."""
        began = time.monotonic()
        self.tools.podman("stop", "--time", str(STOP_SECONDS), self.name)
        return time.monotonic() - began


def wait_until(met: Callable[[], bool], seconds: float, failed: Callable[[], str]) -> None:
    """Wait for a condition; raise with what ``failed`` returns when it is not met in time."""
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise AssertionError(failed())
        time.sleep(0.5)


@contextmanager
def started(
    container: Container,
    options: tuple[str, ...],
    *command: str,
    is_ready: Callable[[Container], bool] = Container.is_healthy,
) -> Iterator[Container]:
    """Run the image until the block ends; begins when it is ready, by default when its health check passes."""
    container.tools.podman_status("rm", "--force", container.name)
    named = ["--detach", "--name", container.name, "--network", container.network, _NO_TIMER]
    arguments = [*named, *_limits(), *_HARDENED, *TEMPORARY, *options]
    container.tools.podman("run", *arguments, container.image, *command)
    try:
        wait_until(lambda: is_ready(container), START_SECONDS, container.logs)
        yield container
    finally:
        container.tools.podman_status("rm", "--force", container.name)


def run_to_its_end(
    tools: ContainerTools, *options: str, command: tuple[str, ...] = (), image: str = IMAGE
) -> tuple[int, str]:
    """Run a container in the foreground, and return its exit status and output."""
    alone = ("--rm", "--no-healthcheck", "--network=none")
    return tools.podman_status("run", *alone, *_limits(), *_HARDENED, *options, image, *command)


def _limits() -> list[str]:
    """Return limits within those of this process, which may not be able to raise them."""
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[1]
    bounded = 20_000 if processes == resource.RLIM_INFINITY else min(20_000, processes)
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={bounded}:{bounded}"]
