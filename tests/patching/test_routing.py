"""What runs a call: what is remembered of it, and when it is asked again."""

import pytest
import torch

from mucudnn.backends import Backend
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.convolutions.calls import ConvArguments
from mucudnn.convolutions.modules import Call
from mucudnn.division import Division
from mucudnn.errors import UntunedWarning
from mucudnn.functional import DividedConvolution
from mucudnn.patching.routing import Decide, NotNowError, Router
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.tuning.learning import Learner
from mucudnn.tuning.options import Settings
from tests.examples import a_problem

ARGUMENTS = ConvArguments.of(2, 1, 0, 1, 1)


def a_call() -> Call:
    return Call(torch.zeros(2, 3, 5, 5), torch.zeros(4, 3, 3, 3), None, ARGUMENTS)


class Asked:
    """Decides that PyTorch's own serves a call, from the second time that it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, backend: Backend, problem: ConvProblem) -> DividedConvolution | None:
        self.times += 1
        if self.times == 1:
            raise NotNowError
        return None


def test_what_cannot_be_decided_now_is_asked_again_and_what_was_decided_is_not() -> None:
    router, asked = Router(("cpu",), None), Asked()

    results = [router.served(a_call(), asked) for _ in range(4)]

    assert results == [None] * 4
    assert asked.times == 2


def remembering(asked: list[ConvProblem]) -> Decide:
    """Decides that PyTorch's own serves whatever is asked, and remembers what was."""

    def decide(backend: Backend, problem: ConvProblem) -> None:
        asked.append(problem)

    return decide


def test_calls_that_differ_in_what_decides_are_told_apart() -> None:
    router, asked = Router(("cpu",), None), list[ConvProblem]()
    image, filters = torch.zeros(2, 3, 5, 5), [torch.zeros(k, 3, 3, 3) for k in (4, 5)]
    biases = [None, torch.zeros(4)]

    for _ in range(2):
        for weight in filters:  # of equal strides
            router.served(Call(image, weight, None, ARGUMENTS), remembering(asked))
        for bias in biases:
            router.served(Call(image, filters[0], bias, ARGUMENTS), remembering(asked))
        for needs in ("dx", "dw"):
            router.served(Call(image, filters[1], None, ARGUMENTS), remembering(asked), needs)

    assert [(each.out_channels, each.bias) for each in asked] == [
        (4, False),
        (5, False),
        (4, True),
        (5, False),
        (5, False),
    ]


@pytest.mark.parametrize("padding", [0, 1])
def test_a_sample_without_a_batch_is_served_as_a_batch_of_one(padding: int) -> None:
    arguments = ConvArguments.of(2, 1, padding, 1, 1)
    sample, weight = torch.randn(3, 5, 5).double(), torch.randn(4, 3, 3, 3).double()
    call = Call(sample, weight, None, arguments)

    def divided(backend: Backend, problem: ConvProblem) -> DividedConvolution:
        division = Division((Candidate("cpu:im2col", problem.batch, 0.0, 0),))
        return DividedConvolution(backend, problem, {ConvOp.FPROP: division})

    served = Router(("cpu",), None).served(call, divided)

    assert served is not None
    torch.testing.assert_close(served, torch.conv2d(sample, weight, padding=padding))
    asked = list[ConvProblem]()
    assert Router(("cpu",), None).served(call, remembering(asked)) is None
    assert [each.batch for each in asked] == [1]


def test_nothing_is_tuned_while_a_graph_is_captured_which_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuBackend, "is_capturing", True)
    settings = Settings.of(
        "1MiB", mode="reuse", policy="all", search="heuristic", max_error=None, ops="auto",
        backend="auto", store=None, again=False, progress=False,
    )  # fmt: skip

    learner = Learner(settings)
    met = torch.device("cpu"), "conv", 0, a_problem(), (ConvOp.FPROP,)

    with pytest.warns(UntunedWarning, match="all replays will run PyTorch's own"), pytest.raises(NotNowError):
        learner(*met)
    with pytest.raises(NotNowError):  # and a warning would be an error
        learner(*met)
