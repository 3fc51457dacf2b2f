"""Tunings of commands on oracles: divisors, the run of the plan, and commands that do not follow it."""

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from batchwright.cli.display import facts_of, recommendation_panel
from batchwright.errors import PlanError, TuningFailedError
from batchwright.planning.accumulation import divisors_up_to, probe_window, repeated_plan
from batchwright.planning.session import TuningSession
from batchwright.planning.tuning_conditions import conditions_of
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import Baseline, ProbeRequest, TuningRequest
from batchwright.schemas.results import (
    CountedRank,
    CountedUpdates,
    Outcome,
    Phase,
    PhaseSeconds,
    ProbeResult,
    SharedImports,
    UpdateTiming,
    WrittenFiles,
)
from tests.support.factories import CPU, plan_of, probe_result

MEBIBYTE = 1024**2
ARGV = ("python", "train.py", "{micro_batch_size}", "{gradient_accumulation_steps}")


def tuning(
    effective_batch_size: int = 200, *, argv: tuple[str, ...] = ARGV, ranks: int = 1, **fields: Any
) -> TuningSession:
    """The tuning of a command that has not begun."""
    model = {"kind": "command", "argv": argv, **fields.pop("model", {})}
    spec = CommandSpec.model_validate({"model": model, "parallelism": {"world_size": ranks}})
    request = TuningRequest(spec=spec, effective_batch_size=effective_batch_size, device="cpu", **fields)
    return TuningSession(request, CPU, environment={}, versions={"torch": "2.13.0", "file train.py": "abc"})


def counted(probe: ProbeRequest, **changes: Any) -> CountedUpdates:
    """The counted updates of a command that follows its arguments."""
    ranks = probe.spec.parallelism.world_size
    is_of_plan = probe.runs_plan or probe.counts_plan
    steps = probe.samples_per_window // probe.micro_batch_size if is_of_plan else len(probe_window(probe))
    samples = probe.micro_batch_size * steps
    fields = {
        "world_size": ranks,
        "ranks": (CountedRank(rank=0, backward_passes=(steps,) * 2, samples={"dimension 0": (samples,) * 2}),),
        "accumulation_steps": steps,
        "of_plan": samples == probe.samples_per_window,
        "as_planned": True,
        "statement": f"{steps} of {probe.micro_batch_size}, as planned",
    }
    return CountedUpdates.model_validate({**fields, **changes})


def answer(probe: ProbeRequest, largest: int, **changes: Any) -> ProbeResult:
    """Run a command of which ``largest`` samples fit."""
    fits = probe.micro_batch_size <= largest
    used = MEBIBYTE * (10 + probe.micro_batch_size)
    return probe_result(
        probe.micro_batch_size,
        Outcome.FIT if fits else Outcome.OOM,
        used if fits else None,
        **{
            "accumulates": probe.accumulates,
            "micro_batch_sizes": probe_window(probe),
            "verifies_plan": probe.runs_plan,
            "measures_time": probe.measures_time,
            "counted": counted(probe) if fits else None,
            **changes,
        },
    )


def finish(course: TuningSession, largest: int, **changes: Any) -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, largest, **changes))
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)


def test_only_divisors_are_searched_and_the_plan_repeats_one() -> None:
    """37 fit, and 25 is the largest divisor of 200 among them."""
    found = finish(tuning(200), largest=37)
    assert {probe.micro_batch_size for probe in found.evidence.probes} <= set(divisors_up_to(200, 200))
    assert (found.evidence.proof.fits, found.evidence.proof.next_size) == (25, 40)
    assert plan_of(found).micro_batch_sizes == ((25,) * 8,)
    assert found.largest_micro_batch_size == 25


def test_any_size_is_searched_on_request() -> None:
    """The largest is 37, and the plan has its largest divisor."""
    found = finish(tuning(200, uniform_only=False), largest=37)
    assert (found.evidence.proof.fits, found.evidence.proof.next_size) == (37, 38)
    assert found.largest_micro_batch_size == 37
    assert plan_of(found).micro_batch_size == 25


