"""What can be known of a card without one: PyTorch's flags, and what it would choose."""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mucudnn.backends import backend_for, backend_name, backend_of
from mucudnn.backends.base import Queue
from mucudnn.backends.cudnn import card as card_module
from mucudnn.backends.cudnn import compiler, nvml
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.card import TorchCard, pytorchs_choice
from mucudnn.backends.cudnn.environment import obstacle_to_products, present_policy, present_rules
from mucudnn.errors import BackendError, BackendWarning, UnmeasuredError
from mucudnn.execution.workspace import workspace_of
from mucudnn.problem import ConvOp
from tests.cudnn.absent import Absent
from tests.cudnn.ledgers import Blind, Ledger, Prepared, Work
from tests.forks import in_a_child
from tests.operands import a_convolution

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def flags_as_before() -> object:
    cudnn, conv = torch.backends.cudnn, torch.backends.cudnn.conv
    before = cudnn.deterministic, conv.fp32_precision
    yield
    cudnn.deterministic, conv.fp32_precision = before


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("ieee", False), ("none", False)])
def test_tf32_is_allowed_as_the_convolutions_own_flag_says(precision: str, allowed: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = precision

    assert present_rules().allow_tf32 is allowed


def test_determinism_is_asked_for_by_either_flag() -> None:
    assert not present_rules().deterministic

    torch.backends.cudnn.deterministic = True
    by_cudnn = present_rules().deterministic
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(mode=True)
    by_torch = present_rules().deterministic
    torch.use_deterministic_algorithms(mode=False)

    assert by_cudnn
    assert by_torch


@pytest.fixture
def products() -> Iterator[None]:
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    yield
    flags.fp32_precision = before
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("products")
def test_matrices_of_float32_are_multiplied_where_they_are_not_rounded_to_tf32() -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    strict = obstacle_to_products("float32")
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    assert strict is None
    assert "torch.set_float32_matmul_precision" in obstacle_to_products("float32").reason
    assert obstacle_to_products("float64") is None


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("config", "expected"), [(None, False), (":4096:2:16:8", False), (":4096:8", True), (":16:8", True)]
)
def test_matrices_are_multiplied_where_pytorch_does_not_refuse_to(
    monkeypatch: pytest.MonkeyPatch, config: str | None, expected: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    torch.use_deterministic_algorithms(mode=True)
    strict = obstacle_to_products("float64")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)

    assert (strict is None) is expected
    assert obstacle_to_products("float64") is None


def test_a_card_without_cupy_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "version", lambda: None)

    assert not Absent().can_compile


def test_cupy_is_tried_once_and_what_is_wrong_with_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fail(source: str, kernel: str) -> None:
        tried.append(kernel)
        raise BackendError("CuPy 14.0 could not compile a kernel: libnvrtc is missing.")

    monkeypatch.setattr(compiler, "version", lambda: "14.0")
    monkeypatch.setattr(compiler, "compiled", fail)
    card = Absent()

    with pytest.warns(BackendWarning, match="Winograd and FFT .* libnvrtc is missing"):
        assert not card.can_compile
    assert not card.can_compile
    assert tried == ["nothing"]


def test_an_allocator_without_a_cache_is_another_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    before = present_policy()
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

    assert present_policy() == before | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def weighed(card: TorchCard, ledger: Ledger) -> int | None:
    card._allocator = ledger  # type: ignore[assignment]  # a double
    return card.weigh(Prepared("", {}, Work(ledger, [500, 500])), 10_000)


def test_a_card_weighs_nothing_by_an_allocator_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    card = Absent()

    for _ in range(2):
        with pytest.raises(UnmeasuredError, match="PyTorch's allocator must count"):
            weighed(card, Blind())
    assert weighed(card, Ledger()) == 500


def test_whether_the_allocator_counts_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    pieces: list[int] = []

    class Noting(Ledger):
        def piece(self, n_bytes: int) -> object:
            pieces.append(n_bytes)
            return super().piece(n_bytes)

    card, ledger = Absent(), Noting()

    assert [weighed(card, ledger) for _ in range(2)] == [500, 500]
    assert pieces == [2**24]


