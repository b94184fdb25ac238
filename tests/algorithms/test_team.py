"""A team's calls run on the threads of PyTorch's own operations, and leave them as they were."""

import _ctypes
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from mucudnn.algorithms.team import Team, team_of_torch
from tests.alone import Server, a_server

START = """
import ctypes, os, threading, time
import torch
from mucudnn.algorithms.team import team_of_torch
from mucudnn.algorithms.workers import run_on_workers, worker_scheme

threads = lambda: sorted(os.listdir('/proc/self/task'), key=int)
here = threading.get_native_id
operation = lambda: torch.ones(2**20).add_(1)
"""


def test_there_is_one_team_that_is_found_once() -> None:
    team = team_of_torch()

    assert isinstance(team, Team)
    assert team_of_torch() is team


def test_a_library_without_openmp_has_no_team() -> None:
    library = ctypes.CDLL(_ctypes.__file__)

    with pytest.raises(AttributeError, match="GOMP_parallel_start"):
        Team(library, library)


def test_an_openmp_that_is_not_pytorchs_is_told_apart_and_nothing_is_changed(
    tmp_path: Path, alone: Server
) -> None:
    script = (
        "import shutil\n"
        "from mucudnn.algorithms.team import Team\n"
        "own = next(line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line)\n"
        f"other = ctypes.CDLL(shutil.copy(own, {str(tmp_path / 'libother.so')!r}))\n"
        "for threads in (1, 3):\n"
        "    torch.set_num_threads(threads)\n"
        "    teams = [team_of_torch(), Team(other, other)]\n"
        "    print([team.is_that_of_torch for team in teams], torch.get_num_threads())"
    )

    assert alone.run(START + script).splitlines() == ["[True, False] 1", "[True, False] 3"]


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_calls_take_the_threads_that_operations_have_started_and_end_none_of_them(
    calls: int, alone: Server
) -> None:
    script = (
        "torch.set_num_threads(4); operation(); before = threads()\n"
        f"used = run_on_workers([here] * {calls})\n"
        "print(len(set(used)), {str(each) for each in used} <= set(before), threads() == before)\n"
        "operation(); print(threads() == before)"
    )

    assert alone.run(START + script).splitlines() == [f"{calls} True True", "True"]


def test_the_first_call_runs_in_the_callers_thread(alone: Server) -> None:
    assert alone.run(START + "print(run_on_workers([here] * 2)[0] == here())") == "True"


@pytest.mark.parametrize("settings", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}])
def test_a_team_smaller_than_the_calls_runs_them_all(settings: dict[str, str], tmp_path: Path) -> None:
    script = (
        "calls = [lambda number=number: (number, here()) for number in range(5)]\n"
        "results = run_on_workers(calls)\n"
        "print(worker_scheme(), [number for number, _ in results], len({thread for _, thread in results}))"
    )

    with a_server(tmp_path, **settings) as limited:
        told = limited.run(START + script)

    assert told == f"team [0, 1, 2, 3, 4] {settings['OMP_THREAD_LIMIT']}"


PRODUCTS = """
image, kernel = torch.ones(8, 16, 64, 64), torch.ones(16, 16, 3, 3)
square = torch.ones(512, 512)

def compute():
    torch.mm(square, square)
    torch.bmm(square.expand(4, 512, 512), square.expand(4, 512, 512))
    torch.conv2d(image, kernel)
    torch.linalg.qr(square)
    operation()

def busy():
    start = time.process_time(), time.thread_time()
    for _ in range(2):
        compute()
    return (time.process_time() - start[0]) / (time.thread_time() - start[1])

"""


@pytest.fixture(scope="module")
def nesting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What runs programs in which a thread of a region may begin another."""
    with a_server(
        tmp_path_factory.mktemp("nesting"), OMP_MAX_ACTIVE_LEVELS="2", MKL_DYNAMIC="FALSE"
    ) as server:
        yield server


@pytest.mark.parametrize("calls", [2, 4])
def test_no_operation_of_a_call_starts_threads_of_its_own_even_where_regions_may_be_nested(
    calls: int, nesting: Server
) -> None:
    script = (
        f"torch.set_num_threads({calls}); compute(); run_on_workers([here] * {calls}); before = threads()\n"
        f"run_on_workers([compute] * {calls}); print(threads() == before)"
    )

    assert nesting.run(START + PRODUCTS + script) == "True"


def test_a_single_call_keeps_other_threads_idle_and_operations_after_it_do_not(tmp_path: Path) -> None:
    script = (
        "torch.set_num_threads(4); compute(); before = busy(); inside, = run_on_workers([busy])\n"
        "print(before > 1.5, inside < 1.2, busy() > 1.5)"
    )

    # Threads that spin while they wait would count as busy.
    with a_server(tmp_path, GOMP_SPINCOUNT="0", OMP_WAIT_POLICY="PASSIVE") as sleeping:
        told = sleeping.run(START + PRODUCTS + script)

    assert told == "True True True"


def test_mkl_has_one_thread_in_a_call_and_its_own_number_after_it(alone: Server) -> None:
    script = (
        "mkl = ctypes.CDLL(torch.__path__[0] + '/lib/libtorch_cpu.so').MKL_Get_Max_Threads\n"
        "def elsewhere():\n"
        "    seen = []\n"
        "    thread = threading.Thread(target=lambda: seen.append((mkl(), torch.get_num_threads(), mkl())))\n"
        "    thread.start(); thread.join(); return seen\n"
        "torch.set_num_threads(3); before = elsewhere(); inside = run_on_workers([mkl] * 3)\n"
        "print(inside, mkl(), before == elsewhere())"
    )

    assert alone.run(START + script) == "[1, 1, 1] 3 True"


def test_several_threads_have_teams_one_after_the_other(alone: Server) -> None:
    script = (
        "seen = []\n"
        "def caller():\n"
        "    for _ in range(200):\n"
        "        seen.append(run_on_workers([here, lambda: torch.ones(9).sum().item()]) == [here(), 9])\n"
        "callers = [threading.Thread(target=caller) for _ in range(4)]\n"
        "[each.start() for each in callers]; [each.join() for each in callers]\n"
        "print(len(seen), all(seen))"
    )

    assert alone.run(START + script) == "800 True"