def test_the_plan_is_run_as_it_will_be_trained() -> None:
    """The plan is run after the search, with all its micro-batches, where no probe of the search had these."""
    found = finish(tuning(200, uniform_only=False), largest=37)
    last = found.evidence.probes[-1]
    assert (last.verifies_plan, last.micro_batch_size) == (True, 25)
    assert last.counted is not None
    assert last.counted.ranks[0].backward_passes == (8, 8)
    assert found.evidence.plan_proof == "The plan was run as it will be trained: 8 of 25, as planned."


def test_a_search_that_ran_the_plan_already_does_not_run_it_again() -> None:
    """Two micro-batches of 100 are both the probe's and the plan's update."""
    found = finish(tuning(200), largest=100)
    assert not any(probe.verifies_plan for probe in found.evidence.probes)
    assert "2 of 100, as planned" in found.evidence.plan_proof


LIMIT = 47 * MEBIBYTE + MEBIBYTE // 2
"""Memory for 37 samples, and not for 38: the line through two fits shows it."""


def test_the_last_probe_of_a_search_runs_the_plan() -> None:
    """The line through 1 and 20 samples ends below 40, so that 25 is likely the answer."""
    course = tuning(200, memory_limit_bytes=LIMIT, memory_margin=0.0)
    counting = []
    while (probe := course.next_probe()) is not None:
        counting.append((probe.micro_batch_size, probe.counts_plan, probe.runs_plan))
        course.record(answer(probe, 37))
    assert (25, True, False) in counting
    assert not any(runs_plan for _, _, runs_plan in counting)
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert found.evidence.plan_proof == "The plan was run as it will be trained: 8 of 25, as planned."


def test_a_search_does_not_run_a_plan_that_takes_much_longer() -> None:
    """Every plan but the recommended one would be run for nothing."""
    course = tuning(200_000, memory_limit_bytes=LIMIT, memory_margin=0.0)
    while (probe := course.next_probe()) is not None:
        assert probe.runs_plan or not probe.counts_plan
        seconds = PhaseSeconds(build=1.0, measure=0.1 * probe.micro_batch_size, total=5.0)
        course.record(answer(probe, 37, seconds=seconds))
    assert course.probes[-1].verifies_plan


def test_a_plan_that_a_search_ran_without_proof_is_run_again() -> None:
    """The process was forked, and left less room than a fresh one may need."""
    course = tuning(200, memory_limit_bytes=LIMIT, memory_margin=0.0)
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37, **({} if probe.runs_plan else {"counted": counted(probe, of_plan=False)})))
    assert course.probes[-1].verifies_plan


def test_a_plan_that_does_not_fit_is_followed_by_the_next_divisor() -> None:
    """More micro-batches may take more memory in a program that keeps something of each."""
    course = tuning(200, uniform_only=False)
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 20 if probe.runs_plan else 37))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert plan_of(found).micro_batch_size == 20
    assert "ran out of memory" in found.evidence.plan_proof


@pytest.mark.parametrize("in_plan_only", [False, True])
def test_a_command_that_does_not_follow_its_figures_ends_the_tuning(*, in_plan_only: bool) -> None:
    """At the first probe that shows it, with the figures."""
    course, message = tuning(200), "1 backward pass of 25 samples per update: 25; planned: 2 of 25 samples: 50"
    while (probe := course.next_probe()) is not None:
        misleads = probe.counts_plan or not in_plan_only
        changes = {"outcome": Outcome.ERROR, "error_type": "plan-not-followed", "message": message}
        course.record(answer(probe, 37).model_copy(update=changes if misleads else {}))
    assert len(course.probes) == 1 or in_plan_only
    with pytest.raises(TuningFailedError, match="planned: 2 of 25") as caught:
        course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert caught.value.reason == "plan-not-followed"


REPLACED = {"files": WrittenFiles(replaced=("last.pt",), made=("runs/1",), counts={"replaced": 1, "made": 1})}


