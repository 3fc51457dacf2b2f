"""The table of GPUs: its figures, and the lookup of a GPU by any of its names."""

import json
import re
from typing import Literal

import pytest

from batchwright.errors import EstimateError
from batchwright.hardware.gpu_lookup import context_bytes_of, find_gpu
from batchwright.hardware.gpu_table import GPUS, blas_workspace_bytes
from batchwright.schemas.gpus import Gpu, KernelProfile

GIB = 1024**3
BY_NAME = {gpu.name: gpu for gpu in GPUS}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_card_is_found_by_each_of_its_names(gpu: Gpu) -> None:
    """The name, every alias, and either in NVML's spelling leads to the card and to no other."""
    for name in (gpu.name, *gpu.aliases):
        for spelling in (name, name.upper(), f"NVIDIA {name}", f"  {name.replace(' ', '-')}", name.replace("-", "_")):
            assert find_gpu(spelling) is gpu, spelling


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_figure_has_its_source(gpu: Gpu) -> None:
    """Each of the four figures has a source, and that of a total is an address, a public log or the rule."""
    assert set(gpu.sources) == {"total", "compute_capability", "context", "workspace"}
    assert re.search(r"https://|public|derived", gpu.sources["total"])
    assert (gpu.evidence == "derived") is (gpu.sources["total"].startswith("derived") or gpu.name == "MI325X")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_card_has_at_most_its_marketed_memory(gpu: Gpu) -> None:
    """Torch's total is at most a tenth below the marketed memory, and the least total is below the total."""
    sold = int(gpu.marketed_memory.rsplit("x ", maxsplit=1)[-1].removesuffix(" GB"))
    assert 0.88 * sold * GIB < gpu.total_bytes <= sold * GIB
    assert gpu.total_bytes * 0.9 < gpu.least_total_bytes < gpu.total_bytes


@pytest.mark.parametrize(("name", "threads"), [("T4", 40 * 1024), ("A10G", 80 * 1536), ("H100-80GB", 132 * 2048)])
def test_a_card_runs_the_threads_of_its_multiprocessors(name: str, threads: int) -> None:
    """As many as each of its multiprocessors runs."""
    gpu = find_gpu(name)
    assert gpu.resident_threads == gpu.profile.resident_threads == threads


def test_the_threads_of_all_cards_of_nvidia_are_known() -> None:
    """Not those of AMD's cards, nor of a card of which only the memory is given."""
    assert {gpu.vendor for gpu in GPUS if gpu.resident_threads is not None} == {"nvidia"}
    assert {gpu.vendor for gpu in GPUS if gpu.resident_threads is None} == {"amd"}
    assert find_gpu("48GiB").resident_threads is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_interval_of_the_context_is_in_order(gpu: Gpu) -> None:
    """Low, expected and high are increasing."""
    assert 0 < gpu.context_bytes.low < gpu.context_bytes.expected < gpu.context_bytes.high


@pytest.mark.parametrize(
    ("capability", "kind", "mebibytes"),
    [
        ((7, 5), "cuda", 8.125),
        ((8, 9), "cuda", 8.125),
        ((9, 0), "cuda", 32),
        ((10, 3), "cuda", 32),
        ((11, 0), "cuda", 8.125),
        ((12, 0), "cuda", 32),
        ((9, 0), "rocm", 32),
        ((9, 4), "rocm", 128),
        ((9, 5), "rocm", 128),
        ((12, 0), "rocm", 32),
    ],
)
def test_the_workspace_of_matrix_products_equals_torchs(
    capability: tuple[int, int], kind: Literal["cuda", "rocm"], mebibytes: float
) -> None:
    """The workspace depends on the compute capability and the build."""
    assert blas_workspace_bytes(capability, kind) == mebibytes * 1024**2


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("a100_80gb", "A100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx3060", "RTX 3060 12GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("L4", "L4"),
        ("L40", "L40"),
        ("l40s", "L40S"),
        ("A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("A10G 24GB", "A10G"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
    ],
)
def test_names_of_schedulers_drivers_and_people_are_understood(name: str, found: str) -> None:
    """A name matches regardless of vendor prefixes, spaces, hyphens and case."""
    assert find_gpu(name).name == found


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("A100", ["A100-40GB", "A100-80GB"]),
        ("nvidia h100", ["H100-80GB", "H100-NVL-94GB"]),
        ("Tesla V100", ["V100-16GB", "V100-32GB"]),
        ("gh200", ["GH200-96GB", "GH200-144GB"]),
    ],
)
def test_an_ambiguous_name_is_refused_with_the_variants(name: str, variants: list[str]) -> None:
    """No variant is chosen for an ambiguous name."""
    with pytest.raises(EstimateError, match="several GPUs") as caught:
        find_gpu(name)
    assert all(variant in str(caught.value) for variant in variants)


