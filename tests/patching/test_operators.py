"""Compiled models: one graph, in which convolutions are operators that run divided."""

import copy
import dataclasses
import gc
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from bench.networks import BasicBlock, resnet18
from mucudnn.choices import Mode
from mucudnn.convolutions.calls import ConvArguments, own_call, own_gradients
from mucudnn.division import undivided
from mucudnn.errors import UntunedWarning
from mucudnn.patching.applying import apply, patch, plan_of, restore
from mucudnn.patching.operators import _servers, announce, convolve
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from tests.convolutions.kinds import a_module, divided, every_kind, images_for
from tests.graphs import DYNAMOS, Graphs, served, step
from tests.models import a_batch, a_chain
from tests.plans import a_plan_for

pytestmark = [pytest.mark.usefixtures("one_thread", "few_to_collect", "compiled_anew"), DYNAMOS]

TOLERANCE = 1e-9


def assert_close(result: Tensor, expected: Tensor) -> None:
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE * scale)


def assert_same_step(compiled: Any, model: nn.Module, twin: nn.Module, images: Tensor) -> None:
    found = step(compiled, images, [*model.parameters()])
    for result, expected in zip(found, step(twin, images, [*twin.parameters()]), strict=True):
        assert_close(result, expected)


def twins() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    twin = a_chain().double()
    images = a_batch(dtype=torch.float64).requires_grad_()
    return apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images)), twin, images


def test_a_compiled_model_is_one_graph_of_divided_convolutions() -> None:
    model, twin, images = twins()
    graphs = Graphs()

    assert_same_step(torch.compile(model, backend=graphs, fullgraph=True), model, twin, images)

    assert len(graphs.graphs) == 1
    assert graphs.targets.count("mucudnn.traced_convolution.default") == 2
    assert not any("conv2d" in target for target in graphs.targets)


def test_what_runs_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, images = twins()
    seen = served(monkeypatch)

    torch.compile(model, backend="eager", fullgraph=True)(images)

    assert len(seen) == 2


def test_gradients_are_traced_too() -> None:
    model, twin, images = twins()

    assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), model, twin, images)


def test_gradients_are_divided_though_backward_is_called_under_autocast() -> None:
    torch.manual_seed(0)
    twin, images = a_chain(), a_batch().requires_grad_()  # float64 is never cast
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run, module in ((compiled, model), (twin, twin)):
        loss = run(images).square().mean()
        with torch.autocast("cpu", torch.bfloat16):  # for which no plan was made: a warning would say so
            found.append(torch.autograd.grad(loss, [images, *module.parameters()]))

    for result, expected in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_any_size_is_one_graph() -> None:
    model, twin, images = twins()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        for samples in (8, 5, 2):
            assert_same_step(compiled, model, twin, images[:samples].detach().requires_grad_())

    assert len(graphs.graphs) == 1


@every_kind
def test_every_kind_is_compiled(kind: type[Any]) -> None:
    twin, images = a_module(kind, padding=1), images_for(kind)
    module = divided(twin, images)

    assert_same_step(torch.compile(module, backend="aot_eager", fullgraph=True), module, twin, images)


@every_kind
def test_a_sample_without_a_batch_is_divided_too(kind: type[Any]) -> None:
    twin, images = a_module(kind, padding=1), images_for(kind, samples=1)
    module, image = divided(twin, images), images.detach()[0].requires_grad_()
    graphs = Graphs()

    torch.compile(module, backend=graphs, fullgraph=True)(image)
    torch.compiler.reset()

    assert "mucudnn.traced_convolution.default" in graphs.targets
    assert_same_step(torch.compile(module, backend="aot_eager", fullgraph=True), module, twin, image)


@pytest.mark.parametrize("settings", [{"padding_mode": "reflect"}, {"padding": "same", "kernel_size": 2}])
def test_padding_beside_the_convolution_is_traced(settings: dict[str, Any]) -> None:
    twin, images = a_module(nn.Conv2d, **{"padding": 1, **settings}), images_for(nn.Conv2d)
    module = divided(twin, images)

    assert_same_step(torch.compile(module, backend="aot_eager", fullgraph=True), module, twin, images)


def test_a_compiled_resnet18_gives_the_same_numbers_without_a_break() -> None:
    torch.manual_seed(0)
    twin = resnet18().double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))

    assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), model, twin, images)


def test_code_that_the_default_compiler_writes_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    twin = BasicBlock(3, 4, stride=2).double()
    images = a_batch(size=9, dtype=torch.float64).requires_grad_()
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))

    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        assert_same_step(compiled, model, twin, images)

    written = "".join(each.read_text(encoding="utf-8") for each in tmp_path.rglob("*.py"))
    assert "torch.ops.mucudnn.convolution.default" in written
    assert "torch.ops.mucudnn.convolution_backward.default" in written
    assert "aten.convolution" not in written