def test_a_probe_that_replaced_files_of_the_user_ends_the_tuning() -> None:
    """Before the second probe, with the names and the remedies."""
    course = tuning(200)
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37).model_copy(update=REPLACED))
    assert len(course.probes) == 1
    with pytest.raises(
        TuningFailedError, match=r"it replaced or removed last\.pt; made runs/1\. .*--probe-env"
    ) as caught:
        course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert caught.value.reason == "overwrites-files"


def test_a_later_probe_that_replaced_files_leaves_the_plan_that_was_proven() -> None:
    """It ends the search, whose larger sizes were not tried, and the warning has the names."""
    course = tuning(200)
    while (probe := course.next_probe()) is not None:
        result = answer(probe, 37, counted=counted(probe, of_plan=not course.probes))
        course.record(result.model_copy(update=REPLACED if course.probes else {}))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert [probe.files is not None for probe in course.probes].count(True) == 1
    assert found.evidence.proof.stopped_by == "error"
    assert plan_of(found).micro_batch_size == course.probes[-2].micro_batch_size
    assert "replaced or removed last.pt" in next(
        each.message for each in found.warnings if each.code == "files-written"
    )


@pytest.mark.parametrize("batch", [1, 200], ids=["a single probe", "allowed"])
def test_files_that_no_other_probe_replaces_are_a_warning(batch: int) -> None:
    """Where the user has allowed it, or no probe follows."""
    course = tuning(batch, model={"allow_overwriting": batch > 1})
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37).model_copy(update=REPLACED))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    (warning,) = [warning for warning in found.warnings if warning.code == "files-written"]
    assert "they replaced or removed last.pt; made runs/1." in warning.message


def test_ranks_that_do_not_divide_the_batch_are_refused_before_any_probe() -> None:
    """The error names the nearest effective batches that are possible."""
    with pytest.raises(PlanError, match=r"201 cannot be split evenly over 2 ranks.*use 200 or 202"):
        tuning(201, ranks=2)


def test_neither_an_estimate_nor_a_check_of_the_loss_is_requested() -> None:
    """A command has no estimate."""
    course = tuning()
    assert course.expectation_request() is None
    assert course.coupling_request() is None


def test_a_changed_script_has_another_fingerprint() -> None:
    """And the same request, so that it may warm-start the search."""
    one = tuning().conditions
    changed = {**one.versions, "file train.py": "def"}
    other = conditions_of(one.request, one.device, environment={}, versions=changed)
    assert one.fingerprint != other.fingerprint
    assert one.request_fingerprint == other.request_fingerprint


def counted_as(probe: ProbeRequest, passes: int, **samples: int) -> CountedUpdates:
    """Counted updates of which a single probe says nothing: passes, and samples by what counted them."""
    named = {name.replace("_", " "): (count,) * 2 for name, count in samples.items()}
    ranks = (CountedRank(rank=0, backward_passes=(passes,) * 2, samples=named),)
    return counted(probe, ranks=ranks, as_planned=None, statement=f"{passes} passes; not verified")


def drive(course: TuningSession, largest: int, passes: Any, samples: Any) -> Recommendation:
    """Finish a tuning whose passes and samples are functions of the size and the steps of a probe."""
    while (probe := course.next_probe()) is not None:
        size, steps = probe.micro_batch_size, counted(probe).accumulation_steps or 1
        result = answer(probe, largest)
        if result.outcome is Outcome.FIT:
            found = counted_as(probe, passes(steps), **samples(size, steps))
            result = result.model_copy(update={"counted": found})
        course.record(result)
    return course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)


