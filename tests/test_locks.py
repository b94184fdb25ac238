"""Locks in a process that forks."""

import copy
import os
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest

from mucudnn.locks import ForkSafeLock, cached_property
from tests.forks import in_a_child


def is_free(lock: ForkSafeLock) -> bool:
    """Whether another thread could take it."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout_s=0))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def held() -> Iterator[ForkSafeLock]:
    """A lock that another thread holds."""
    lock, is_taken, is_over = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_taken.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_taken.wait()
    yield lock
    is_over.set()
    thread.join()


def test_only_one_thread_holds_it(held: ForkSafeLock) -> None:
    assert not held.acquire(timeout_s=0)


def test_its_thread_may_take_it_again() -> None:
    lock = ForkSafeLock()

    with lock, lock:
        assert not is_free(lock)

    assert is_free(lock)


def test_a_forked_child_finds_it_free_though_another_thread_held_it(held: ForkSafeLock) -> None:
    assert in_a_child(lambda: held.acquire(timeout_s=0))
    assert not held.acquire(timeout_s=0)


def test_the_thread_that_forks_goes_on_holding_what_it_held() -> None:
    lock = ForkSafeLock()

    def check() -> bool:
        is_held = not is_free(lock)
        lock.release()
        return is_held and is_free(lock)

    with lock:
        assert in_a_child(check)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))])
def test_a_copy_is_another_lock(held: ForkSafeLock, copied: Callable[[ForkSafeLock], ForkSafeLock]) -> None:
    assert is_free(copied(held))


class Lengthy:
    """Whoever has something that takes long to compute, but in a forked child."""

    def __init__(self, is_begun: threading.Event, is_over: threading.Event) -> None:
        self._is_begun = is_begun
        self._is_over = is_over
        self._process = os.getpid()
        self.computed = 0

    @cached_property
    def result(self) -> bool:
        self.computed += 1
        self._is_begun.set()
        return os.getpid() != self._process or self._is_over.wait()


def test_a_forked_child_computes_what_another_thread_was_computing() -> None:
    is_begun, is_over = threading.Event(), threading.Event()
    here, there = (Lengthy(is_begun, is_over) for _ in range(2))
    thread = threading.Thread(target=lambda: here.result)
    thread.start()
    is_begun.wait()

    try:
        found = in_a_child(lambda: here.result and there.result)
    finally:
        is_over.set()
        thread.join()

    assert found
    assert (here.result, here.computed) == (True, 1)