class _Head(nn.Module):
    """Maps to one channel, which the next layer has behind all others: so the gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 1, 3, padding=1)
        self.last = nn.Linear(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.up(images.sin()).permute(0, 2, 3, 1))


def _places(channels: int) -> Tensor:
    """Images of one dimension, turned from what has its channels last."""
    return torch.randn(4, 9, channels).double().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(
    ("twin", "images"),
    [
        (nn.Conv1d(1, 4, 3, padding=1), _places(1)),
        (nn.ConvTranspose1d(1, 4, 3), _places(1)),
        (nn.Conv1d(3, 4, 3, padding=1), _places(3)),
        (_Head(), torch.randn(4, 4, 5, 5).double().requires_grad_()),
    ],
    ids=["one channel", "transposed", "three channels", "to one channel"],
)
@pytest.mark.parametrize("op", ConvOp)
def test_lengths_of_one_leave_no_order_open_in_what_the_default_compiler_writes(
    op: ConvOp, twin: nn.Module, images: Tensor
) -> None:
    plan = a_plan_for(twin.double(), images)
    assignments = tuple(  # all but one by PyTorch's own, in what is patched
        each
        if each.site.op is op
        else dataclasses.replace(each, division=undivided("cpu:aten", each.problem.batch))
        for each in plan.assignments
    )
    model = apply(copy.deepcopy(twin), dataclasses.replace(plan, assignments=assignments))

    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        assert_same_step(compiled, model, twin, images)


class _Autocast(nn.Module):
    """Enters autocast within what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(images)