@pytest.mark.parametrize(
    ("passes", "samples", "said"),
    [
        pytest.param(1, lambda b, s: {"dimension_0": 35 * s, "dimension_1": b * s}, "dimension 1", id="time first"),
        pytest.param(2, lambda b, s: {"dimension_0": 2 * b * s}, "2 backward passes per micro-batch", id="a critic"),
    ],
)
def test_what_grows_with_the_size_counts_the_samples(passes: int, samples: Any, said: str) -> None:
    """Over two sizes and two numbers of micro-batches."""
    found = drive(tuning(200), 37, lambda steps: passes * steps, samples)
    assert "as planned" in found.evidence.plan_proof
    assert said in found.evidence.plan_proof
    assert not [warning for warning in found.warnings if warning.code == "samples-not-verified"]
    assert [probe.counted.as_planned for probe in found.evidence.probes if probe.counted and probe.counted.of_plan]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        pytest.param(lambda b, s: {"dimension_0": 7 * b * s}, "counts 7 for each sample", id="seven views"),
        pytest.param(lambda _, s: {"dimension_0": s}, "nothing that was counted grows", id="packed"),
        pytest.param(lambda _b, _s: {}, "nothing that was counted grows", id="no tensors"),
    ],
)
def test_what_nothing_counts_is_a_plan_with_a_warning(samples: Any, said: str) -> None:
    """The program is not refused."""
    found = drive(tuning(200), 37, lambda steps: steps, samples)
    assert plan_of(found).micro_batch_size == 25
    message = next(warning.message for warning in found.warnings if warning.code == "samples-not-verified")
    assert said in message


def test_passes_that_do_not_follow_the_accumulation_are_refused() -> None:
    """Four passes with 2 micro-batches may be a program of two losses, and with 8 they are an ignored argument."""
    with pytest.raises(TuningFailedError, match="it also made 8 backward passes with ") as caught:
        drive(tuning(200), 37, lambda _: 8, lambda b, _: {"dimension_0": 8 * b})
    assert caught.value.reason == "plan-not-followed"


