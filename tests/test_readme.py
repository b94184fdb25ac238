"""What the README shows runs, and what it names is there."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import mucudnn
from bench.by_hand import a_plan_for
from mucudnn.cli import main
from tests.models import a_batch, a_chain

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
READMES = [
    path.relative_to(ROOT)
    for folder in (
        "",
        "mucudnn",
        "mucudnn/algorithms",
        "mucudnn/backends/cudnn",
        "mucudnn/recordings",
        "bench",
        "bench/results",
    )
    for path in (ROOT / folder).glob("*.md")
]


PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.usefixtures("one_thread")
def test_the_one_line_of_the_first_screen_tunes_a_model() -> None:
    names = {"mucudnn": mucudnn, "images": a_batch(), "model": a_chain()}

    exec(PROGRAMS[0], names)

    assert len(mucudnn.plan_of(names["model"]).sites) == 5  # of two convolutions; images need no gradient


@pytest.mark.usefixtures("one_thread")
def test_the_first_program_tunes_and_shows_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"loader": [(a_batch(), torch.zeros(8))], "model": a_chain()}

    exec(PROGRAMS[1], names)

    assert len(mucudnn.plan_of(names["model"]).sites) == 5
    assert capsys.readouterr().out.startswith("Before: PyTorch's own convolution.")


@pytest.mark.usefixtures("one_thread")
def test_the_second_program_compares_a_step_and_shows_what_came_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, image = nn.Conv2d(4, 4, 3), torch.zeros(4, 4, 6, 6)
    mucudnn.apply(model, a_plan_for(model, image))

    exec(textwrap.dedent(PROGRAMS[2]), {"mucudnn": mucudnn, "model": model, "step": lambda: model(image)})

    assert capsys.readouterr().out.startswith("A step with PyTorch's own convolutions")
    assert "<svg" in (tmp_path / "step.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "command",
    re.findall(r"^    mucudnn (.* --backend replay:.*)$", TEXT, re.MULTILINE),
    ids=["xeon", "h200", "h200-deepbench"],
)
def test_the_recordings_answer_as_they_are_asked(command: str) -> None:
    result = CliRunner().invoke(main, shlex.split(command))

    assert result.exit_code == 0, result.stderr
    assert "nothing was measured here" in result.stdout


@pytest.mark.usefixtures("one_thread")
def test_the_rows_of_the_first_screen_are_those_of_the_recording() -> None:
    command = "tune bench.networks:resnet18 --channels-last --input 64x3x32x32 --workspace-limit 16MiB"
    result = CliRunner().invoke(main, [*shlex.split(command), "--backend", "replay:xeon"])
    told = {tuple(line.split()) for line in result.stdout.splitlines()}

    rows = re.findall(r"^    ((?:stage4|  (?:fprop|dgrad|wgrad|call) ).*)$", TEXT, re.MULTILINE)
    assert len(rows) == 9
    assert [row for row in rows if tuple(row.split()) not in told] == []


def test_every_command_and_target_is_told_of() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)) - {"help", "clean"}

    told = TEXT + (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert {name for name in targets if f"make {name}`" not in told} == set()
    assert {name for name in main.commands if not re.search(rf"mucudnn .*{name}|`{name}`", TEXT)} == set()


def test_every_room_is_on_the_picture() -> None:
    (picture,) = re.findall(r"^## Where things are\n(.*?)^Imports go down", TEXT, re.DOTALL | re.MULTILINE)
    rooms = {path.name for path in (ROOT / "mucudnn").iterdir() if path.suffix == ".py"}
    rooms |= {f"{path.parent.name}/" for path in (ROOT / "mucudnn").glob("*/__init__.py")}

    assert {name for name in rooms - {"__main__.py"} if name not in picture} == set()
    named = set(re.findall(r"[\w*]+\.py", picture))
    assert {
        name for name in named if not [*(ROOT / "mucudnn").rglob(name), *ROOT.glob(f"bench/{name}")]
    } == set()


@pytest.mark.parametrize("path", sorted(READMES), ids=str)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        place = (ROOT / path).parent / file if file else ROOT / path
        assert place.exists(), target
        if anchor:
            assert anchor in anchors_of(place.read_text(encoding="utf-8"))


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
