"""From a model and a limit to a patched model, on this machine."""

import copy
import dataclasses
import json
import math
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.errors import (
    BackendError,
    BusyWarning,
    InfeasibleError,
    NothingToTuneError,
    OptionError,
    SampleError,
    SizeError,
    StoreError,
    StoreWarning,
    UntunedWarning,
)
from mucudnn.patching.applying import plan_of
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.store.memory import MemoryStore
from mucudnn.store.sqlite import SqliteStore
from tests.divided import is_divided
from tests.examples import a_plan
from tests.models import Listener, a_batch, a_chain, too_large_for_nothing
from tests.operands import a_convolution
from tests.tuned import LIMIT, a_known_store

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_known_store(tmp_path_factory.mktemp("known"))


def test_optimize_returns_the_same_model_patched(known: Path) -> None:
    model = a_chain()

    optimised = mucudnn.optimize(model, LIMIT, a_batch(), store=known, progress=False)

    assert optimised is model
    assert [str(site) for site in plan_of(model).sites] == [
        "0 fprop",
        "0 wgrad",
        "3 fprop",
        "3 dgrad",
        "3 wgrad",
    ]


def test_an_optimised_model_computes_as_before(known: Path) -> None:
    model = a_chain()
    twin = copy.deepcopy(model)

    result = mucudnn.optimize(model, LIMIT, a_batch(), store=known, progress=False)(a_batch())

    # Winograd's bound in float32, on numbers of which none is much above one.
    torch.testing.assert_close(result, twin(a_batch()), rtol=1e-5, atol=1e-5)


def test_tune_leaves_the_model_untouched(known: Path) -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_tune_leaves_a_patched_model_patched(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, a_batch(), store=known, progress=False)
    before = [dict(module.__dict__) for module in model.modules()]

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_plan_holds_what_it_was_made_for(known: Path) -> None:
    plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)

    plan.check()
    assert (plan.mode, plan.policy, plan.limit_bytes) == (Mode.REUSE, Policy.POWER_OF_TWO, 2**20)
    assert (plan.environment.backend, plan.version) == ("cpu", mucudnn.__version__)
    assert all(each.evidence is not None and each.candidates for each in plan.assignments)


def test_a_second_run_measures_nothing_and_makes_the_same_plan_byte_for_byte(known: Path) -> None:
    first, second = Listener(), Listener()

    plans = [
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)
        for listener in (first, second)
    ]

    assert (first.measured, second.measured) == (0, 0)
    assert plans[0].to_text() == plans[1].to_text()


def test_a_first_run_makes_the_plan_that_later_runs_make(tmp_path: Path) -> None:
    listener = Listener()
    options: dict[str, Any] = {"store": tmp_path / "store", "policy": "undivided"}

    first = mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, progress=listener, **options)
    second = mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, progress=False, **options)

    assert listener.measured
    assert first.to_text() == second.to_text()


def test_again_measures_anew_what_the_store_knows(tmp_path: Path) -> None:
    listeners = [Listener() for _ in range(3)]

    measured = []
    for listener, again in zip(listeners, (False, True, False), strict=True):
        mucudnn.tune(
            nn.Conv2d(3, 4, 3).eval(), a_batch(), LIMIT, policy="undivided", store=tmp_path / "store",
            again=again, progress=listener,
        )  # fmt: skip
        measured.append(listener.measured)

    assert (bool(measured[0]), bool(measured[1]), measured[2]) == (True, True, 0)


def test_equal_layers_that_are_met_one_by_one_are_measured_anew_once(tmp_path: Path) -> None:
    listener, measured = Listener(), []
    options: dict[str, Any] = {"policy": "undivided", "store": tmp_path / "store", "progress": listener}
    for _ in range(2):
        learn = mucudnn.autotune(LIMIT, again=True, **options)._learn
        for _ in range(2):
            learn(torch.device("cpu"), "conv", 0, a_convolution(batch=8), (ConvOp.FPROP,))
            measured.append(bool(listener.measured))

    assert measured == [True, False, True, False]


