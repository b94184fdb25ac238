"""That a model, its sample and whoever else computes do not notice that it is examined."""

import gc
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mucudnn.errors import SampleError
from mucudnn.examining.extraction import extract
from mucudnn.examining.passes import unhooked
from mucudnn.problem import ConvOp, Layout
from tests.alone import Server
from tests.examining.models import ALL, ChangesItsInput, DependsOnValues, Remembers, RunningMean, ops_of
from tests.graphs import DYNAMOS
from tests.models import a_batch, a_chain


def test_other_threads_compute_their_checkpoints_as_ever_meanwhile() -> None:
    def computes_again_with_the_same_random_numbers() -> bool:
        x = torch.ones(1000, requires_grad=True)
        y = checkpoint(F.dropout, x, use_reentrant=True)
        assert isinstance(y, Tensor)
        y.sum().backward()
        assert x.grad is not None
        return torch.equal(y != 0, x.grad != 0)

    class Waiting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(computes_again_with_the_same_random_numbers).result())
            result: Tensor = super().forward(x)
            return result

    found: list[bool] = []
    extract(Waiting(nn.Conv2d(3, 4, 3)), a_batch())

    assert found == [True]


def test_what_is_saved_out_of_sight_of_the_callers_hooks_is_let_go() -> None:
    def identity(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(identity, identity), unhooked():
        result = (torch.ones(3, requires_grad=True) * 2).relu()  # it saves its result
    gone = weakref.ref(result)
    (gradient,) = torch.autograd.grad(result.sum(), [result], retain_graph=True)
    del result, gradient
    gc.collect()

    assert gone() is None


class Looks(nn.Module):
    """Decides by what it is given."""

    def forward(self, image: Tensor) -> Tensor:
        return image if image.sum().item() > 0 else -image


class Compiled(nn.Module):
    """Whose code is compiled nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).relu()


@pytest.mark.parametrize("looks_at_values", [False, True])
@DYNAMOS
def test_what_is_examined_is_compiled_afterwards(looks_at_values: bool) -> None:
    compiled = torch.compile(Compiled(), backend="eager", fullgraph=True)
    model = nn.Sequential(compiled, Looks()) if looks_at_values else compiled

    assert extract(model, a_batch()).calls

    with torch.no_grad():
        compiled(a_batch())  # raises unless it is


def test_a_model_that_is_to_be_compiled_is_examined_without_a_warning() -> None:
    compiled = torch.compile(nn.Sequential(nn.Conv2d(3, 4, 3)), backend="eager")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        extraction = extract(compiled, a_batch())

    assert [call.path for call in extraction.calls] == ["_orig_mod.0"]


def test_nothing_is_computed() -> None:
    # An image of 2^34 numbers would take 64 GiB.
    image = torch.zeros(1).expand(2**8, 3, 2**12, 2**12)

    assert extract(a_chain(), image).calls[0].problem.batch == 256


def test_what_flows_through_the_model_has_no_values() -> None:
    seen: list[type] = []
    model = a_chain()
    model[0].register_forward_hook(lambda *told: seen.append(type(told[-1])))

    extract(model, a_batch())

    assert [kind.__name__ for kind in seen] == ["FakeTensor"]


class TakesAnotherWay(nn.Module):
    """Computes other convolutions without values than with them."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        if isinstance(image, FakeTensor):
            self.shown(image)
            F.conv2d(image, self.shown.weight)
            raise RuntimeError("there are no values")
        return self.hidden(image)


def test_what_a_pass_that_failed_has_shown_is_forgotten() -> None:
    extraction = extract(TakesAnotherWay(), a_batch())

    assert [call.path for call in extraction.calls] == ["hidden"]
    assert extraction.untouched == (("shown", "the sample does not reach its convolution"),)


def test_a_pass_that_fails_leaves_statistics_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(7, 2))
    before = [buffer.clone() for buffer in model.buffers()]

    with pytest.raises(SampleError):
        extract(model, a_batch())

    assert all(map(torch.equal, model.buffers(), before))


