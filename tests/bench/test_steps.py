"""The same step and plan in float64."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from bench.steps import in_float64
from mucudnn.division import Division
from mucudnn.patching.applying import apply
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.plans import a_plan_for

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGES = torch.randn(6, 16, 9, 9, generator=torch.Generator().manual_seed(0))


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))


def with_parts(plan: Plan, *parts: Candidate) -> Plan:
    """The same plan with these parts for every site, and no other candidates."""
    changed = (
        dataclasses.replace(each, division=Division(parts), candidates=(), evidence=None)
        for each in plan.assignments
    )
    return dataclasses.replace(plan, assignments=tuple(changed))


def test_what_is_for_float32_alone_runs_as_pytorchs_own_in_float64() -> None:
    model = a_model()
    parts = (
        Candidate("cpu:aten", 1, 1e-3, 64),
        Candidate("cpu:im2col", 2, 1e-3, 2**17),
        Candidate("cpu:bf16x3", 3, 1e-3, 2**18),
    )
    exact = in_float64(with_parts(a_plan_for(model, IMAGES), *parts))

    divisions = {assigned.site.op: assigned.division for assigned in exact.assignments}
    assert set(divisions) == {ConvOp.FPROP, ConvOp.WGRAD}
    for division in divisions.values():
        ran = [(part.algorithm, part.batch, part.workspace_bytes) for part in division.parts]
        assert ran == [("cpu:aten", 1, 128), ("cpu:aten", 3, 2**19), ("cpu:im2col", 2, 2**18)]

    twin, images = copy.deepcopy(model).double(), IMAGES.double()
    patched = apply(copy.deepcopy(twin), exact)
    assert (patched(images) - twin(images)).abs().max() < 1e-12