def test_a_family_with_one_card_needs_no_memory_size() -> None:
    """`P100` and `RTX PRO 6000` are one card here."""
    assert find_gpu("P100") is BY_NAME["P100-16GB"]
    assert find_gpu("RTX PRO 6000") is BY_NAME["RTX PRO 6000 Blackwell"]


@pytest.mark.parametrize("name", ["H10O-80GB", "RTX 4090 Laptop GPU", "A1000", "Radeon VII", "", "48", "🐸"])
def test_an_unknown_name_is_refused_and_a_memory_size_proposed(name: str) -> None:
    """A name that is not in the table is not guessed: a laptop GPU is not the desktop GPU of that name."""
    with pytest.raises(EstimateError, match="give its memory instead, for example 48GiB"):
        find_gpu(name)


def test_the_error_of_an_unknown_name_has_similar_names() -> None:
    """A misspelt name is refused with the names that are similar."""
    with pytest.raises(EstimateError, match="similar names are H100-80GB"):
        find_gpu("H10-80GB")
    with pytest.raises(EstimateError, match="similar names are H100-80GB, H100-NVL-94GB;"):
        find_gpu("H1OO")


def test_a_long_name_is_shortened_in_the_error() -> None:
    """The error of a very long name stays short."""
    with pytest.raises(EstimateError) as caught:
        find_gpu("x" * 100_000)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(("text", "total"), [("48GiB", 48 * GIB), (" 1.5 TiB ", 1536 * GIB), ("80GB", 80 * 10**9)])
def test_a_memory_size_is_a_generic_card(text: str, total: int) -> None:
    """The card has that memory, or up to a twelfth less, and by assumption compute capability 8.0."""
    gpu = find_gpu(text)
    assert (gpu.name, gpu.total_bytes, gpu.evidence) == (text.strip(), total, "given")
    assert gpu.least_total_bytes == total - total // 12
    assert gpu.profile == KernelProfile(compute_capability=(8, 0), kind="cuda")
    assert "Only the memory of this card is known" in gpu.notes[0]


def test_the_context_of_a_generic_card_has_the_widest_interval() -> None:
    """The interval covers those of all of NVIDIA's cards."""
    unknown = find_gpu("48GiB").context_bytes
    for gpu in GPUS:
        if gpu.vendor == "nvidia":
            assert unknown.low <= gpu.context_bytes.low
            assert unknown.high >= gpu.context_bytes.high


def test_a_card_that_is_not_listed_has_the_context_of_a_generic_one() -> None:
    """The figure is that of the card's own name where it is listed."""
    assert context_bytes_of("NVIDIA T4") == find_gpu("T4").context_bytes
    assert context_bytes_of("NVIDIA Imaginary 9000") == find_gpu("48GiB").context_bytes


@pytest.mark.parametrize("text", ["1MiB", "5TiB", "999999999999999999999GiB", "9" * 400 + "GiB"])
def test_a_memory_size_that_no_card_has_is_refused(text: str) -> None:
    """The message names the limits."""
    with pytest.raises(EstimateError, match="from 256MiB to 4TiB"):
        find_gpu(text)


def test_profiles_are_equal_where_kernels_are() -> None:
    """Profiles are hashable, survive JSON, and distinguish ROCm's 9.0 from Hopper's."""
    assert BY_NAME["RTX A6000"].profile == BY_NAME["A40"].profile != BY_NAME["L4"].profile
    assert len({BY_NAME[name].profile for name in ("H100-80GB", "H200", "GH200-96GB")}) == 1
    assert BY_NAME["MI210"].profile != BY_NAME["H100-80GB"].profile
    assert KernelProfile.model_validate(json.loads(BY_NAME["L4"].profile.model_dump_json())) == BY_NAME["L4"].profile


def test_cards_with_optional_ecc_may_have_a_sixteenth_less() -> None:
    """The RTX 6000 Ada's least total covers a report with ECC: 44.43 GiB instead of 48,622 MiB."""
    ada = BY_NAME["RTX 6000 Ada"]
    assert ada.total_bytes == 48_622 * 1024**2
    assert ada.least_total_bytes <= 44.43 * GIB
    assert any("ECC" in note for note in ada.notes)