def test_a_pass_touches_the_random_state_of_no_card_on_which_the_model_does_not_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[object] = []
    fork = torch.random.fork_rng

    def noting(devices: object = None) -> object:
        kept.append(devices)
        return fork(devices)

    monkeypatch.setattr(torch.random, "fork_rng", noting)

    extract(nn.Sequential(nn.LazyConv2d(3, 1), DependsOnValues()), a_batch())

    assert kept == [[], [], []]  # for parameters, without arithmetic, and in earnest


def test_a_model_that_needs_values_runs_in_earnest() -> None:
    calls = extract(DependsOnValues(), a_batch()).calls

    assert [(call.path, call.variant) for call in calls] == [("first", 0), ("second", 0)]


@pytest.mark.parametrize("dim", [3, 4])
def test_the_sample_stays_as_it_was(dim: int) -> None:
    image = a_batch() if dim == 4 else a_batch()[0]
    before, version = image.clone(), image._version

    extract(ChangesItsInput(), {"image": image})

    assert torch.equal(image, before)
    assert image._version == version


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_sample_for_a_run_in_earnest_keeps_its_gradient(is_leaf: bool) -> None:
    image = a_batch().requires_grad_()
    if not is_leaf:
        image = image * 2

    assert ops_of(extract(ChangesItsInput(), image)) == {"conv": ALL}


def test_a_sample_for_a_run_in_earnest_keeps_its_memory_format() -> None:
    model, strides = ChangesItsInput(), []
    model.register_forward_pre_hook(lambda _module, args: strides.append(args[0].stride()))
    image = a_batch().to(memory_format=torch.channels_last)

    (call,) = extract(model, image).calls

    assert call.problem.layout is Layout.CHANNELS_LAST
    assert strides[-1] == image.stride()
    assert model.seen == []


def test_a_tensor_that_a_sample_holds_twice_stays_one() -> None:
    image = a_batch()

    assert ops_of(extract(ChangesItsInput(), (image, image)))["conv"] == (ConvOp.FPROP, ConvOp.WGRAD)


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues, RunningMean])
def test_buffers_stay_as_they_were(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    identities = {name: id(buffer) for name, buffer in model.named_buffers()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    extract(model, a_batch())

    assert {name: id(buffer) for name, buffer in model.named_buffers()} == identities
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues])
def test_the_random_state_stays_as_it_was(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    before = torch.get_rng_state()

    extract(model, a_batch())

    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_inference_mode_has_made_runs_in_earnest_too() -> None:
    with torch.inference_mode():
        model = DependsOnValues().eval()

    with torch.no_grad():
        calls = extract(model, a_batch()).calls

    assert [call.path for call in calls] == ["first", "second"]


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues])
def test_no_parameter_gets_a_gradient(kind: Callable[[], nn.Module]) -> None:
    model = kind()

    extract(model, a_batch())

    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues, Remembers])
def test_attributes_stay_as_they_were(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    before = [dict(module.__dict__) for module in model.modules()]

    extract(model, a_batch())

    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("model", [a_chain(), DependsOnValues()], ids=["without", "in earnest"])
def test_the_caller_s_modes_do_not_see_the_pass(model: nn.Module) -> None:
    with FlopCounterMode(display=False) as counted:
        extract(model, a_batch())
        assert counted.get_total_flops() == 0
        model(a_batch())
    assert counted.get_total_flops() > 0


def test_what_a_model_remembers_of_the_pass_is_forgotten() -> None:
    model = Remembers()
    extract(model, a_batch())

    assert type(model(a_batch())) is Tensor


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(SampleError, match="must run on the sample"):
        extract(model, a_batch(channels=5))

    assert [dict(module.__dict__) for module in model.modules()] == before


_BRANCHING = """
import torch
from torch import nn

from mucudnn.examining.extraction import extract

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return torch.cond(y.sum() > 0, lambda each: each * 2, lambda each: each * 1, (y,))

found = extract(Branching(), torch.ones(2, 3, 8, 8))
results = [Branching()(torch.ones(2, 3, 8, 8)) for _ in range(2)]
print(len(found.calls), *(tuple(each.shape) == (2, 4, 6, 6) for each in results))
"""


def test_what_compiles_by_itself_does_so_afterwards_where_nothing_was_compiled_before(alone: Server) -> None:
    assert alone.run(_BRANCHING) == "1 True True"