def test_a_smaller_update_at_the_end_of_an_epoch_refutes_nothing() -> None:
    """Only whole updates are compared over the sizes."""
    course = tuning(200)
    while (probe := course.next_probe()) is not None:
        size, steps = probe.micro_batch_size, counted(probe).accumulation_steps or 1
        samples = {"dimension 0": (35 * steps,) * 2, "dimension 1": (size * steps, max(1, size * steps // 3))}
        rank = CountedRank(rank=0, backward_passes=(steps,) * 2, samples=samples, epoch_ends=(1,))
        open_ = counted(probe, ranks=(rank,), as_planned=None, statement="open; not verified")
        course.record(answer(probe, 37, counted=open_))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert "as planned (dimension 1" in found.evidence.plan_proof


def test_a_count_that_other_sizes_confirm_refutes_a_fit() -> None:
    """The first dimension has the samples of every size but that of the plan."""
    with pytest.raises(TuningFailedError, match="dimension 0 of the model's input counts 25 samples, but 200 were"):
        drive(
            tuning(200, uniform_only=False),
            37,
            lambda steps: steps,
            lambda b, s: {"dimension_0": 25 if b == 25 else b * s},
        )


@pytest.mark.parametrize(
    ("phase", "remedy"), [(Phase.BUILD, "imports after torch"), (Phase.WARMUP, "shorter samples, activation checkp")]
)
def test_what_can_make_it_fit_depends_on_where_memory_ran_out(phase: Phase, remedy: str) -> None:
    """Before the first forward pass no sample is to blame."""
    found = finish(tuning(200, granularity=8), 0, phase=phase)
    assert remedy in (found.infeasible_reason or "")
    assert ("a granularity of 1" in (found.infeasible_reason or "")) is (phase is Phase.WARMUP)


def test_a_program_that_refuses_small_updates_is_probed_with_whole_ones() -> None:
    """As trainers of diffusion models do that want 16 samples in an update: two micro-batches of 1 or 2 are too few."""
    course = tuning(200)
    while (probe := course.next_probe()) is not None:
        size = probe.micro_batch_size
        updates = probe.samples_per_window if probe.counts_plan or probe.runs_plan else sum(probe_window(probe))
        if updates < 16:
            course.record(probe_result(size, Outcome.ERROR, accumulates=True, phase=Phase.BUILD, message="16 at least"))
        else:
            course.record(answer(probe, 37))
        assert size == 1 or updates >= 16
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert plan_of(found).micro_batch_size == 25


def of_size_only(probe: ProbeRequest, passes: int) -> CountedUpdates:
    """The counted updates of a command that takes no accumulation, and has time first."""
    samples = {"dimension 0": (64,) * 2, "dimension 1": (passes * probe.micro_batch_size,) * 2}
    ranks = (CountedRank(rank=0, backward_passes=(passes,) * 2, samples=samples),)
    return counted(probe, ranks=ranks, accumulation_steps=None, as_planned=None, statement=f"{passes} passes; sizes")


def test_a_command_that_derives_its_accumulation_is_taken_at_its_own_updates() -> None:
    """It divides a total of 200 by its size."""
    course = tuning(argv=ARGV[:3])
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37, counted=of_size_only(probe, 200 // probe.micro_batch_size)))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert plan_of(found).micro_batch_sizes == ((25,) * 8,)
    assert "8 micro-batches of 25 samples per update: 200, as planned (dimension 1 of" in found.evidence.plan_proof
    assert [plan.gradient_accumulation_steps for plan in found.alternatives] == [8]


def test_two_backward_passes_for_each_micro_batch_are_no_accumulation() -> None:
    """A critic takes real and made samples apart. The data loader says how many are of the batch.

    Its generator has a noise of as many, of which nothing is counted.
    """
    course = tuning(argv=ARGV[:3])
    while (probe := course.next_probe()) is not None:
        size = probe.micro_batch_size
        critic = CountedRank(rank=0, backward_passes=(2, 2), samples={"loader 1": (size,) * 2, "dimension 0": (9, 9)})
        generator = CountedRank(rank=0, optimizer="Adam 2", backward_passes=(1, 1))
        ranks = (critic, generator)
        open_ = counted(probe, ranks=ranks, accumulation_steps=None, as_planned=None, statement="2 passes; sizes")
        course.record(answer(probe, 400, counted=open_))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert plan_of(found).micro_batch_sizes == ((200,),)
    assert "1 micro-batch of 200 samples per update: 200, as planned" in found.evidence.plan_proof


@pytest.mark.parametrize(
    ("passes", "remedy"),
    [
        pytest.param(lambda _: 1, "--effective-batch-size 25 or less", id="one micro-batch"),
        pytest.param(lambda size: 400 // size, "--effective-batch-size 400", id="another total"),
    ],
)
def test_a_command_with_other_updates_gets_no_plan(passes: Any, remedy: str) -> None:
    """What fits was proven all the same. The reason names what the command does, and the panel says so once."""
    course = tuning(argv=ARGV[:3])
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37, counted=of_size_only(probe, passes(probe.micro_batch_size))))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert (found.plan, found.largest_micro_batch_size) == (None, 25)
    assert remedy in (found.infeasible_reason or "")
    assert [value for _, value in facts_of(found)].count(found.infeasible_reason or "") == 1


def warnings_of(found: Recommendation) -> dict[str, str]:
    """The messages of the warnings by their codes."""
    return {warning.code: warning.message for warning in found.warnings}


@pytest.mark.parametrize(("largest", "warns"), [(37, True), (400, False)])
def test_a_batch_norm_is_a_warning_where_updates_have_several_micro_batches(largest: int, *, warns: bool) -> None:
    """The statistics are those of a micro-batch. The evidence says that nothing else was compared."""
    course = tuning()
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, largest, counted=counted(probe, batch_norms=True)))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert ("batch-coupled-modules" in warnings_of(found)) is warns
    assert found.evidence.coupling is not None
    assert found.evidence.coupling.verdict == "not-compared"


@pytest.mark.parametrize(
    ("batch", "fields", "near"),
    [
        (97, {}, "1 is the largest that fits. Effective batches nearby divide better: 96 = 3 x 32 and 99 = 3 x 33"),
        (194, {"ranks": 2}, "192 = 2 ranks x 3 x 32 and 198 = 2 ranks x 3 x 33, expected to fit, with 3 instead of"),
        (97, {"uniform_only": False}, "99 = 3 x 33, known to fit, with 3 instead of 97 backward passes per update"),
        (97, {"granularity": 4}, "better: 96 = 3 x 32, expected to fit"),
    ],
)
def test_a_batch_with_few_divisors_names_better_ones(batch: int, fields: dict[str, Any], near: str) -> None:
    """37 samples fit, and the only divisors are 1 and 97. One size gives what a sample takes at most."""
    limit: dict[str, Any] = {"memory_limit_bytes": LIMIT, "memory_margin": 0.0}
    course = tuning(batch, **fields, **limit)
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37, resident_bytes=10 * MEBIBYTE))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert near in warnings_of(found)["few-divisors"]