def test_a_recording_cannot_be_measured_again() -> None:
    with pytest.raises(OptionError, match="again must come with a backend that measures, but got 'replay:x'"):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, backend="replay:x", again=True)


def test_the_default_store_is_used_without_another(store_path: Path) -> None:
    mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, policy="undivided", progress=False)

    assert store_path.exists()


def test_a_saved_plan_is_loaded_and_applied(known: Path, tmp_path: Path) -> None:
    plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)
    plan.save(tmp_path / "plan.json")
    model = a_chain()

    mucudnn.apply(model, Plan.load(tmp_path / "plan.json"))

    assert mucudnn.plan_of(model) == plan


@pytest.mark.parametrize("mode", ["reuse", "sharing"])
@pytest.mark.parametrize("policy", ["undivided", "power_of_two", "all"])
def test_every_mode_and_policy_makes_a_plan_within_the_limit(known: Path, mode: str, policy: str) -> None:
    model = a_chain().eval()

    plan = mucudnn.tune(model, a_batch(), LIMIT, mode=mode, policy=policy, store=known, progress=False)

    plan.check()
    assert (plan.mode, plan.policy) == (mode, policy)
    sizes = {part.batch for division in plan.sites.values() for part in division.parts}
    assert sizes <= set(Policy(policy).sizes(8))


def test_pytorchs_own_of_a_transposed_convolution_is_weighed_as_the_model_runs_it(tmp_path: Path) -> None:
    """In float64 it gathers what all nine taps meet: of all samples at once, where a gradient has one's."""
    model, image = nn.ConvTranspose2d(16, 16, 3).double().eval(), a_batch(8, 16, 16, torch.float64)

    plan = mucudnn.tune(model, image, "8MiB", policy="undivided", store=tmp_path / "store", progress=False)

    (assigned,) = plan.assignments
    assert assigned.problem.is_apart
    assert assigned.seen.reference_workspace_bytes is not None
    assert assigned.seen.reference_workspace_bytes > 8 * image.nbytes


@pytest.mark.parametrize("tells", [True, False])
def test_plans_of_before_transposed_convolutions_were_told_apart_still_divide_them(
    tmp_path: Path, *, tells: bool
) -> None:
    model, image = nn.ConvTranspose2d(4, 4, 3).double(), a_batch(8, 4, 8, torch.float64)
    plan = mucudnn.tune(model, image, "8MiB", policy="undivided", store=tmp_path / "store", progress=False)
    parts = (Candidate("cpu:im2col", 4, 1e-3, MIB),) * 2
    divided = tuple(
        dataclasses.replace(each, division=Division(parts), candidates=()) for each in plan.assignments
    )
    fields = json.loads(dataclasses.replace(plan, assignments=divided).to_text())
    if not tells:
        assert [problem.pop("is_apart") for problem in fields["problems"]] == [True] * len(plan.sites)
        fields["schema"] = 6

    mucudnn.apply(model, Plan.from_text(json.dumps(fields)))

    assert is_divided(model(image))


@pytest.mark.parametrize("limit", ["1MiB", "1024KiB", 2**20])
def test_a_limit_may_be_bytes_or_have_a_unit(known: Path, limit: int | str) -> None:
    assert mucudnn.tune(a_chain(), a_batch(), limit, store=known, progress=False).limit_bytes == 2**20


@pytest.mark.parametrize("limit", ["64", "-1MiB", -1, "lots", 1.5])
def test_a_limit_that_cannot_be_read_is_refused(limit: Any) -> None:
    with pytest.raises(SizeError, match="must"):
        mucudnn.optimize(a_chain(), limit, a_batch())


