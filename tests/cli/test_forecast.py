"""`mucudnn forecast`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from mucudnn.backends.cudnn.devices import device_described
from tests.alone import Server
from tests.cli.commands import assert_one_sentence, in_a_fork, run


def forecast(name: str, *arguments: str | Path) -> Result:
    return run("forecast", f"models_of_a_test:{name}", *arguments)


def values(name: str, *arguments: str | Path) -> dict[str, Any]:
    result = forecast(name, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def first_bytes(site: dict[str, Any]) -> dict[int, int]:
    return {need["batch"]: need["first_bytes"] for need in site["sizes"]}


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("options", "undivided", "at_16"),
    [((), 3136 * 2**20, 196 * 2**20), (("--channels-last",), 0, 0)],
)
def test_the_second_convolution_of_vgg_needs_a_copy_of_its_tensors_unless_channels_are_last(
    options: tuple[str, ...], undivided: int, at_16: int
) -> None:
    # 64 channels of 224² in two bytes, in and out, are 12.25 MiB a sample; a filter in two bytes has 72 KiB.
    value = values("wide_224", "--input", "256x64x224x224", "--dtype", "bf16", "--eval", *options)

    (site,) = value["sites"]
    workspaces = first_bytes(site)
    assert undivided <= workspaces[256] <= undivided + 2**17
    assert at_16 <= workspaces[16] <= at_16 + 2**17


@pytest.mark.deviceless
def test_every_kind_of_convolution_is_in_the_table() -> None:
    result = forecast("Volumes", "--input", "4x3x8x8x8", "--dtype", "half")

    lines = result.stdout.split("\n\n")[1].splitlines()
    assert (result.exit_code, result.stderr) == (0, "volumes are computed\n")
    assert lines[0].split() == ["sites", "undivided", "2", "1", "least", "at", "plans"]
    assert [line for line in lines if " -> " in line] == [
        "conv  4x3x8x8x8 -> 8, 3x3x3, padding 1, float16",
        "enlarge  4x8x8x8x8 -> 4, 2x2x2, stride 2, transposed, float16",
        "the model itself  4x4x4096 -> 1, 3, float16",
    ]
    assert [line.split()[0] for line in lines[1:] if line.startswith("  ")] == [
        "fprop", "wgrad", "dgrad", "fprop", "wgrad", "fprop", "dgrad"
    ]  # fmt: skip


@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize("options", [(), ("--eval",), ("--channels-last",)])
def test_a_model_within_autocast_needs_what_one_of_that_type_does(
    name: str, dtype: str, options: tuple[str, ...]
) -> None:
    shape = ("--input", "4x3x8x8x8", *options)

    within, cast = (values("Volumes", *shape, how, name) for how in ("--autocast", "--dtype"))

    assert {site["problem"]["dtype"] for site in within["sites"]} == {dtype}
    assert within["sites"] == cast["sites"]
    assert [text for text in within["settings"] if text not in cast["settings"]] == [f"autocast to {dtype}"]


@pytest.mark.deviceless
def test_the_layout_reaches_volumes_too() -> None:
    value = values("Volumes", "--input", "4x3x8x8x8", "--channels-last", "--eval")

    assert [site["problem"]["layout"] for site in value["sites"]] == [
        "channels_last", "channels_last", "contiguous"
    ]  # fmt: skip


@pytest.mark.deviceless
def test_rules_leave_out_plans() -> None:
    shape = ("--input", "16x64x16x16")

    usual, strict, same = (
        {site["op"]: site["sizes"][-1] for site in values("wide", *shape, *option)["sites"]}
        for option in ((), ("--no-tf32",), ("--deterministic",))
    )

    assert strict["fprop"]["plans"] < usual["fprop"]["plans"]
    assert (usual["fprop"]["on_tensor_cores"], strict["fprop"]["on_tensor_cores"]) == (True, False)
    assert same["wgrad"]["plans"] < usual["wgrad"]["plans"]
    assert same["fprop"]["plans"] == usual["fprop"]["plans"]  # the order of sums is at large in wgrad alone
    assert values("wide", *shape, "--eval", "--no-tf32", "--deterministic")["settings"] == [
        "forward pass alone", "TF32 not allowed", "nondeterministic plans not allowed"
    ]  # fmt: skip


@pytest.mark.deviceless
def test_a_limit_is_told_of_each_site() -> None:
    value = values("wide", "--input", "16x64x16x16", "--eval", "--workspace-limit", "0B", "--no-tf32")

    assert value["limit_bytes"] == 0
    assert set(value["sites"][0]["limit"]) == {"fit", "largest_batch"}


@pytest.mark.deviceless
def test_the_policy_decides_which_sizes_are_looked_at() -> None:
    value = values("wide", "--input", "3x64x8x8", "--eval", "--policy", "all")

    assert (value["policy"], list(first_bytes(value["sites"][0]))) == ("all", [1, 2, 3])


@pytest.mark.deviceless
def test_a_device_may_be_described_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(device_described("a100").text.replace("A100", "X100"))

    value = values("conv", "--input", "4x3x8x8", "--device", path)

    assert value["device"].startswith("NVIDIA X100")
    assert value["device"].endswith(f"compute capability 8.0, 108 multiprocessors (described by {path})")
    assert value["library"].startswith("cuDNN 9.")


@pytest.mark.deviceless
def test_what_the_model_prints_is_not_in_the_output() -> None:
    result = forecast("conv", "--input", "4x3x8x8", "--json")

    assert result.stderr == "a model is being made\n"
    assert json.loads(result.stdout)["sites"][0]["path"] == ""


@pytest.mark.deviceless
def test_sites_are_named_on_request() -> None:
    lines = forecast("Twins", "--input", "4x3x8x8", "--sites").stdout.splitlines()

    assert "first, second  4x3x8x8 -> 3, 3x3, padding 1, float32" in lines


@pytest.mark.deviceless
def test_a_reader_who_leaves_early_sees_no_error(alone: Server) -> None:
    arguments = ("forecast", "models_of_a_test:instance", "--input", "4x3x8x8")
    whole = in_a_fork(alone, *arguments)

    left = in_a_fork(alone, *arguments, is_read=False)

    assert whole.stdout.startswith("Workspace in MiB of the first-ranked plan")
    assert (left.returncode, left.stderr) == (1, "")  # as click ends


# What cannot be done


def test_an_unknown_device_is_answered_with_those_that_there_are() -> None:
    assert_one_sentence(
        forecast("conv", "--input", "4x3x8x8", "--device", "tpu"),
        "mucudnn: A device must be one of h200, h100, a100 or the path of a JSON file, but got 'tpu'.",
        status=2,
    )


@pytest.mark.deviceless
def test_a_model_without_convolutions_ends_with_a_sentence() -> None:
    assert_one_sentence(
        forecast("linear", "--input", "4x3"),
        "mucudnn: The model must compute a convolution on the sample, but it computes none.",
    )


@pytest.mark.deviceless
def test_a_sample_that_the_model_rejects_ends_with_a_sentence() -> None:
    assert_one_sentence(
        forecast("instance", "--input", "4x5x8x8"),
        "mucudnn: The model must run on the sample, but it raised RuntimeError(",
    )


@pytest.mark.deviceless
def test_a_model_that_has_no_parameters_yet_ends_with_a_sentence(folder: Path) -> None:
    (folder / "lazy_to_forecast.py").write_text(
        "from torch import nn\ndef made():\n    return nn.Sequential(nn.LazyConv2d(4, 3))\n"
    )

    result = run("forecast", "lazy_to_forecast:made", "--input", "4x3x8x8", "--device", "h200")

    assert_one_sentence(result, "mucudnn: lazy_to_forecast:made must call the model once before")


@pytest.mark.deviceless
def test_an_interrupt_ends_without_a_word() -> None:
    result = forecast("interrupted", "--input", "4x3x8x8")

    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.deviceless
def test_a_forecast_is_drawn_beside_what_is_printed(tmp_path: Path) -> None:
    shape = ("--input", "16x64x16x16", "--eval", "--workspace-limit", "1MiB")

    result = forecast("wide", *shape, "--plot", tmp_path / "forecast.html")

    assert result.stdout == f"{forecast('wide', *shape).stdout}It is drawn in {tmp_path / 'forecast.html'}.\n"
    assert "limit          Sites that fit into 1 MiB" in (tmp_path / "forecast.html").read_text("utf-8")


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch brings its own cuDNN")
def test_without_the_library_a_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Server
) -> None:
    monkeypatch.setenv("MUCUDNN_CUDNN_LIBRARY", str(tmp_path / "none.so"))

    finished = in_a_fork(alone, "forecast", "models_of_a_test:instance", "--input", "4x3x8x8")

    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("mucudnn: ")
    assert finished.stderr.count("\n") == 1


def test_without_a_unit_a_limit_is_a_usage_error() -> None:
    result = forecast("conv", "--input", "4x3x8x8", "--workspace-limit", "64")

    assert result.exit_code == 2
    assert "A size in a string must name its unit" in result.stderr


@pytest.mark.deviceless
def test_an_input_of_more_elements_than_can_be_counted_ends_with_a_sentence() -> None:
    result = forecast("wide_224", "--input", "10000000000x10000000000x10000000000")

    assert_one_sentence(result, "mucudnn: An input of the shape 10000000000x10000000000x10000000000 cannot")
