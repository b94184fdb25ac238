"""A recording of a card, in several precisions and layouts, is replayed without one."""

import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn
from bench import record
from bench.record import AIMS, Recorder, Watch, recording
from bench.workloads import SETTINGS, Setting, Workload, operands
from mucudnn import tuner
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.environment import present_rules
from mucudnn.backends.cudnn.library import load_library
from mucudnn.errors import OptionError
from mucudnn.execution import weighing
from mucudnn.plan import Plan
from mucudnn.profile import Environment
from tests.cudnn.paper import PaperCard, PaperLibrary, paper_backend

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
SMALL = Workload("small", lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), (4, 8, 6, 6))
FIRST = SETTINGS[:3]


class ObedientCard(PaperCard):
    """A card on paper that PyTorch's flags bind, and whose environment says so, as that of one of silicon."""

    @property
    def rules(self) -> Rules:
        return present_rules()

    @rules.setter
    def rules(self, rules: Rules) -> None:
        pass

    def environment(self, cudnn_version: int | None) -> Environment:
        flags = {"TF32": str(self.rules.allow_tf32)}
        return Environment("cudnn", {"name": "paper"}, {"cuDNN": str(cudnn_version)}, flags)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a recording in the first settings, packed."""
    (tmp_path / "plans").mkdir()
    card = ObedientCard()
    looks = itertools.count(0, 100_000)
    card.clock = lambda: next(looks)
    backend = paper_backend(PaperLibrary(load_library()), card)
    backend.least_span_ns = 1
    with monkeypatch.context() as patch:
        for module, name in ((record, "backend_for"), (tuner, "backend_for"), (weighing, "backend_of")):
            patch.setattr(module, name, lambda *_: backend)
        Recorder(tmp_path, CPU, Watch(time.monotonic() + 600)).record([SMALL], FIRST)
    with recording(tmp_path) as store:
        store.pack(tmp_path / record.PACKED)
    return tmp_path


def replayed(folder: Path, setting: Setting, aim: record.Aim, number: str) -> Plan:
    model, sample = operands(SMALL, setting, CPU)
    name = f"replay:{folder / record.PACKED}{number}"
    return mucudnn.tune(model, sample, aim.limit, mode=aim.mode, backend=name)


def test_settings_with_and_without_tf32_are_told_apart_by_number(folder: Path) -> None:
    plans = {
        (setting, aim): Plan.load(folder / f"plans/small.{setting.name}.{aim.name}.json")
        for setting, aim in itertools.product(FIRST, AIMS)
    }

    for (setting, aim), plan in plans.items():
        again = replayed(folder, setting, aim, "#2" if setting.allow_tf32 else "#1")

        assert again.sites == plan.sites
        assert again.environment.policy == {"TF32": str(setting.allow_tf32)}
        tried = {each.algorithm for assigned in again.assignments for each in assigned.candidates}
        assert any(name.startswith("cudnn:eng") for name in tried)
    with pytest.raises(OptionError, match=r"#1: cudnn, setting TF32 False; #2: cudnn, setting TF32 True"):
        replayed(folder, FIRST[0], AIMS[0], "")