WRONG_OPTIONS = pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "both"}, "mode must be one of 'reuse', 'sharing', but got 'both'"),
        ({"policy": "some"}, "policy must be one of 'undivided', 'power_of_two', 'all', but got 'some'"),
        ({"search": "all"}, "search must be one of 'heuristic', 'exhaustive', but got 'all'"),
        ({"max_error": -1e-6}, "max_error must be None or a number from 0 on, such as 2e-6, but got -1e-06"),
        ({"max_error": math.nan}, "max_error must be None or a number from 0 on, such as 2e-6, but got nan"),
        ({"max_error": "2e-6"}, "max_error must be None or a number .*, but got '2e-6'"),
        ({"max_error": True}, "max_error must be None or a number .*, but got True"),
        ({"ops": ["forward"]}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad'"),
        ({"ops": "bogus"}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got 'bogus'"),
        ({"ops": None}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got None"),
        ({"ops": 5}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got 5"),
        (
            {"backend": "abacus"},
            "one of .*'replay:NAME' or 'replay:FILE', but got 'abacus'",
        ),
        ({"backend": "xeon"}, r"but got 'xeon'; did you mean 'replay:xeon'\?"),
        ({"backend": None}, "one of .*'replay:NAME' or 'replay:FILE', but got None"),
        ({"backend": []}, r"one of .*'replay:NAME' or 'replay:FILE', but got \[\]"),
        (
            {"backend": "replay:"},
            "one of .*'replay:NAME' or 'replay:FILE', but got 'replay:'",
        ),
        ({"again": "yes"}, "again must be True or False, but got 'yes'"),
        ({"store": 5}, "store must be a path, a Store or None, but got 5"),
        ({"store": MemoryStore}, r"or None, but got the class MemoryStore, not an instance\.$"),
        (
            {"progress": "x"},
            r"progress must be True, False, None or a Progress \(begin, at and end\), but got 'x'",
        ),
        ({"progress": Listener}, r"or a Progress \(.*\), but got the class Listener, not an instance\.$"),
    ],
)


@WRONG_OPTIONS
def test_a_wrong_option_is_answered_with_the_choices(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, **option)


@WRONG_OPTIONS
def test_a_wrong_option_does_not_arm_a_model(option: dict[str, Any], message: str) -> None:
    model = a_chain()

    with pytest.raises(OptionError, match=message):
        mucudnn.optimize(model, LIMIT, **option)

    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("auto", "Convolutions can be tuned on cpu.*, but the model lies on meta"),
        ("cpu", "The backend 'cpu' tunes models on cpu, but the model lies on meta"),
    ],
)
def test_a_model_that_lies_where_the_backend_does_not_tune_is_refused(backend: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        mucudnn.tune(a_chain().to("meta"), a_batch().to("meta"), LIMIT, backend=backend)


def test_a_model_that_needs_none_of_the_ops_asked_for_is_refused() -> None:
    with pytest.raises(NothingToTuneError, match="none of it can: the model itself: it needs no dgrad"):
        mucudnn.tune(nn.Conv2d(3, 4, 3), a_batch(), LIMIT, ops="dgrad")


def test_a_convolution_that_needs_none_of_the_ops_asked_for_is_listed_in_the_plan(tmp_path: Path) -> None:
    plan = mucudnn.tune(
        a_chain(), a_batch(), LIMIT, ops="dgrad", policy="undivided", store=tmp_path / "s", progress=False
    )

    assert [str(site) for site in plan.sites] == ["3 dgrad"]
    assert plan.untouched == (("0", "it needs no dgrad"),)


def test_a_convolution_that_others_have_patched_stays_patched_by_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval()

    def theirs(image: Tensor, *parameters: Tensor | None) -> Tensor:
        return image

    model[1].__dict__["_conv_forward"] = theirs

    mucudnn.optimize(model, LIMIT, a_batch(), policy="undivided", store=tmp_path / "store", progress=False)

    assert plan_of(model).untouched == (("1", "its _conv_forward has been replaced by something else"),)
    assert model[1].__dict__["_conv_forward"] is theirs


@pytest.mark.parametrize("is_armed", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_what_was_tuned_for_inference_and_is_trained_after_all_says_so_once(
    divided_by_hand: None, known: Path, *, is_training: bool, is_armed: bool
) -> None:
    model, sample = a_chain().eval(), None if is_armed else a_batch()
    mucudnn.optimize(model, LIMIT, sample, store=known, progress=False)
    model(a_batch())  # of which a warning would be an error
    model.train(is_training)

    with pytest.warns(UntunedWarning, match=r"was tuned in eval mode.*it in training mode; .* ops=") as told:
        model(a_batch().requires_grad_()).sum().backward()
    model(a_batch().requires_grad_()).sum().backward()

    assert len(told) == 1


def test_who_asks_for_forward_passes_alone_is_not_told_that_gradients_were_not_tuned(
    divided_by_hand: None, known: Path
) -> None:
    model = a_chain().eval()
    mucudnn.optimize(model, LIMIT, a_batch(), ops="fprop", store=known, progress=False)

    result = model(a_batch())
    result.sum().backward()  # of which a warning would be an error

    assert is_divided(result)


def test_a_sample_that_the_model_rejects_leaves_it_unpatched() -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(SampleError, match="must run on the sample"):
        mucudnn.optimize(model, LIMIT, a_batch(channels=2), progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_limit_that_nothing_fits_names_the_site_the_limit_and_one_that_would_do(
    tmp_path: Path,
) -> None:
    model, images = too_large_for_nothing()
    with pytest.raises(InfeasibleError, match=r"0 fprop'? fits the workspace limit of 0 bytes") as raised:
        mucudnn.tune(model, images, 0, store=tmp_path / "store", progress=False)
    least = raised.value.least_bytes
    assert least

    plan = mucudnn.tune(model, images, least, store=tmp_path / "store", progress=False)

    assert plan.workspace_bytes <= least


def test_where_pytorchs_own_needs_more_one_byte_less_than_the_limit_named_is_too_little(
    tmp_path: Path,
) -> None:
    model, images = too_large_for_nothing()
    with pytest.raises(InfeasibleError, match="fits the workspace limit of 0 bytes") as raised:
        mucudnn.tune(model, images, 0, store=tmp_path / "store", progress=False)
    least = raised.value.least_bytes
    assert least

    with pytest.raises(InfeasibleError, match=f"a limit of {least} bytes .* may be enough"):
        mucudnn.tune(model, images, least - 1, store=tmp_path / "store", progress=False)


def test_without_workspace_pytorchs_own_may_still_run(tmp_path: Path) -> None:
    # PyTorch's own runs a 1x1 convolution in doubles as a matrix product, in place.
    model = nn.Conv2d(3, 4, 1).double().eval()

    plan = mucudnn.tune(
        model, a_batch(dtype=torch.float64), 0, policy="undivided", store=tmp_path / "store", progress=False
    )

    assert plan.workspace_bytes == 0


def test_a_damaged_store_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite3"
    store.write_bytes(b"this was a store once")

    with pytest.raises(StoreError, match=r"store\.sqlite3 .*file is not a database"):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=store, progress=False)

    assert store.read_bytes() == b"this was a store once"


def test_a_store_that_cannot_be_written_is_read_and_the_rest_is_kept_in_memory(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs as root writes everywhere, so that the disk's refusal has to be made up.
    expected = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)
    connect = sqlite3.connect

    def refuse_writing(address: str, **options: Any) -> sqlite3.Connection:
        if "mode=ro" not in address:
            raise PermissionError(30, "Read-only file system")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse_writing)
    listener = Listener()
    with pytest.warns(StoreWarning, match=r"not kept: .*Read-only file system") as told:
        plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)

    # Others may have been busy while the known times were measured, which is told whenever they are read.
    assert [each.filename for each in told if each.category is not BusyWarning] == [__file__]
    assert plan.to_text() == expected.to_text()
    assert listener.measured == 0


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        plan = mucudnn.tune(
            nn.Conv2d(3, 4, 3).eval(),
            a_batch(),
            LIMIT,
            policy="undivided",
            store=tmp_path / "file" / "store",
            progress=False,
        )

    assert len(plan.sites) == 1


