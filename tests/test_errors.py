"""The error tree, and the one error that carries numbers."""

import _thread
import pickle
import time
import warnings
from typing import Any

import pytest

from mucudnn import errors

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
]


def test_every_error_is_a_mucudnn_error() -> None:
    assert [kind for kind in ERRORS if not issubclass(kind, errors.MucudnnError)] == []


def test_every_error_stands_in_the_tree_that_the_module_draws() -> None:
    assert errors.__doc__ is not None
    assert [kind for kind in ERRORS if kind.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("kind", [errors.SizeError, errors.ProblemError, errors.OptionError])
def test_a_wrong_argument_is_a_value_error_too(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize("kind", [errors.PlanFormatError, errors.PlanMismatchError])
def test_what_is_wrong_with_a_plan_is_a_plan_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.PlanError)


def test_infeasible_names_site_limit_and_least_workspace_in_both_units() -> None:
    error = errors.InfeasibleError(limit_bytes=64, least_bytes=3 * 2**20, site="layer1.conv fprop")

    assert str(error) == (
        "No division for 'layer1.conv fprop' fits the workspace limit of 64 bytes (0.0001 MiB); "
        "a limit of 3145728 bytes (3 MiB) may be enough. A larger one gives more algorithms a chance."
    )


def test_infeasible_of_all_together_says_so_and_names_the_site_that_needs_most() -> None:
    error = errors.InfeasibleError(64, 3 * 2**20, "layer1.conv fprop", is_total=True)

    assert str(error) == (
        "No divisions of all convolutions together fit the workspace limit of 64 bytes (0.0001 MiB); "
        "a limit of 3145728 bytes (3 MiB) may be enough, of which 'layer1.conv fprop' needs most. "
        "A larger one gives more algorithms a chance."
    )


@pytest.mark.parametrize(("least_bytes", "is_total"), [(64, False), (None, False), (64, True), (None, True)])
def test_infeasible_ends_with_what_the_site_computes(least_bytes: int | None, is_total: bool) -> None:
    error = errors.InfeasibleError(8, least_bytes, "conv fprop (shape 4)", is_total, "fprop 2x3x9x9 -> 8")

    assert str(error).endswith(". It computes fprop 2x3x9x9 -> 8.")
    assert str(error).count("'conv fprop (shape 4)'") == 1


def test_infeasible_of_all_together_without_a_known_remedy_says_so() -> None:
    error = errors.InfeasibleError(64, None, is_total=True)

    assert str(error) == (
        "No divisions of all convolutions together fit the workspace limit of 64 bytes (0.0001 MiB), "
        "and it is not known which limit would be enough."
    )


def test_nothing_to_tune_is_a_matter_of_the_sample() -> None:
    assert issubclass(errors.NothingToTuneError, errors.SampleError)


def test_infeasible_without_a_known_remedy_says_so() -> None:
    error = errors.InfeasibleError(limit_bytes=64, least_bytes=None)

    assert str(error) == (
        "No division fits the workspace limit of 64 bytes (0.0001 MiB), and it is not known "
        "which limit would be enough."
    )


def test_infeasible_survives_pickling() -> None:
    error = errors.InfeasibleError(5, None, "conv1 wgrad", is_total=True, problem="wgrad 2x3x9x9 -> 8")

    copy = pickle.loads(pickle.dumps(error))

    assert (copy.limit_bytes, copy.least_bytes, copy.site, copy.is_total) == (5, None, "conv1 wgrad", True)
    assert copy.problem == "wgrad 2x3x9x9 -> 8"
    assert str(copy) == str(error)


def test_a_warning_names_the_users_line() -> None:
    with pytest.warns(UserWarning, match="Beware") as told:
        errors.warn_user("Beware.", UserWarning)

    assert [warning.filename for warning in told] == [__file__]


def test_a_warning_from_generated_code_names_who_called_that() -> None:
    nameless: dict[str, Any] = {"warn": errors.warn_user, "kind": UserWarning}
    exec("def generated():\n    warn('Beware.', kind)", nameless)  # as PyTorch's compilers do

    with pytest.warns(UserWarning, match="Beware") as told:
        nameless["generated"]()

    assert [warning.filename for warning in told] == [__file__]


def test_a_warning_from_a_thread_without_a_line_of_the_users_is_given_all_the_same() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _thread.start_new_thread(errors.warn_user, ("Beware.", UserWarning))
        until = time.monotonic() + 30
        while not told and time.monotonic() < until:
            time.sleep(0.01)

    assert [(str(warning.message), warning.filename) for warning in told] == [("Beware.", errors.__file__)]
