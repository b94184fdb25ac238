"""Convolutions that torch.compile finds in `autotune`: operators of its graphs, tuned when they first run."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from mucudnn.autotuning import Autotune, autotune
from mucudnn.errors import PlanError, UntunedWarning
from mucudnn.problem import ConvOp
from tests.forks import in_a_child
from tests.graphs import DYNAMOS, Graphs, step
from tests.models import a_batch, a_chain

pytestmark = [pytest.mark.usefixtures("one_thread", "compiled_anew"), DYNAMOS]

LIMIT = "64MiB"
DIVIDED = "mucudnn.traced_convolution.default"


@pytest.fixture
def tuned(tmp_path: Path) -> Autotune:
    """A context with a store of its own."""
    return autotune(LIMIT, store=tmp_path / "store", progress=False)


@pytest.mark.usefixtures("divided_by_hand")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_training_step_is_one_graph_whose_convolutions_are_tuned_when_it_runs(
    compiler: str, tuned: Autotune
) -> None:
    torch.manual_seed(0)
    model, images = a_chain().double(), a_batch(dtype=torch.float64).requires_grad_()
    expected = step(model, images, [*model.parameters()])
    compiled = torch.compile(model, backend=compiler, fullgraph=True)

    for _ in range(2):
        with tuned:
            found = step(compiled, images, [*model.parameters()])

        for result, right in zip(found, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=1e-9)
    assert [site.op for site in tuned.plan.sites] == [*ConvOp, *ConvOp]
    assert any(not each.key.startswith("cpu:aten@") for each in tuned.plan.sites.values())


def test_only_what_a_graph_needs_is_tuned(tuned: Autotune) -> None:
    model, images = a_chain(), a_batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    with tuned:
        compiled(images).sum().backward()  # images need no gradient
    with tuned, torch.no_grad():
        compiled(images)

    first, second = ConvOp.FPROP, ConvOp.WGRAD
    assert [site.op for site in tuned.plan.sites] == [first, second, *ConvOp]


@pytest.mark.parametrize(
    ("call", "operators"),
    [
        (lambda x, w: F.conv2d(x, w, padding="same"), 1),
        (lambda x, w: F.conv2d(x[0], w), 1),  # one sample
        (lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, output_padding=1), 1),
        (lambda x, w: torch.conv2d(x, w, groups=1, dilation=2), 1),
        (lambda x, w: checkpoint(F.conv2d, x, w, use_reentrant=False), 0),  # traced without the context
    ],
)
@pytest.mark.filterwarnings("ignore::mucudnn.errors.UntunedWarning")  # this compiler runs it in a mode
def test_functions_are_those_of_pytorch(
    call: Callable[[Tensor, Tensor], Tensor], operators: int, tuned: Autotune
) -> None:
    x, w, graphs = a_batch(dtype=torch.float64), torch.randn(3, 3, 3, 3, dtype=torch.float64), Graphs()
    with tuned:
        result = torch.compile(call, backend=graphs, fullgraph=True)(x, w)

    torch.testing.assert_close(result, call(x, w), rtol=0, atol=1e-9)
    assert graphs.targets.count(DIVIDED) == operators


def test_code_that_the_default_compiler_writes_gives_the_same_numbers(
    tuned: Autotune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    torch.manual_seed(0)
    model, images = a_chain().double(), a_batch(dtype=torch.float64).requires_grad_()
    expected = step(model, images, [*model.parameters()])
    with torch._inductor.config.patch(compile_threads=1), tuned:
        found = step(torch.compile(model, fullgraph=True), images, [*model.parameters()])

    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=1e-9)
    assert [site.op for site in tuned.plan.sites] == [*ConvOp, *ConvOp]


@pytest.mark.filterwarnings("ignore::mucudnn.errors.UntunedWarning")  # it runs what is in the graph
def test_tensors_of_a_class_of_their_own_are_pytorchs(tuned: Autotune) -> None:
    filters = [torch.randn(3, 3, 3, 3) for _ in range(2)]
    x, w, graphs = TwoTensor(a_batch(), a_batch()), TwoTensor(*filters), Graphs()
    with tuned:
        result = torch.compile(F.conv2d, backend=graphs, fullgraph=True)(x, w)

    assert torch.equal(result.b, F.conv2d(x.b, w.b))
    assert any("conv" in target for target in graphs.targets)
    assert DIVIDED not in graphs.targets


@pytest.mark.usefixtures("divided_by_hand")
def test_gradients_are_never_tuned_in_the_backward_pass(tuned: Autotune) -> None:
    x, w = a_batch(dtype=torch.float64), torch.randn(3, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(F.conv2d, backend="aot_eager", fullgraph=True)
    with tuned:
        y = compiled(x, w)
        sites = [*tuned.plan.sites]
        torch.set_num_threads(2)  # nothing is known for two; the fixture sets it back
        (found,) = torch.autograd.grad(y.sum(), [w])

    assert [*tuned.plan.sites] == sites
    torch.testing.assert_close(found, *torch.autograd.grad(F.conv2d(x, w).sum(), [w]), rtol=0, atol=1e-9)


def test_a_context_that_nobody_keeps_goes_at_once_and_its_graphs_run_pytorchs_own(tmp_path: Path) -> None:
    x, w = a_batch(), torch.randn(3, 3, 3, 3, requires_grad=True)
    context = autotune(LIMIT, store=tmp_path / "store", progress=False)
    with context:
        y = torch.compile(F.conv2d, backend="aot_eager", fullgraph=True)(x, w)
    torch.compiler.reset()  # whose guards keep it
    seen = weakref.ref(context)
    gc.collect()
    gc.disable()
    del context
    try:
        assert seen() is None
    finally:
        gc.enable()

    (found,) = torch.autograd.grad(y.sum(), [w])
    torch.testing.assert_close(found, *torch.autograd.grad(F.conv2d(x, w).sum(), [w]))


@pytest.mark.usefixtures("divided_by_hand")
def test_graphs_tune_nothing_in_a_forked_child(tuned: Autotune) -> None:
    weight = torch.ones(8, 4, 3, 3)
    compiled = torch.compile(F.conv2d, backend="eager")

    with tuned:
        compiled(torch.ones(8, 4, 8, 8), weight)
        known = len(tuned._plans)

        def check() -> bool:
            with pytest.warns(UntunedWarning, match="A convolution is called in a forked process"):
                compiled(torch.ones(8, 4, 9, 9), weight)
            return len(tuned._plans) == known

        assert in_a_child(check)


def test_graphs_hold_operators_within_the_context_alone(tuned: Autotune) -> None:
    model, images, graphs = a_chain(), a_batch(), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    compiled(images)
    outside = [*graphs.targets]
    with tuned:
        compiled(images)

    assert any("conv" in target for target in outside)
    assert DIVIDED not in outside
    assert graphs.targets.count(DIVIDED) == 2


def test_each_context_serves_what_is_called_in_it(tuned: Autotune, tmp_path: Path) -> None:
    other = autotune("32MiB", store=tmp_path / "other", progress=False)
    x, w = a_batch(), torch.randn(3, 3, 3, 3)
    compiled = torch.compile(F.conv2d, backend="eager", fullgraph=True)
    for context, samples in ((tuned, 2), (other, 4), (tuned, 8)):
        with context:
            compiled(x[:samples], w)

    assert [each.problem.batch for each in tuned.plan.assignments] == [2, 8]
    assert [each.problem.batch for each in other.plan.assignments] == [4]


def test_autocast_has_its_type_and_a_context_of_its_own(tuned: Autotune) -> None:
    x, w = a_batch(), torch.randn(3, 3, 3, 3)
    compiled = torch.compile(lambda: F.conv2d(x, w), backend="eager", fullgraph=True)
    with tuned, torch.autocast("cpu", torch.bfloat16):
        result = compiled()
        expected = F.conv2d(x, w)

    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-2)
    assert {each.problem.dtype for each in tuned.plan.assignments} == {"bfloat16"}


def test_what_is_exported_holds_pytorchs_own(tuned: Autotune) -> None:
    with tuned:
        exported = torch.export.export(a_chain().eval(), (a_batch(),))

    assert not any("mucudnn" in str(node.target) for node in exported.graph.nodes)
    with pytest.raises(PlanError, match="but none was"):
        _ = tuned.plan


def test_pytorchs_errors_are_its_own(tuned: Autotune) -> None:
    def wrong(x: Tensor) -> Any:
        return F.conv2d(x, torch.zeros(3, 5, 3, 3))

    with tuned, pytest.raises(RuntimeError, match="channels"):
        torch.compile(wrong, backend="eager")(a_batch())