def test_a_store_that_was_passed_in_stays_open(known: Path) -> None:
    with SqliteStore(known) as store:
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=store, progress=False)

        assert store.count() > 0


@pytest.mark.parametrize(
    ("model", "got"),
    [(len, "builtin_function_or_method"), (nn.Conv2d, "the class Conv2d"), (3, "int"), ("resnet18", "str")],
)
def test_what_is_no_model_is_refused_in_a_sentence(model: Any, got: str, known: Path) -> None:
    message = f"^A model must be a torch.nn.Module, but got {got}.$"
    calls: list[Callable[[], object]] = [
        lambda: mucudnn.optimize(model, LIMIT, a_batch()),
        lambda: mucudnn.optimize(model, LIMIT),
        lambda: mucudnn.tune(model, a_batch(), LIMIT),
        lambda: mucudnn.apply(model, mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)),
        lambda: mucudnn.restore(model),
        lambda: plan_of(model),
    ]

    for call in calls:
        with pytest.raises(OptionError, match=message):
            call()


def test_a_plan_s_file_is_not_taken_for_the_plan() -> None:
    with pytest.raises(OptionError, match=r"but got 'plan.json'; Plan.load\(path\) reads one from a file"):
        mucudnn.apply(a_chain(), "plan.json")  # type: ignore[arg-type]  # that is the point


