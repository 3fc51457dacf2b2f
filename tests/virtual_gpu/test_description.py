"""Descriptions of virtual hosts, and what is said where their libraries cannot be built. Nothing here needs CUDA."""

from pathlib import Path

import pytest

from batchwright.errors import EstimateError, SpecError, VirtualGpuError
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.gpu_table import GPUS
from batchwright.schemas.base import parse_document
from batchwright.virtual_gpu.__main__ import main
from batchwright.virtual_gpu.build import build
from batchwright.virtual_gpu.description import MOST_GPUS, EccError, SlowKernels, VirtualGpu, VirtualHost, load_host
from batchwright.virtual_gpu.session import VirtualGpuSession

GIB = 1024**3
CATALOGUED = [gpu.name for gpu in GPUS if gpu.vendor == "nvidia"]


@pytest.mark.parametrize("model", CATALOGUED)
def test_a_catalogued_card_has_the_memory_of_the_table(model: str) -> None:
    """Its other figures are those of its compute capability."""
    gpu, listed = VirtualGpu.of(model), find_gpu(model)
    assert (gpu.total_bytes, gpu.compute_capability) == (listed.total_bytes, listed.compute_capability)
    assert gpu.context_bytes == listed.context_bytes.expected
    assert gpu.nvml_total_bytes > gpu.total_bytes
    assert find_gpu(gpu.name) == listed


def test_a_card_is_found_by_any_of_its_names() -> None:
    """Cards are found by any of their names, as everywhere in the tuner."""
    assert VirtualGpu.of("NVIDIA H100 80GB HBM3") == VirtualGpu.of("H100-80GB")


def test_an_unknown_card_is_refused() -> None:
    """One that is in no table, and one of which only the memory is known."""
    with pytest.raises(EstimateError, match="no GPU is called 'T5'"):
        VirtualGpu.of("T5")
    with pytest.raises(VirtualGpuError, match=r"no figures of the multiprocessors of MI300X are known"):
        VirtualGpu.of("MI300X")


def test_a_file_names_cards_or_describes_them(tmp_path: Path) -> None:
    """A name alone, a name with other figures beside it; sizes with units; processes and failures."""
    path = tmp_path / "host.yaml"
    path.write_text("""
gpus:
  - T4
  - {model: H100-80GB, total_bytes: 3GiB, cudnn_workspace_bytes: 64MiB}
processes:
  - {gpu: 1, used_bytes: 1GiB}
failures:
  - {kind: ecc-error, gpu: 1, at_allocation: 5}
  - {kind: slow-kernels, seconds: 0.5}
host_memory_bytes: 1GiB
""")
    host = load_host(path)
    assert host.gpus[0] == VirtualGpu.of("T4")
    assert host.gpus[1].total_bytes == 3 * GIB
    assert host.gpus[1].compute_capability == (9, 0)
    assert host.processes[0].used_bytes == GIB
    assert host.failures == (EccError(gpu=1, at_allocation=5), SlowKernels(seconds=0.5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": []}, "gpus"),
        ({"gpus": ["T4"] * (MOST_GPUS + 1)}, "gpus"),
        ({"gpus": [{"model": "T4", "total_bytes": "8TiB"}]}, "total_bytes"),
        ({"gpus": [{"model": "T4", "total_bytes": "255MiB"}]}, "total_bytes"),
        ({"gpus": [{"model": "T4", "context_bytes": "15GiB"}]}, "must be less than total_bytes"),
        ({"gpus": [{"model": "T4", "nvml_total_bytes": "1GiB"}]}, "must be at least total_bytes"),
        ({"gpus": [{"model": "T4", "sms": 40}]}, "sms"),
        ({"gpus": [{"model": "T4", "name": "two\nlines"}]}, "name"),
        ({"gpus": ["T4"], "processes": [{"gpu": 1, "used_bytes": 1}]}, "there is no GPU 1: the host has 1"),
        ({"gpus": ["T4"], "failures": [{"kind": "device-lost", "gpu": 3}]}, "there is no GPU 3: the host has 1"),
        ({"gpus": ["T4"], "failures": [{"kind": "fire"}]}, "kind"),
        ({"gpus": ["T4"], "failures": [{"kind": "slow-kernels", "seconds": -1}]}, "seconds"),
    ],
)
def test_a_wrong_description_is_refused(fields: dict[str, object], message: str) -> None:
    """The error has the field and what is allowed."""
    with pytest.raises(SpecError, match=message):
        parse_document(VirtualHost, fields, "virtual host")


def test_without_the_cuda_wheels_the_remedy_is_named(tmp_path: Path) -> None:
    """A session cannot begin."""
    session = VirtualGpuSession(VirtualHost.of("T4"), site_packages=tmp_path)
    with pytest.raises(VirtualGpuError, match=r"lacks torch's CUDA build \(.*cuda_runtime_api.h\): install"), session:
        pass
    with pytest.raises(VirtualGpuError, match="is not open"):
        session.environment()


def test_without_a_compiler_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is missing."""
    monkeypatch.setattr("batchwright.virtual_gpu.build._NEEDED", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(VirtualGpuError, match=r"need a C\+\+ compiler"):
        build(tmp_path, tmp_path)


@pytest.mark.parametrize("arguments", [["--gpu", "T4"], ["--", "true"], ["--gpu", "T4", "--host", "x", "--", "true"]])
def test_a_command_line_that_lacks_something_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the usage."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m batchwright.virtual_gpu" in capsys.readouterr().err


def test_a_wrong_card_on_the_command_line_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback."""
    assert main(["--gpu", "T5", "--", "true"]) == 2
    assert capsys.readouterr().err.startswith("no GPU is called 'T5'")