@pytest.mark.parametrize(("batch", "fields"), [(200, {}), (96, {}), (37, {}), (97, {"objective": "fastest"})])
def test_a_batch_with_divisors_enough_names_no_other(batch: int, fields: dict[str, Any]) -> None:
    """A plan of half of what fits is good enough."""
    assert "few-divisors" not in warnings_of(finish(tuning(batch, **fields), largest=37))


def test_sizes_that_vary_are_a_warning() -> None:
    """The first updates rarely have the largest sample, of tokens or of pixels."""
    course = tuning()
    while (probe := course.next_probe()) is not None:
        varying = counted(probe, shapes={"Net.0": ((1, 25), (3, 3), (32, 64), (32, 64))})
        course.record(answer(probe, 37, counted=varying))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    message = next(warning.message for warning in found.warnings if warning.code == "sizes-vary")
    assert "Net.0 from 1 x 3 x 32 x 32 to 25 x 3 x 64 x 64 in 2 updates with 16 backward passes in all" in message


def test_what_the_updates_did_not_show_is_a_warning() -> None:
    """Such as an optimizer that did not step."""
    course = tuning()
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 37, counted=counted(probe, unseen={"optimizer-did-not-step": "Adam."})))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert "Adam." in [warning.message for warning in found.warnings if warning.code == "optimizer-did-not-step"]


def test_the_fastest_plan_is_timed_among_divisors() -> None:
    """And run as it will be trained."""
    course = tuning(200, objective="fastest")
    while (probe := course.next_probe()) is not None:
        sizes = probe_window(probe)
        timing = UpdateTiming(
            updates=5, micro_batch_sizes=sizes, update_seconds=1.0 * len(sizes), micro_batch_seconds=1.0
        )
        course.record(answer(probe, 37, timing=timing))
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    timed = {probe.micro_batch_size for probe in found.evidence.probes if probe.measures_time}
    assert timed
    assert timed <= set(divisors_up_to(200, 37))
    assert 200 % plan_of(found).micro_batch_size == 0


def test_an_oom_is_avoided_where_every_probe_loads_for_minutes() -> None:
    """The sizes are the same, and their order is more cautious."""

    def ooms(start: float) -> int:
        found = [
            finish(tuning(510, uniform_only=False), n, seconds=PhaseSeconds(start=start)) for n in range(20, 400, 9)
        ]
        return sum(each.timings.out_of_memory_probes for each in found)

    assert ooms(90.0) < ooms(0.0)


def test_a_plan_repeats_only_what_divides_a_share() -> None:
    """On every rank."""
    assert repeated_plan(200, 2, 25).micro_batch_sizes == ((25,) * 4,) * 2
    with pytest.raises(PlanError, match="do not divide the 100 samples"):
        repeated_plan(200, 2, 30)


def test_a_stored_recommendation_is_confirmed_by_a_run_of_its_plan() -> None:
    """One probe confirms the size and proves the plan."""
    limit: dict[str, Any] = {"memory_limit_bytes": LIMIT, "memory_margin": 0.0}
    stored = finish(tuning(200, **limit), largest=37)
    course = tuning(200, **limit)
    course.warm_start_from(stored)
    found = finish(course, largest=37)
    assert [(probe.micro_batch_size, probe.verifies_plan) for probe in found.evidence.probes] == [(25, False)]
    assert plan_of(found).micro_batch_sizes == ((25,) * 8,)
    assert "8 of 25, as planned" in found.evidence.plan_proof


