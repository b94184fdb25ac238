"""`mucudnn compare`."""

import copy
import dataclasses
import errno
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import nn

from bench.by_hand import a_plan_for
from mucudnn.cli.compare import is_for_inference
from mucudnn.comparing import steps
from mucudnn.comparing.step_comparison import StepComparison
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from tests.cli.commands import assert_one_sentence, run

INPUT = ("--input", "4x3x8x8")


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[str, Path]:
    """Plans that patch a convolution, for training and for inference."""
    image = torch.zeros(4, 3, 8, 8)
    made = {
        "training": a_plan_for(nn.Conv2d(3, 4, 3), image),
        "inference": a_plan_for(nn.Conv2d(3, 4, 3).eval(), image),
        "nothing": dataclasses.replace(a_plan_for(nn.Conv2d(3, 4, 3), image), assignments=()),
    }
    for name, plan in made.items():
        plan.save(folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in made}


def compare(name: str, plan: Path, *arguments: str | Path) -> Result:
    return run("compare", f"models_of_a_test:{name}", *INPUT, "--plan", plan, "--rounds", "6", *arguments)


@pytest.mark.parametrize("use", ["training", "inference"])
def test_a_saved_plan_is_timed_within_its_model(use: str, plans: dict[str, Path]) -> None:
    result = compare("conv", plans[use])

    title, table, _ = result.stdout.split("\n\n")
    assert (result.exit_code, result.stderr) == (0, "a model is being made\n")
    assert title.startswith("A step with PyTorch's own convolutions")
    names = [line.strip().partition("  ")[0] for line in table.splitlines()[2:]]
    assert names == ["the whole step", "its patched convolutions", "the model itself"]
    assert "6 of the whole step, 6 more of its convolutions" in result.stdout


def test_whether_a_plan_is_for_inference_it_says_itself_and_another_wish_is_refused(
    plans: dict[str, Path],
) -> None:
    result = compare("conv", plans["training"], "--eval")

    assert compare("conv", plans["inference"], "--eval").exit_code == 0
    assert result.exit_code == 2
    assert (
        "Invalid value for '--eval': the plan is for training; leave this out, or tune with --eval."
        in result.stderr
    )


def test_json_is_all_that_is_printed_and_the_settled_plan_is_saved(
    plans: dict[str, Path], tmp_path: Path
) -> None:
    settled = tmp_path / "settled.json"

    result = compare("conv", plans["training"], "--json", "-o", settled)

    values = json.loads(result.stdout)
    assert (values["report"], len(values["step"]["now_ns"])) == ("step", 6)
    assert [each["path"] for each in values["convolutions"]] == [""]
    assert Plan.load(settled).sites.keys() == Plan.load(plans["training"]).sites.keys()
    assert result.stderr.endswith(f"The plan, unchanged, is saved in {settled}.\n")


