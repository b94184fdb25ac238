"""How much memory jobs take, as a child process sees it. The jobs are functions of this module."""

import ctypes
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mucudnn.backends.base import Job
from mucudnn.backends.cpu.footprint import FootprintMeter
from mucudnn.backends.cpu.footprint_child import ALLOWANCE_BYTES, NOISE_BYTES
from mucudnn.backends.own import own_job
from mucudnn.errors import BackendError, CompilationError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.threads import threads
from tests.work import Work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps and tells memory")

MIB = 2**20


def torch_scratch(payload: Mapping[str, int]) -> Work:
    def work() -> torch.Tensor:
        scratch = torch.ones(payload["scratch"], dtype=torch.uint8)
        return scratch[: payload["result"]].clone()

    return Work(work, payload["result"])


def small_blocks(payload: Mapping[str, int]) -> Work:
    def work() -> None:
        _ = [torch.ones(payload["bytes"], dtype=torch.uint8) for _ in range(256)]

    return Work(work)


def numpy_scratch(payload: Mapping[str, int]) -> Work:
    def work() -> None:
        np.ones(payload["scratch"], dtype=np.uint8)

    return Work(work)


def kept_scratch(payload: Mapping[str, int]) -> Work:
    arenas: list[torch.Tensor] = []

    def work() -> None:
        if not arenas:
            arenas.append(torch.ones(payload["scratch"], dtype=torch.uint8))

    return Work(work)


def matrix_product(payload: Mapping[str, int]) -> Work:
    n = payload["n"]
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    return Work(lambda: torch.mm(a, b, out=out))


def death(payload: Mapping[str, int]) -> Work:
    return Work(lambda: os.kill(os.getpid(), payload["signal"]))


def crash_when_full(payload: Mapping[str, int]) -> Work:
    """Do as a library does that does not check what it allocates."""

    def work() -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        ctypes.memset(libc.malloc(ctypes.c_size_t(payload["scratch"])), 1, payload["scratch"])

    return Work(work)


def uncompiled(payload: Mapping[str, int]) -> Work:
    raise CompilationError("no space left on device")


def onednn_failure(payload: Mapping[str, int]) -> Work:
    """Fail in the run of that number, and in all that follow."""
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        if len(runs) >= payload["run"]:
            raise RuntimeError("could not execute a primitive")

    return Work(work)


def refusal(payload: Mapping[str, int]) -> Work:
    raise ValueError("this cannot be prepared")


def fault(payload: Mapping[str, int]) -> Work:
    return Work(lambda: payload["missing"])


def chatter(payload: Mapping[str, int]) -> Work:
    os.write(1, b"a library says what it likes\n")
    return torch_scratch({"scratch": MIB, "result": 0})


def confession(payload: Mapping[str, int]) -> Work:
    """Tell the child's state in the one way in which a job can tell anything."""
    state = f"pid {os.getpid()}, threads {torch.get_num_threads()}, oneDNN {torch.backends.mkldnn.enabled}"
    raise ValueError(f"{state}, deterministic {torch.are_deterministic_algorithms_enabled()}")


def large_import(payload: Mapping[str, int]) -> Work:
    """Tell, as `confession` does, how many objects a collection during the run visits."""
    import sympy  # noqa: F401  # of which torch is made, and which has many objects

    def work() -> None:
        raise ValueError(f"objects {len(gc.get_objects())}")

    return Work(work)


def _job(function: Callable[[Mapping[str, int]], Work], **payload: int) -> Job:
    return Job(f"{__name__}:{function.__name__}", payload)


def _confession(meter: FootprintMeter) -> str:
    with pytest.raises(BackendError, match="pid") as caught:
        meter.measure(_job(confession), None)
    return str(caught.value)


def _pid(meter: FootprintMeter) -> int:
    return int(_confession(meter).partition("pid ")[2].partition(",")[0])


@pytest.fixture(scope="module")
def meter() -> Iterator[FootprintMeter]:
    with FootprintMeter() as meter:
        yield meter


def _problem(layout: Layout = Layout.CONTIGUOUS) -> ConvProblem:
    return ConvProblem(
        ConvOp.FPROP,
        16,
        64,
        64,
        (112, 112),
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        layout=layout,
        filter_layout=layout,
    )


