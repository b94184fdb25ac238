"""What holds for every test: no deadlines, no test touches the user's store, nothing is skipped unsaid."""

import gc
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.alone import Server, a_server
from tests.breadth import be_thorough, is_thorough
from tests.threads import threads

# Before torch is loaded: threads of two processes that test on two processors sleep while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Much that a test makes lives as long as the process, so garbage is looked for less often.
gc.set_threshold(50_000, 20, 10)

hypothesis.settings.register_profile("mucudnn", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("mucudnn")

_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="Fail where a test finds no GPU.")
    parser.addoption("--no-deviceless", action="store_true", help="Leave out what needs the cuDNN library.")
    parser.addoption("--thorough", action="store_true", help="Try whole products, and more examples.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deviceless: needs the real cuDNN library, and no GPU")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "lists: counts what cuDNN lists, which differs between releases")
    config.addinivalue_line(
        "markers", "thorough: left out of products and lists of which the rest is tried; see tests/breadth.py"
    )
    config.stash[_LEFT_OUT] = {}
    if config.getoption("--thorough"):
        be_thorough()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave garbage where it is while tests are collected: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)  # after what -k and -m leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was told to be left out, and what cannot run; the summary says how much that is."""
    if config.getoption("--no-deviceless"):
        _leave_out(_marked("deviceless", items), "of the real cuDNN library (--no-deviceless)", config, items)
    lists = _marked("lists", items)
    if lists and not _lists_as_counted():
        _leave_out(lists, "that count what cuDNN 9.19 and 9.20 list, beside another", config, items)
    on_gpu = _marked("gpu", items)  # else torch is not even loaded
    if on_gpu and not config.getoption("--require-gpu") and not _has_gpu():
        _leave_out(on_gpu, "on a GPU, of which there is none", config, items)
    if not config.getoption("--thorough"):
        _leave_out(_marked("thorough", items), "of whole products (--thorough)", config, items)


def _marked(marker: str, items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item.get_closest_marker(marker)]


def _leave_out(
    left_out: list[pytest.Item], what: str, config: pytest.Config, items: list[pytest.Item]
) -> None:
    found = set(left_out)
    items[:] = [item for item in items if item not in found]
    config.hook.pytest_deselected(items=left_out)
    config.stash[_LEFT_OUT][what] = len(left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have one of the processes that tests are run in tell the first one what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[_LEFT_OUT]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Spare the end of the process the collection of all tests, which takes seconds."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Remember what a process left out: all of them leave out the same."""
    node.config.stash[_LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and item.config.getoption("--require-gpu") and not _has_gpu():
        pytest.fail("A GPU is required, but there is none.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, number in config.stash[_LEFT_OUT].items():
        if number:
            terminalreporter.write_line(f"NOT RUN: {number} tests {what}.", yellow=True, bold=True)


def _lists_as_counted() -> bool:
    """Tell whether the cuDNN at hand is 9.19 or 9.20, which list the same; 9.24 has other lists."""
    from mucudnn.backends.cudnn.library import load_library
    from mucudnn.errors import BackendError

    try:
        return load_library().version // 100 in (919, 920)
    except BackendError:
        return True  # and the tests say what is wrong with it


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def number_of_tests(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Have a report say how many tests were to run, so that it is seen where they broke off."""
    record_testsuite_property("collected", len(request.session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Have it say so where tests run in several processes too: all of them collect the same."""
    plugins = node.config.pluginmanager.get_plugins()
    for report in (plugin for plugin in plugins if hasattr(plugin, "add_global_property")):
        report.add_global_property("collected", len(ids))


@pytest.fixture(autouse=True, scope="session")
def cache_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user's cache of this process alone, so that tests beside it need not wait for their turn.

    What is compiled is common to the processes of a run.
    """
    own, common = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    compiled = (common.parent if hasattr(request.config, "workerinput") else common) / "compiled"
    compiled.mkdir(exist_ok=True)
    (own / "mucudnn").mkdir()
    (own / "mucudnn" / "compiled").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_children() -> Iterator[None]:
    """What weighs jobs waits for the next one as long as all tests take: to start it takes some seconds."""
    loaded = sys.modules.get("mucudnn.backends.cpu.footprint")
    with pytest.MonkeyPatch.context() as patch:
        if loaded is not None:
            timeout_s, _ = loaded.FootprintMeter.__init__.__defaults__
            patch.setattr(loaded.FootprintMeter.__init__, "__defaults__", (timeout_s, 3600.0))
        yield


def _unoptimised(source: str) -> str:
    return f'#pragma GCC optimize ("O0")\n{source}' if "typedef double" in source else source


@pytest.fixture(autouse=True, scope="session")
def doubles_compiled_quickly() -> Iterator[None]:
    """In float64 gcc compiles tiles without optimising, in a quarter of the time, but with --thorough.

    In float32, in which users have them, they are compiled as users have them.
    """
    loaded = sys.modules.get("mucudnn.algorithms.compiled.kernels")
    with pytest.MonkeyPatch.context() as patch:
        if loaded is not None and not is_thorough():
            made = loaded.library
            patch.setattr(loaded, "library", lambda source: made(_unoptimised(source)))
        yield


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of stores that do not exist yet, one after another.

    All lie in one folder, whereas a `tmp_path` costs each test the reading of all that were before it.
    """
    folder = tmp_path_factory.mktemp("stores")
    return (folder / str(number) / "profiles.sqlite3" for number in itertools.count())


@pytest.fixture(autouse=True)
def store_path(stores: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default store of this test, a file that does not exist yet."""
    path = next(stores)
    monkeypatch.setenv("MUCUDNN_STORE", str(path))
    return path


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What runs programs in processes whose environment says nothing of OpenMP."""
    with a_server(tmp_path_factory.mktemp("alone")) as server:
        yield server


@pytest.fixture
def divided_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not PyTorch's own counts as faster, so that division is seen to happen."""
    from mucudnn.tuning import run  # which loads torch

    def quickest(rivals: Any, *_: Any) -> Any:
        own = [each for each in rivals.values() if each.parts[0].algorithm.endswith("aten")]
        return next((each for each in rivals.values() if each not in own), own[0])

    monkeypatch.setattr(run, "winner", quickest)
    monkeypatch.setattr(run.WholeCalls, "is_worth_it", lambda *_: True)


@pytest.fixture(scope="module")
def few_to_collect() -> Iterator[None]:
    """For modules whose programs often collect garbage: not among all tests, which takes half a second."""
    gc.freeze()  # garbage, too, which is as well collected later
    yield
    gc.unfreeze()


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Nothing that torch.compile made for other tests is there, and nothing stays for them."""
    import torch  # not for the tests of the pure part, which never load it

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of small shapes: threads that wait for one another cost far more than they compute."""
    with threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests of what PyTorch does with several threads alone, on a machine with one processor, too."""
    with threads(2):
        yield