def test_a_plan_of_which_something_was_taken_back_is_saved_as_it_is_then(
    plans: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, settled = (
        tmp_path / "settled.json",
        dataclasses.replace(Plan.load(plans["training"]), version="9"),
    )

    compared = steps.compare

    def taking_back(*arguments: Any, **options: Any) -> StepComparison:
        return dataclasses.replace(compared(*arguments, **options), settled=settled)

    monkeypatch.setattr(steps, "compare", taking_back)
    result = compare("conv", plans["training"], "-o", output)

    assert Plan.load(output) == settled
    assert result.stdout.endswith(f"The settled plan is saved in {output}.\n")


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_what_was_measured_is_printed_though_it_cannot_be_kept(
    option: str, plans: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mucudnn.plan.Plan.save", fails)
    monkeypatch.setattr("mucudnn.cli.compare.draw_comparison", fails)

    result = compare("conv", plans["inference"], option, tmp_path / "found.svg")

    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "its patched convolutions" in result.stdout


def test_notes_are_as_wide_as_a_narrow_terminal(
    plans: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mucudnn.cli.output.columns", lambda _: 60)

    notes = compare("conv", plans["inference"]).stdout.split("\n\n")[-1].splitlines()

    assert 50 < max(map(len, notes)) <= 60


def test_it_is_drawn_with_its_table(plans: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "step.html"

    result = compare("conv", plans["inference"], "--plot", page)

    assert result.stdout.endswith(f"It is drawn in {page}.\n")
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "its patched convolutions" in text


def test_a_picture_of_another_kind_is_refused_before_anything_runs(
    plans: dict[str, Path], tmp_path: Path
) -> None:
    result = compare("conv", plans["inference"], "--plot", tmp_path / "step.gif")

    assert result.exit_code == 2
    assert "must end in" in " ".join(result.stderr.split())
    assert "a model is being made" not in result.stderr


def test_gradients_of_all_that_a_model_returns_are_computed(plans: dict[str, Path], folder: Path) -> None:
    (folder / "returning.py").write_text(
        "from torch import nn\n"
        "class Returning(nn.Conv2d):\n"
        "    def forward(self, image):\n"
        "        result = super().forward(image)\n"
        "        return {'result': [result, result.detach(), 3]}\n"
        "def made():\n"
        "    return Returning(3, 4, 3)\n"
        "class Frozen(nn.Conv2d):\n"
        "    def forward(self, image):\n"
        "        return super().forward(image).detach()\n"
        "def frozen():\n"
        "    return Frozen(3, 4, 3)\n"
    )

    made = run("compare", "returning:made", *INPUT, "--plan", plans["training"], "--rounds", "6")
    frozen = run("compare", "returning:frozen", *INPUT, "--plan", plans["training"], "--rounds", "6")

    assert made.exit_code == 0
    assert_one_sentence(frozen, "mucudnn: The model cannot be run: it returns nothing that has a gradient")


def test_a_plan_that_does_not_suit_is_refused(plans: dict[str, Path]) -> None:
    result = compare("wide", plans["training"])

    assert result.exit_code == 1
    assert "but here it has weight (64, 64, 3, 3)" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("is_inference", [True, False])
def test_within_autocast_a_plan_made_so_runs_as_it_was_planned(is_inference: bool, tmp_path: Path) -> None:
    model, path = nn.Conv2d(3, 4, 3).train(not is_inference), tmp_path / "plan.json"
    with torch.autocast("cpu", torch.bfloat16):
        a_plan_for(model, torch.zeros(4, 3, 8, 8)).save(path)

    within, without = (compare("conv", path, *options) for options in (("--autocast", "bf16"), ()))

    assert (within.exit_code, without.exit_code) == (0, 0)
    assert "not as planned" not in within.stdout
    assert "not as planned" in without.stdout


def test_the_backward_pass_runs_outside_of_autocast(folder: Path) -> None:
    (folder / "watched.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "forward, backward = set(), set()\n"
        "class Watched(nn.Conv2d):\n"
        "    def forward(self, image):\n"
        "        forward.add(torch.is_autocast_enabled('cpu'))\n"
        "        result = super().forward(image)\n"
        "        result.register_hook(lambda _: backward.add(torch.is_autocast_enabled('cpu')))\n"
        "        return result\n"
        "def made():\n"
        "    return Watched(3, 4, 3)\n"
    )
    with torch.autocast("cpu", torch.bfloat16):
        a_plan_for(nn.Conv2d(3, 4, 3), torch.zeros(4, 3, 8, 8)).save(folder / "watched.json")

    options = ("--plan", folder / "watched.json", "--rounds", "6", "--autocast", "bf16")
    result = run("compare", "watched:made", *INPUT, *options)

    assert result.exit_code == 0, result.stderr
    watched = importlib.import_module("watched")
    assert (watched.forward, watched.backward) == ({True}, {False})


def test_a_plan_that_patches_nothing_is_told_of_and_saved(plans: dict[str, Path], tmp_path: Path) -> None:
    settled, drawn = tmp_path / "settled.json", tmp_path / "step.svg"

    result = compare("conv", plans["nothing"], "-o", str(settled), "--plot", str(drawn))

    assert result.exit_code == 0
    assert re.search(r"^no patches +The plan leaves PyTorch", result.stdout, re.MULTILINE)
    assert "paid back" not in result.stdout
    assert settled.read_bytes() == plans["nothing"].read_bytes()
    assert drawn.exists()


def test_a_model_that_cannot_be_run_is_told_so(plans: dict[str, Path]) -> None:
    result = run(
        "compare", "models_of_a_test:conv", "--input", "4x5x8x8", "--plan", plans["training"], "--rounds", "6"
    )

    assert result.exit_code == 1
    assert "mucudnn: The model cannot be run: " in result.stderr


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_plan_tells_whether_it_is_for_inference(kind: type[nn.Module]) -> None:
    image, model = torch.zeros(4, 3, 8, 8), kind(3, 4, 3)
    training = a_plan_for(model, image)
    gradients = tuple(each for each in training.assignments if each.site.op is ConvOp.WGRAD)

    assert is_for_inference(a_plan_for(copy.deepcopy(model).eval(), image), model)
    assert not is_for_inference(training, model)
    assert not is_for_inference(dataclasses.replace(training, assignments=gradients), model)


def test_a_model_that_makes_its_parameters_in_its_first_call_is_compared(
    plans: dict[str, Path], folder: Path
) -> None:
    (folder / "lazy.py").write_text(
        "from torch import nn\ndef made():\n    return nn.Sequential(nn.LazyConv2d(4, 3))\n"
    )
    plan = a_plan_for(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), torch.zeros(4, 3, 8, 8))
    plan.save(folder / "lazy.json")

    result = run("compare", "lazy:made", *INPUT, "--plan", folder / "lazy.json", "--rounds", "6")

    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_parameters_that_the_first_call_makes_are_laid_out_too(command: str, folder: Path) -> None:
    (folder / "lazy_norm.py").write_text(
        "from torch import nn\n"
        "model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())\n"
        "def made():\n    return model\n"
    )
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    image = torch.zeros(4, 3, 8, 8).to(memory_format=torch.channels_last)
    a_plan_for(twin, image).save(folder / "lazy_norm.json")
    options = {
        "tune": ("--workspace-limit", "1MiB", "--policy", "undivided", "--store", folder / "lazy_norm"),
        "compare": ("--plan", folder / "lazy_norm.json", "--rounds", "6"),
    }

    result = run(command, "lazy_norm:made", *INPUT, "--channels-last", *options[command])

    assert result.exit_code == 0, result.stderr
    assert (
        importlib.import_module("lazy_norm").model[0].weight.is_contiguous(memory_format=torch.channels_last)
    )
    del sys.modules["lazy_norm"]


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_the_first_call_that_makes_parameters_runs_within_autocast_too(command: str, folder: Path) -> None:
    (folder / "lazy_mixed.py").write_text(
        "from torch import nn\n"
        "class Mixed(nn.Conv2d):\n"
        "    def forward(self, image):\n"
        "        return super().forward(image.bfloat16())\n"  # parameters are float32: autocast must help
        "def made():\n    return nn.Sequential(nn.LazyConv2d(3, 1), Mixed(3, 4, 3))\n"
    )
    with torch.autocast("cpu", torch.bfloat16):
        twin = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 3))
        a_plan_for(twin, torch.zeros(4, 3, 8, 8)).save(folder / "lazy_mixed.json")
    options = {
        "tune": ("--workspace-limit", "1MiB", "--policy", "undivided", "--store", folder / "lazy_mixed"),
        "compare": ("--plan", folder / "lazy_mixed.json", "--rounds", "6"),
    }

    result = run(command, "lazy_mixed:made", *INPUT, "--autocast", "bf16", *options[command])

    assert result.exit_code == 0, result.stderr
    assert "not as planned" not in result.stdout


def test_a_picture_is_refused_in_the_place_of_the_settled_plan(
    plans: dict[str, Path], tmp_path: Path
) -> None:
    both = tmp_path / "both.html"

    result = compare("conv", plans["training"], "-o", both, "--plot", both)

    assert result.exit_code == 2
    assert "the plan itself is saved in" in " ".join(result.stderr.split())
    assert not both.exists()


def test_too_few_rounds_are_a_usage_error(plans: dict[str, Path]) -> None:
    result = run("compare", "models_of_a_test:conv", *INPUT, "--plan", plans["training"], "--rounds", "5")

    assert result.exit_code == 2
    assert "5 is not in the range x>=6" in result.stderr