@pytest.mark.parametrize("function", [torch_scratch, numpy_scratch])
@pytest.mark.parametrize("scratch", [MIB // 2, 3 * MIB, 64 * MIB])
def test_a_known_amount_is_seen(
    meter: FootprintMeter, function: Callable[[Mapping[str, int]], Work], scratch: int
) -> None:
    seen = meter.measure(_job(function, scratch=scratch, result=0), None).n_bytes

    assert seen == pytest.approx(scratch, abs=NOISE_BYTES)


def test_the_same_amount_is_seen_each_time(meter: FootprintMeter) -> None:
    seen = {meter.measure(_job(torch_scratch, scratch=5 * MIB, result=MIB), None).n_bytes for _ in range(5)}

    assert max(seen) - min(seen) <= NOISE_BYTES  # type: ignore[type-var,operator]


def test_what_does_nothing_takes_nothing(meter: FootprintMeter) -> None:
    assert meter.measure(_job(torch_scratch, scratch=0, result=0), 0).n_bytes == 0


def test_the_result_does_not_count(meter: FootprintMeter) -> None:
    seen = meter.measure(_job(torch_scratch, scratch=8 * MIB, result=6 * MIB), None).n_bytes

    assert seen == pytest.approx(8 * MIB, abs=NOISE_BYTES)


def test_many_blocks_of_a_few_pages_are_seen_again_after_they_were_freed(meter: FootprintMeter) -> None:
    seen = [meter.measure(_job(small_blocks, bytes=10_000), None).n_bytes for _ in range(3)]

    assert seen == pytest.approx([3 * MIB] * 3, rel=0.1)


def test_what_a_run_keeps_for_the_next_counts(meter: FootprintMeter) -> None:
    seen = meter.measure(_job(kept_scratch, scratch=8 * MIB), None).n_bytes

    assert seen == pytest.approx(8 * MIB, abs=NOISE_BYTES)


def test_the_pool_of_matrix_products_does_not_count(meter: FootprintMeter) -> None:
    seen = [meter.measure(_job(matrix_product, n=n), 0).n_bytes for n in (65, 700, 1500)]

    assert seen == pytest.approx([0, 0, 0], abs=MIB // 2)


def test_a_job_at_its_limit_runs(meter: FootprintMeter) -> None:
    seen = meter.measure(_job(torch_scratch, scratch=32 * MIB, result=MIB), 32 * MIB).n_bytes

    assert seen == pytest.approx(32 * MIB, abs=NOISE_BYTES)


@pytest.mark.parametrize("limit_bytes", [2**62, 2**63, 2**70])
def test_a_limit_beyond_all_memory_holds_nothing_back(meter: FootprintMeter, limit_bytes: int) -> None:
    seen = meter.measure(_job(torch_scratch, scratch=32 * MIB, result=MIB), limit_bytes).n_bytes

    assert seen == pytest.approx(32 * MIB, abs=NOISE_BYTES)


def test_a_job_over_its_limit_is_told_and_the_next_one_is_weighed(meter: FootprintMeter) -> None:
    pid = _pid(meter)
    footprint = meter.measure(
        _job(torch_scratch, scratch=32 * MIB, result=0), 32 * MIB - ALLOWANCE_BYTES - MIB
    )
    after = meter.measure(_job(torch_scratch, scratch=32 * MIB, result=0), None)

    assert footprint.n_bytes is None
    assert after.n_bytes == pytest.approx(32 * MIB, abs=NOISE_BYTES)
    assert _pid(meter) == pid


@pytest.mark.parametrize("run", [1, 2])
def test_a_child_whose_libraries_have_failed_weighs_nothing_more(meter: FootprintMeter, run: int) -> None:
    pid = _pid(meter)
    footprint = meter.measure(_job(onednn_failure, run=run), MIB)

    assert footprint.n_bytes is None
    assert _pid(meter) != pid


@pytest.mark.usefixtures("one_thread")
def test_a_convolution_over_the_limit_spoils_no_other(meter: FootprintMeter) -> None:
    large = dataclasses.replace(
        _problem(), batch=1, input_size=(56, 56), kernel_size=(15, 15), padding=(7, 7)
    )

    assert meter.measure(own_job(large.with_op(ConvOp.WGRAD)), 16 * MIB).n_bytes is None
    assert meter.measure(own_job(large), 2**40).n_bytes is not None


def test_a_library_that_crashes_for_want_of_memory_is_over_the_limit(meter: FootprintMeter) -> None:
    assert meter.measure(_job(crash_when_full, scratch=32 * MIB), MIB).n_bytes is None


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (_job(refusal), "refusal could not be weighed: ValueError: this cannot be prepared"),
        (_job(fault), "fault could not be weighed: KeyError: 'missing'"),
        (Job("mucudnn.nowhere:prepare", {}), "could not be weighed: ModuleNotFoundError"),
        (Job("mucudnn.problem:prepare", {}), "could not be weighed: AttributeError"),
    ],
)
def test_a_job_that_fails_for_another_reason_than_memory_is_an_error(
    meter: FootprintMeter, job: Job, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        meter.measure(job, MIB)


def test_a_job_whose_code_cannot_be_compiled_now_says_so(meter: FootprintMeter) -> None:
    with pytest.raises(
        CompilationError, match="uncompiled could not be weighed: CompilationError: no space left"
    ):
        meter.measure(_job(uncompiled), MIB)


def test_what_libraries_print_disturbs_nothing(meter: FootprintMeter) -> None:
    assert meter.measure(_job(chatter), None).n_bytes == pytest.approx(MIB, abs=NOISE_BYTES)


def test_the_child_computes_as_this_process_does(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with threads(3):
        torch.use_deterministic_algorithms(True)  # noqa: FBT003  # torch's own signature
        try:
            changed = _confession(meter)
        finally:
            torch.use_deterministic_algorithms(False)  # noqa: FBT003
    monkeypatch.undo()

    assert "threads 3, oneDNN False, deterministic True" in changed
    assert f"threads {before}, oneDNN True, deterministic False" in _confession(meter)


def test_collections_do_not_visit_what_jobs_import(meter: FootprintMeter) -> None:
    """With a million objects of an import each weighing took seconds."""
    with pytest.raises(BackendError, match="objects") as caught:
        meter.measure(_job(large_import), None)

    assert int(str(caught.value).partition("objects ")[2].rstrip(".")) < 1000


def test_threads_may_share_a_meter(meter: FootprintMeter) -> None:
    amounts = [MIB * n for n in (1, 2, 3, 4, 5, 6)]
    with ThreadPoolExecutor(3) as pool:
        seen = list(
            pool.map(lambda n: meter.measure(_job(torch_scratch, scratch=n, result=0), None).n_bytes, amounts)
        )

    assert seen == pytest.approx(amounts, abs=NOISE_BYTES)


def test_pytorch_hides_copies_in_a_channels_first_convolution(meter: FootprintMeter) -> None:
    seen = meter.measure(own_job(_problem()), None).n_bytes

    assert seen is not None
    assert seen > 20 * MIB


def test_pytorch_hides_little_in_a_channels_last_convolution(meter: FootprintMeter) -> None:
    seen = meter.measure(own_job(_problem(Layout.CHANNELS_LAST)), None).n_bytes

    assert seen is not None
    assert seen < 4 * MIB


def test_a_transposed_convolution_is_weighed_as_it_runs(meter: FootprintMeter) -> None:
    """In float64 PyTorch gathers what all taps meet: of all samples at once, where a gradient has one's."""
    problem = ConvProblem(ConvOp.DGRAD, 16, 32, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1), dtype="float64")
    gathered = 9 * 32 * 32 * 32 * 8  # of a sample, in bytes

    as_gradient, as_it_runs = (
        meter.measure(own_job(dataclasses.replace(problem, is_apart=each)), None).n_bytes
        for each in (False, True)
    )

    assert as_gradient is not None
    assert as_it_runs is not None
    assert as_gradient < 4 * gathered < 16 * gathered <= as_it_runs + NOISE_BYTES


def test_a_convolution_over_the_limit_does_not_run(meter: FootprintMeter) -> None:
    assert meter.measure(own_job(_problem()), MIB).n_bytes is None


def test_a_crash_without_a_limit_is_an_error(meter: FootprintMeter) -> None:
    with pytest.raises(BackendError, match="its process died: SIGABRT"):
        meter.measure(_job(death, signal=signal.SIGABRT), None)