def autocast_step(model: Any, images: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the result under autocast, then the gradients by a backward pass outside of it."""
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images)
    return [y, *torch.autograd.grad(y.float().square().mean(), [images, *parameters])]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_autocast_a_graph_is_divided_in_autocasts_type(
    backend: str, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    twin, images = a_chain().float(), a_batch().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))
    compiled = torch.compile(_Autocast(model) if is_inside else model, backend=backend, fullgraph=True)
    seen = served(monkeypatch)

    found = autocast_step(compiled, images, [*model.parameters()])

    assert [image.dtype for image in seen] == [torch.bfloat16] * 2
    expected = autocast_step(model, images, [*model.parameters()])
    for result, eager, of_twin in zip(
        found, expected, autocast_step(twin, images, [*twin.parameters()]), strict=True
    ):
        assert (result.dtype, result.stride()) == (of_twin.dtype, of_twin.stride())
        assert torch.equal(result, eager)
        scale = max(of_twin.abs().max().item(), 1e-3)
        torch.testing.assert_close(result, of_twin, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_under_autocast_a_graph_pads_by_pixels(mode: str) -> None:
    torch.manual_seed(0)
    twin, images = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), a_batch().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    found = autocast_step(compiled, images, [*model.parameters()])

    expected = autocast_step(model, images, [*model.parameters()])
    for result, eager, of_twin in zip(
        found, expected, autocast_step(twin, images, [*twin.parameters()]), strict=True
    ):
        assert result.dtype is of_twin.dtype
        assert torch.equal(result, eager)
        torch.testing.assert_close(result, of_twin, rtol=0, atol=0.02 * of_twin.abs().max().item())


def test_a_graph_under_autocast_says_that_it_was_tuned_without() -> None:
    twin, images = a_module(nn.Conv2d).float(), images_for(nn.Conv2d).detach().float()
    module = divided(twin, images)
    compiled = torch.compile(module, backend="eager", fullgraph=True)

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UntunedWarning, match="was tuned for .* float32.*, but meets .* bfloat16"):
            result = compiled(images)
        assert torch.equal(result, twin(images))


def test_an_exported_model_holds_pytorchs_own() -> None:
    model, twin, images = twins()
    exported = torch.export.export(model.eval(), (images.detach(),))

    targets = [str(node.target) for node in exported.graph.nodes]
    assert not any("mucudnn" in target for target in targets)
    assert_close(exported.module()(images.detach()), twin.eval()(images))


def equal_blocks(number: int, mode: Mode = Mode.REUSE) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a divided model of equal blocks, its twin, and images; what is equal runs equal divisions."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(BasicBlock(3, 3, stride=1) for _ in range(number))).double()
    images = a_batch(dtype=torch.float64).requires_grad_()
    return apply(copy.deepcopy(twin), evenly(a_plan_for(copy.deepcopy(twin), images, mode))), twin, images


def evenly(plan: Plan) -> Plan:
    """Return the plan in which all sites of a problem run what the first of them does."""
    first = {each.problem: each.division for each in reversed(plan.assignments)}
    same = (dataclasses.replace(each, division=first[each.problem]) for each in plan.assignments)
    return dataclasses.replace(plan, assignments=tuple(same))


def names_of(model: nn.Module) -> list[str]:
    return [
        module.__dict__["_conv_forward"]._name for module in model.modules() if isinstance(module, nn.Conv2d)
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, of what a block is given
def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, images = equal_blocks(4)
    graphs, seen = Graphs(), served(monkeypatch)
    for block in model.children():
        block.compile(backend=graphs, fullgraph=True)

    assert_same_step(model, model, twin, images)

    assert len(graphs.graphs) == 1
    assert graphs.targets.count("mucudnn.traced_convolution.default") == 2
    assert len(seen) == 8


def test_who_serves_equal_blocks_stays_as_long_as_one_of_them() -> None:
    model, _, _ = equal_blocks(2)
    (name,) = {*names_of(model)}

    restore(model.get_submodule("0"))
    gc.collect()
    assert name in _servers
    restore(model)
    gc.collect()
    assert name not in _servers


def test_equal_shapes_that_run_other_divisions_have_names_of_their_own() -> None:
    twin = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)))
    model = apply(twin, a_plan_for(copy.deepcopy(twin), a_batch()))  # each site starts with another algorithm

    first, second = names_of(model)
    assert first != second


def test_equal_transposed_convolutions_share_a_server() -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.ConvTranspose2d(3, 3, 3, padding=1) for _ in range(2))).double()
    images = a_batch(dtype=torch.float64).requires_grad_()
    model = apply(copy.deepcopy(twin), evenly(a_plan_for(copy.deepcopy(twin), images)))

    assert len({each.__dict__["forward"]._name for each in model.children()}) == 1
    assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), model, twin, images)


def test_a_warning_of_shared_graphs_says_that_it_speaks_of_one_of_several() -> None:
    model, _, images = equal_blocks(2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    with pytest.warns(UntunedWarning, match=r"^A module like '0\.first\.conv' was tuned for .*, but meets"):
        compiled(images[..., :5])


@pytest.mark.parametrize("mode", ["shapes", "sharing", "learning"])
def test_modules_that_cannot_serve_each_other_have_names_of_their_own(mode: str) -> None:
    plain = Mode.SHARING if mode == "sharing" else Mode.REUSE
    model, _, _ = twins() if mode == "shapes" else equal_blocks(1, plain)
    if mode == "learning":
        model = patch(model, plan_of(model), lambda *_: plan_of(model))

    first, second = names_of(model)
    assert first != second


def test_copies_that_are_compiled_one_by_one_share_a_graph_of_their_own_weights() -> None:
    model, twin, images = twins()
    graphs = Graphs()
    for each in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        for parameter in (*each.parameters(), *twin.parameters()):
            parameter.data.mul_(2)

        assert_same_step(torch.compile(each, backend=graphs, fullgraph=True), each, twin, images)
        twin.load_state_dict(model.state_dict())

    assert len(graphs.graphs) == 1


def test_pickles_have_names_of_their_own() -> None:
    model, twin, images = twins()
    other = pickle.loads(pickle.dumps(model))

    assert not {*names_of(model)} & {*names_of(other)}
    assert_same_step(torch.compile(other, backend="eager", fullgraph=True), other, twin, images)


class _Own:
    """Serves by PyTorch's own."""

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        return own_call(image, weight, bias, arguments)

    def gradients(self, gradient: Tensor, *rest: Any) -> Any:
        return own_gradients(gradient, *rest[:-1])


def test_graphs_that_a_compiler_captures_leave_what_has_a_buffer_out() -> None:
    for name in ("convolution", "inferred_convolution", "convolution_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.mucudnn, name).default.tags


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # of what the check itself reads, from torch 2.14 on
def test_operators_are_what_pytorch_asks_of_them(is_transposed: bool) -> None:
    server = _Own()
    arguments = ConvArguments((2, 1), (1, 0), (1, 1), 1, (1, 0) if is_transposed else None)
    image, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 5, 6), (4, 4, 3, 3), (4,))
    )
    name = announce(server)

    convolve(image, weight, bias, arguments, name)
    checked = torch.library.opcheck(
        torch.ops.mucudnn.convolution.default,
        (image, weight, bias, [2, 1], [1, 0], [1, 1], [1, 0] if is_transposed else [], 1, name),
    )

    assert set(checked.values()) == {"SUCCESS"}


