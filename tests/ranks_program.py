"""What each rank of a distributed run does, one thing after another; writes what it finds to RANK.json.

The ranks are forked from one process, which has loaded what they need and computed nothing.

python -m tests.ranks_program FOLDER
"""

import copy
import dataclasses
import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from bench.by_hand import a_plan_for
from mucudnn.errors import BackendError, MucudnnError
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.patching.patched import PatchedForward
from tests.models import a_batch, a_chain

RANKS = 2

RUNS = (
    "ddp", "fsdp", "ddp_first", "fsdp_first", "flat_first", "other_model", "other_threads", "other_limit",
    "failing", "nothing", "compared",
)  # fmt: skip


def main() -> None:
    """Fork the ranks and wait for them; fail if one of them does."""
    folder, ranks = Path(sys.argv[1]), []
    for rank in range(RANKS):
        number = os.fork()
        if number == 0:
            _run(rank, folder)
        ranks.append(number)
    statuses = [os.waitpid(number, 0)[1] for number in ranks]
    sys.exit(any(statuses))


def _run(rank: int, folder: Path) -> NoReturn:
    """Tune with the other rank, train a step, for each of the runs, write what was found, and end."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found = {}
    for what in RUNS:
        sys.stderr.write(f"rank {rank}, {what}\n")  # which a failure follows
        found[what] = _found(rank, folder, what)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # past the end of torch's own threads, one of which has aborted a process that was done


def _found(rank: int, folder: Path, what: str) -> dict[str, Any]:
    torch.set_num_threads(2 if what == "other_threads" and rank == 1 else 1)
    torch.manual_seed(0)
    twin = a_chain().double()
    model = copy.deepcopy(twin)
    if what == "other_model" and rank == 1:
        model = nn.Sequential(nn.Conv2d(3, 4, 5)).double()
    if what == "nothing" and rank == 1:
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2)).double()
    if what.endswith("_first"):
        model = _wrapped(what, model)
    images = a_batch(dtype=torch.float64)
    if what == "compared":
        return _compared(rank, model, images)
    seen: list[int] = []
    own = LiveMeasurer.measure

    def measure(*args: Any) -> Any:
        if what == "failing":
            raise BackendError("nothing can be measured")
        seen.append(1)
        return own(*args)

    LiveMeasurer.measure = measure  # type: ignore[method-assign]
    try:
        limit = "32MiB" if what == "other_limit" and rank == 1 else "64MiB"
        mucudnn.optimize(model, limit, images, store=folder / f"{what}{rank}", progress=False)
    except MucudnnError as error:
        return {"error": f"{type(error).__name__}: {error}", "measured": len(seen)}
    finally:
        LiveMeasurer.measure = own  # type: ignore[method-assign]
    text = mucudnn.plan_of(model).to_text()
    images = images + rank
    wrapped = model if what.endswith("_first") else _wrapped(what, model)
    other = _wrapped(what, twin)
    for each in (wrapped, other):
        each(images).square().mean().backward()
    differences = [
        (_whole(one.grad) - _whole(another.grad)).abs().max().item()
        for one, another in zip(wrapped.parameters(), other.parameters(), strict=True)
    ]
    return {
        "plan": hashlib.sha256(text.encode()).hexdigest(),
        "measured": len(seen),
        "largest": max(differences),
        "gradients": sum(_whole(each.grad).abs().sum().item() for each in other.parameters()),
    }


def _compared(rank: int, model: nn.Module, images: torch.Tensor) -> dict[str, Any]:
    """Compare a step in which the first rank finds every patched convolution slower, and the other none."""
    plan = a_plan_for(model, images)
    same = Evidence(reference=Estimate(1.0, 1.0, 1.0, 10), chosen=Estimate(1.0, 1.0, 1.0, 10))
    assignments = tuple(dataclasses.replace(each, evidence=same) for each in plan.assignments)
    mucudnn.apply(model, dataclasses.replace(plan, assignments=assignments))
    slow: Any = PatchedForward if rank == 0 else nn.Conv2d
    method = "__call__" if rank == 0 else "_conv_forward"
    own = getattr(slow, method)

    def slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return own(*args)

    setattr(slow, method, slowly)
    wrapped = DistributedDataParallel(model)
    try:
        seen = mucudnn.compare(model, lambda: wrapped(images).square().mean().backward(), progress=False)
    finally:
        setattr(slow, method, own)
    text = seen.settled.to_text()
    return {
        "rounds": len(seen.step.now_ns),
        "slower": len(seen.slower),
        "slower_here": sum(layer.times.verdict is Verdict.SLOWER for layer in seen.layers),
        "layers": len(seen.layers),
        "settled": hashlib.sha256(text.encode()).hexdigest(),
        "algorithms": sorted({part.algorithm for each in seen.settled.sites.values() for part in each.parts}),
    }


def _wrapped(what: str, model: nn.Module) -> Any:
    if what.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (RANKS,))
        return fully_shard(model, mesh=mesh)
    if what.startswith("flat"):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return DistributedDataParallel(model)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    main()