class Machine:
    """Two cards, as PyTorch tells of them.

    Attributes:
        present: the current one of this thread.
        made: what was made the current one, in turn.
        capturing: those whose streams are being captured.
    """

    def __init__(self) -> None:
        self.present = 0
        self.made: list[int] = []
        self.capturing: set[int] = set()

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.made.append(index)
        before, self.present = self.present, index
        yield
        self.present = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    two = Machine()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)  # which a CPU build lacks
    monkeypatch.setattr(torch.cuda, "current_device", lambda: two.present)
    monkeypatch.setattr(torch.cuda, "device", two.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: two.present in two.capturing)
    return two


@pytest.mark.parametrize(("present", "made"), [(1, []), (0, [1])])
def test_a_card_is_made_the_current_one_where_it_is_not(
    present: int, made: list[int], machine: Machine
) -> None:
    machine.present = present
    card = TorchCard(1)

    for _ in range(2):
        with card.current():
            pass

    assert machine.made == made * 2


def test_a_fork_while_another_thread_makes_a_queue_leaves_its_child_free_to_make_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_making, may_end, parent = threading.Event(), threading.Event(), os.getpid()

    def made() -> Queue:
        if os.getpid() == parent:
            is_making.set()
            may_end.wait()
        return Queue()

    monkeypatch.setattr(card_module, "Queue", made)
    monkeypatch.setattr(TorchCard, "stream", lambda _: 7)
    card = TorchCard(0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(card.queue)
        is_making.wait()
        try:
            found = in_a_child(lambda: isinstance(card.queue(), Queue))
        finally:
            may_end.set()

    assert found


@pytest.mark.parametrize("present", [0, 1])
def test_a_card_tells_whether_its_own_stream_is_captured_whichever_is_current(
    present: int, machine: Machine
) -> None:
    machine.present, machine.capturing = present, {1}

    assert [TorchCard(index).is_capturing for index in (0, 1)] == [False, True]


@pytest.mark.parametrize("present", [0, 1])
def test_what_is_captured_on_a_card_has_a_buffer_of_graphs_whichever_is_current(
    present: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchCard, "stream", lambda _: 7)
    cards = [TorchCard(index) for index in (0, 1)]
    for card in cards:
        card.device = torch.device("cpu")
    backends = [CudnnBackend(card, None) for card in cards]
    machine.present = present
    eager = [workspace_of(each) for each in backends]

    machine.capturing = {1}

    assert workspace_of(backends[0]) is eager[0]
    assert workspace_of(backends[1]) is not eager[1]


def test_pytorch_runs_a_depthwise_convolution_by_a_kernel_of_its_own() -> None:
    problem = a_convolution(in_channels=8, out_channels=8, groups=8)

    assert pytorchs_choice(problem, CUDA) == "CudaDepthwise2d"


@pytest.mark.parametrize("op", ConvOp)
def test_of_a_depthwise_transposed_convolution_pytorch_runs_cudnn(op: ConvOp) -> None:
    problem = a_convolution(op=op, in_channels=8, out_channels=8, groups=8, stride=(2, 2), is_apart=True)

    assert pytorchs_choice(problem, CUDA) in ("CudnnTranspose", "SlowTranspose2d")  # where it has no cuDNN


def test_what_pytorch_would_choose_costs_no_memory() -> None:
    problem = a_convolution(batch=2**20, in_channels=2**10, out_channels=2**10, input_size=(224, 224))

    assert pytorchs_choice(problem, CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_the_backend_says_so() -> None:
    with pytest.raises(BackendError, match=r"'cudnn' needs .* an NVIDIA GPU, but torch sees none"):
        backend_of("cudnn:aten")
    with pytest.raises(BackendError, match=r"'cudnn' needs .* an NVIDIA GPU, but torch sees none"):
        backend_for("auto", CUDA)
    with pytest.raises(BackendError, match=r"'cudnn' needs .* an NVIDIA GPU, but torch sees none"):
        backend_for("auto", torch.device("cuda", 1))


def test_a_device_of_a_kind_that_nothing_serves_is_named() -> None:
    assert backend_name(torch.device("meta")) is None
    with pytest.raises(BackendError, match="can be tuned on cpu, cuda, but the model lies on meta"):
        backend_for("auto", torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_nothing_is_known_of_it() -> None:
    assert nvml.driver_version() == "unknown"