def test_the_operator_of_inference_is_what_pytorch_asks_of_one() -> None:
    server = _Own()
    name = announce(server)
    image, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 4, 3, 3)

    checked = torch.library.opcheck(
        torch.ops.mucudnn.inferred_convolution.default,
        (image, weight, None, [2, 1], [1, 0], [1, 1], [], 1, name),
    )

    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("place", range(3), ids=["image", "weight", "bias"])
def test_gradients_have_the_shapes_and_strides_that_are_traced(place: int, *, is_transposed: bool) -> None:
    server = _Own()
    image, weight = torch.randn(2, 4, 5, 6), torch.randn((4, 6, 3, 3) if is_transposed else (6, 4, 3, 3))
    weight = weight.transpose(2, 3)  # whose strides are in no order that gradients come in
    numbers = ((1, 1), (0, 0), (1, 1), (0, 0) if is_transposed else ())
    arguments = ConvArguments(*numbers[:3], groups=1, output_padding=numbers[3] or None)
    gradient = own_call(image, weight, None, arguments)
    needed = [each == place for each in range(3)]

    torch.library.opcheck(
        torch.ops.mucudnn.convolution_backward.default,
        (gradient, image, weight, *map(list, numbers), 1, announce(server), needed, True),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("place", range(3), ids=["image", "weight", "bias"])
def test_what_needs_the_gradient_of_one_tensor_alone_is_recorded(place: int) -> None:
    server = _Own()
    tensors = [torch.randn(2, 4, 5, 6), torch.randn(4, 4, 3, 3), torch.randn(4)]
    tensors[place].requires_grad_()
    arguments = ConvArguments((1, 1), (0, 0), (1, 1), 1)

    result = convolve(*tensors, arguments, announce(server))

    assert torch.autograd.grad(result.sum(), tensors[place])[0].shape == tensors[place].shape


@pytest.mark.parametrize(
    ("records", "needs", "operator"),
    [
        (False, True, "inferred_convolution"),
        (True, False, "inferred_convolution"),
        (True, True, "convolution"),
    ],
    ids=["no_grad", "nothing needs a gradient", "training"],
)
def test_graphs_hold_an_operator_that_autograd_knows_where_something_is_differentiated(
    records: bool, needs: bool, operator: str
) -> None:
    held: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        held.extend(str(node.target) for node in graph.graph.nodes if "mucudnn" in str(node.target))
        return make_boxed_func(graph.forward)

    twin, images = a_module(nn.Conv2d).requires_grad_(needs), images_for(nn.Conv2d).detach()
    model = divided(twin, images)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=look))

    with torch.set_grad_enabled(records):
        assert_close(compiled(images), twin(images))

    assert held == [f"mucudnn.{operator}.default"]


def test_a_frozen_bias_leaves_the_gradients_divided() -> None:
    twin, images = a_module(nn.Conv2d), images_for(nn.Conv2d)
    module = divided(twin, images)
    for each in (module, twin):
        each.get_parameter("bias").requires_grad_(requires_grad=False)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        found = step(compiled, images, [module.get_parameter("weight")])

    for result, expected in zip(found, step(twin, images, [twin.get_parameter("weight")]), strict=True):
        assert_close(result, expected)


def test_a_graph_outlives_the_plan() -> None:
    model, twin, images = twins()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(images)
    restore(model)
    gc.collect()

    found = torch.autograd.grad(y.square().mean(), [*model.parameters()])

    for result, expected in zip(found, step(twin, images, [*twin.parameters()])[2:], strict=True):
        assert_close(result, expected)


def test_who_is_gone_is_served_by_pytorchs_own() -> None:
    image, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(6, 4, 3, 3), torch.randn(6)
    arguments = ConvArguments((1, 1), (0, 0), (1, 1), 1)
    name = announce(_Own())
    assert name not in _servers

    assert torch.equal(
        convolve(image, weight, bias, arguments, name), own_call(image, weight, bias, arguments)
    )


def test_what_pytorchs_own_serves_is_no_operator() -> None:
    twin, images = a_module(nn.Conv2d), images_for(nn.Conv2d)
    plan = a_plan_for(copy.deepcopy(twin), images)
    own = tuple(
        dataclasses.replace(each, division=undivided("cpu:aten", each.problem.batch))
        for each in plan.assignments
    )
    module = apply(copy.deepcopy(twin), dataclasses.replace(plan, assignments=own))
    graphs = Graphs()

    torch.compile(module, backend=graphs, fullgraph=True)(images)

    assert any("conv" in target for target in graphs.targets)
    assert not any("mucudnn" in target for target in graphs.targets)
