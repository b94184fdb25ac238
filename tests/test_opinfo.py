"""PyTorch's own samples of its convolutions, each divided in uneven parts by several algorithms.

The databases of functions (OpInfo) and modules (ModuleInfo) with which PyTorch tests itself lie in its
wheel, with sample inputs and inputs that must be refused.
"""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from bench import by_hand
from mucudnn.autotuning import Autotune, autotune
from mucudnn.errors import NothingToTuneError, SampleError
from mucudnn.patching.applying import apply
from mucudnn.plan import Assignment, ConvSite
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from tests.breadth import is_thorough
from tests.divided import is_divided
from tests.plans import a_plan_for, a_plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCES = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2,
    torch.complex64: 0.0, torch.complex128: 0.0,
}  # fmt: skip
"""Of a largest difference, relative to the largest number; complex ones are PyTorch's own."""

RANKS = range(1, 4)
FUNCTIONS = [f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in RANKS]
MODULES = [
    f"{lazy}Conv{kind}{rank}d" for lazy in ("", "Lazy") for kind in ("", "Transpose") for rank in RANKS
]

REFUSING = FUNCTIONS[: len(RANKS)]
"""Of which PyTorch has samples that are refused."""

LEAST_SAMPLES = 10
"""Of each function; a database that were empty would prove nothing."""

dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Databases(NamedTuple):
    """What PyTorch has of its convolutions.

    Attributes:
        functions: by their names in `torch.nn.functional`.
        modules: by their names in `torch.nn`.
    """

    functions: dict[str, Any]
    modules: dict[str, Any]


@functools.cache
def databases() -> Databases:
    """Import the databases, which takes seconds; whoever does may set no flag of a backend any more."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    # It searches a hundred frames for a test of unittest's at the end of every iteration, 0.1 s each time.
    common_utils.extract_test_fn = lambda: None
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True  # others do
    return Databases(
        {info.name.removeprefix("nn.functional."): info for info in op_db if ".conv" in info.name},
        {info.name.removeprefix("nn."): info for info in module_db if "Conv" in info.name},
    )


class ByHand(Autotune):
    """Divides in uneven parts, and measures nothing.

    Attributes:
        divided: problems that were divided into several parts.
    """

    def __init__(self) -> None:
        super().__init__(autotune("8GiB", progress=False)._settings)
        self.divided: set[ConvProblem] = set()

    def _tuned(self, _: object, problem: ConvProblem, ops: tuple[ConvOp, ...]) -> dict[ConvOp, Assignment]:
        sites = {ConvSite("a function", op): problems_of(problem)[op] for op in ops}
        plan = a_plan_of(sites)
        self.divided |= {each.problem for each in plan.assignments if not each.division.is_undivided}
        return {assigned.site.op: assigned for assigned in plan.assignments}


@pytest.fixture
def compiled_in_one_type(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter is compiled for, a second each; in float64 that is done if tests are to be thorough."""
    if dtype is torch.float64 and not is_thorough():
        others = [name for name in by_hand._NAMES if not name.startswith("cpu:cc_")]
        monkeypatch.setattr(by_hand, "_NAMES", others)


def leaves_of(*values: object) -> list[Tensor]:
    flat = itertools.chain.from_iterable(
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for value in values
    )
    return [value for value in flat if isinstance(value, Tensor) and value.requires_grad]


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    bound = TOLERANCES[expected.dtype] * scale
    torch.testing.assert_close(result, expected, rtol=0, atol=bound, equal_nan=True)


def assert_same(result: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    assert_close(result, expected)
    assert result.stride() == expected.stride()
    if not leaves:
        return
    weights = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape).to(expected.dtype)
    found, own = (
        torch.autograd.grad((y * weights).real.sum(), leaves, allow_unused=True) for y in (result, expected)
    )
    for one, other in zip(found, own, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_close(one, other)


def repeated(images: Tensor) -> Tensor:
    """More images than the samples have, which are one or two: larger and larger ones of the same."""
    return torch.cat([images.detach() * scale for scale in range(1, 8)]).requires_grad_()


def test_the_databases_know_every_convolution() -> None:
    assert databases().functions.keys() == set(FUNCTIONS)
    assert databases().modules.keys() == set(MODULES)
    refusing = [name for name, info in databases().functions.items() if info.error_inputs_func is not None]
    assert sorted(refusing) == sorted(REFUSING)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # PyTorch's, once
@pytest.mark.usefixtures("compiled_in_one_type")
@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_sample_of_a_function_gives_what_pytorch_gives(name: str, dtype: torch.dtype) -> None:
    info = databases().functions[name]
    if dtype not in info.supported_dtypes("cpu"):
        with pytest.raises(RuntimeError):
            info(torch.ones((1,) * 5, dtype=dtype), torch.ones((1,) * 5, dtype=dtype))
        return
    divided = ByHand()
    count, ours = 0, False
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        weight = sample.args[0]
        for images in (sample.input, repeated(sample.input)):
            if images.dim() != weight.dim() - 1 or images is sample.input:
                expected = info(images, *sample.args, **sample.kwargs)
                with divided:
                    result = info(images, *sample.args, **sample.kwargs)
                ours |= is_divided(result)
                assert_same(result, expected, leaves_of(images, sample.args, sample.kwargs))
                count += 1

    assert count >= LEAST_SAMPLES
    assert bool(divided.divided) == ours == (not dtype.is_complex)


@pytest.mark.parametrize("name", REFUSING)
def test_what_pytorch_refuses_is_refused_in_its_words(name: str) -> None:
    info = databases().functions[name]
    for case in info.error_inputs("cpu"):
        sample = case.sample_input
        with pytest.raises(case.error_type) as expected:
            info(sample.input, *sample.args, **sample.kwargs)
        with ByHand(), pytest.raises(case.error_type) as raised:
            info(sample.input, *sample.args, **sample.kwargs)
        assert str(raised.value) == str(expected.value)


@functools.cache
def module_samples(name: str, dtype: torch.dtype) -> list[Any]:
    info = databases().modules[name]
    return list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True))


@pytest.mark.usefixtures("compiled_in_one_type")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_every_sample_of_a_module_gives_what_its_twin_gives(name: str, dtype: torch.dtype) -> None:
    info = databases().modules[name]
    samples = module_samples(name, dtype)
    divided = 0
    for sample in samples:
        made, called = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        twin = info.module_cls(*made.args, **made.kwargs).to(dtype)
        twin(*called.args, **called.kwargs)
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs).to(dtype)
        divided += patched(module, called)

        result, expected = (each(*called.args, **called.kwargs) for each in (module, twin))
        inputs = leaves_of(called.args, called.kwargs)
        assert_same(result, expected, inputs)
        found, own = (
            torch.autograd.grad(each(*called.args, **called.kwargs).sum(), [*each.parameters()])
            for each in (module, twin)
        )
        for one, other in zip(found, own, strict=True):
            assert_close(one, other)

    assert divided == len(samples) > 0


def patched(module: nn.Module, called: Any) -> bool:
    """Divide the module by a plan made by hand; return whether there was anything to divide."""
    try:
        apply(module, a_plan_for(module, called.args))
    except (SampleError, NothingToTuneError):
        return False
    return True