def test_a_resumed_tuning_knows_the_files_of_its_earlier_probes() -> None:
    """They did not exist before the tuning, so that writing them again ends nothing; a file of the user does."""
    made = WrittenFiles(made=("out/args.txt",), counts={"made": 1})
    again = WrittenFiles(replaced=("out/args.txt",), counts={"replaced": 2})  # by two ranks
    course = tuning(200)
    for files in (made, again):
        probe = course.next_probe() or pytest.fail("no probe")
        course.record(answer(probe, 37, files=files))
    assert course.next_probe() is not None
    assert course.probes[-1].files == WrittenFiles(remade=("out/args.txt",), counts={"remade": 1})
    course.record(answer(course.next_probe() or probe, 37, **REPLACED))
    assert course.next_probe() is None


def test_a_tuning_that_is_stopped_keeps_the_plan_that_was_proven() -> None:
    """The largest whose plan ran, although a larger size fits; none where no plan ran."""
    course = tuning(200)
    while (probe := course.next_probe()) is not None and probe.micro_batch_size < 40:
        is_proven = probe.micro_batch_size <= 20
        course.record(answer(probe, 200, counted=counted(probe, of_plan=is_proven)))
    proven = [probe.micro_batch_size for probe in course.probes if probe.counted and probe.counted.of_plan]
    assert course.stop()
    assert course.next_probe() is None
    found = course.recommendation(identifier="r", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    assert plan_of(found).micro_batch_size == max(proven)
    assert (found.evidence.proof.stopped_by, found.evidence.proof.is_conclusive) == ("interrupted", False)
    fresh = tuning(200)
    assert not fresh.stop()


@pytest.mark.parametrize(
    ("of_probe", "line"),
    [
        (
            (True, SharedImports(statements=3, torch=True, place="train.py:5", reason="`size = 4`")),
            "3 import statements ran once for {probes} probes, up to train.py:5 (`size = 4`)",
        ),
        (
            (True, SharedImports(statements=1, place="train.py:2", reason="`model` is a module of the program's own")),
            "up to train.py:2 (`model` is a module of the program's own); torch is not among them",
        ),
        (
            (False, SharedImports(reason="an import started a thread")),
            "{probes} probes imported everything anew: an import started a thread",
        ),
    ],
)
def test_the_command_line_tells_the_shared_imports(of_probe: tuple[bool, SharedImports], line: str) -> None:
    """And why they ended, or why there are none."""
    forked, shared = of_probe
    found = finish(tuning(200), largest=37, forked=forked, shared_imports=shared)
    console = Console(width=400)
    with console.capture() as captured:
        console.print(recommendation_panel(found))
    assert line.format(probes=len(found.evidence.probes)) in captured.get()


def test_a_baseline_off_the_grid_of_a_command_is_probed() -> None:
    """4 is no multiple of 8, so the search has no such size; its probe runs after the search, and shows the gain."""
    course = tuning(64, granularity=8, baseline=Baseline(micro_batch_size=4))
    found = finish(course, largest=37)
    assert [probe.micro_batch_size for probe in found.evidence.probes].count(4) == 1
    assert found.gain is not None
    assert found.gain.baseline_fits


def test_a_warm_started_search_knows_that_a_command_may_refuse_one_sample() -> None:
    """An error before the first update at a size of one leaves the larger sizes to try, as without a warm start."""
    limit: dict[str, Any] = {"memory_limit_bytes": LIMIT, "memory_margin": 0.0}
    stored = finish(tuning(200, **limit), largest=37)
    course = tuning(200, **limit | {"memory_limit_bytes": 2 * LIMIT})
    course.warm_start_from(stored)
    course.record(probe_result(1, Outcome.ERROR).model_copy(update={"phase": Phase.BUILD}))
    assert course.next_probe() is not None


def test_a_quick_tuning_of_a_command_is_refused() -> None:
    """Nothing of a command is estimated, so that no plan is sure before a run."""
    with pytest.raises(ValueError, match="`quick` is not possible for a command"):
        tuning(quick=True)