def test_what_compare_has_found_is_not_taken_for_the_plan_in_it() -> None:
    found = SimpleNamespace(settled=a_plan())

    with pytest.raises(OptionError, match=r"must be a Plan, but got .*; its attribute settled is one\.$"):
        mucudnn.apply(a_chain(), found)  # type: ignore[arg-type]  # that is the point


def test_a_plan_s_text_is_not_shown_as_a_whole() -> None:
    with pytest.raises(OptionError, match=r"must be a Plan, but got '\{.* \.\.\.; Plan.load") as raised:
        mucudnn.apply(a_chain(), '{"schema": 1}' * 1000)  # type: ignore[arg-type]  # that is the point

    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("sample", ["8x3x6x6", a_batch().numpy()])
def test_a_sample_that_no_model_computes_with_is_refused(sample: object) -> None:
    with pytest.raises(SampleError, match="must be a tensor, a tuple of arguments or a dict of keyword"):
        mucudnn.tune(a_chain(), sample, LIMIT)


def test_a_sample_in_the_place_of_the_limit_is_told_in_a_line() -> None:
    with pytest.raises(SizeError) as raised:
        mucudnn.optimize(a_chain(), a_batch(), LIMIT)  # type: ignore[arg-type]  # that is the point

    assert "got a Tensor: optimize takes (model, limit, sample)" in str(raised.value)
    assert len(str(raised.value)) < 160


def test_progress_is_told_from_the_beginning_to_the_end(known: Path) -> None:
    listener = Listener()

    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)

    told = [what.split()[0] for what, _ in listener.steps]
    done = [done for _, done in listener.steps]
    assert told == ["profiling"] * 5 + ["confirming"] * 5
    assert done == sorted(done)
    assert done[0] == 0
    assert listener.work is not None
    assert done[-1] < listener.work
    assert listener.measured == 0


def test_a_bar_is_drawn_on_standard_error_if_that_is_a_terminal(
    known: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich looks at more than that

    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)

    told = capsys.readouterr()
    assert told.out == ""
    assert "confirming" in told.err


def test_nothing_is_drawn_where_nobody_watches(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)

    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("arguments", [(), (a_batch(),)], ids=["armed", "tuned"])
def test_a_model_of_torchscript_has_nothing_to_tune(arguments: tuple[Tensor, ...]) -> None:
    model = torch.jit.script(a_chain())

    with pytest.raises(NothingToTuneError, match="but it is scripted or traced, and such modules run as"):
        mucudnn.optimize(model, LIMIT, *arguments)
