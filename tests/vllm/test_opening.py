"""When the engine's store is opened, by whom, and what becomes of one that nobody wants any more."""

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvdisk.errors import DirectoryInUseError
from kvdisk.service import CLOSE_S_MAX
from kvdisk.vllm.opening import RETRY_S, Opening


class FakeService:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Desk:
    """An opening whose attempts end as `outcomes` say, each once it `may_go_on`, and its clock."""

    def __init__(self, *outcomes: Any) -> None:
        self.now = 0.0
        self.threads: list[threading.Thread] = []
        self.may_go_on = threading.Event()
        self._outcomes = list(outcomes)
        self.opening = Opening(self._open, lambda: self.now)

    def _open(self) -> Any:
        self.threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            self.may_go_on.wait()
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def retry(self) -> None:
        """Begin the next attempt."""
        self.now += RETRY_S
        assert self.opening.attempt() is None
        assert self.opening._running is not None

    def end(self) -> None:
        """Let the attempt end."""
        running = self.opening._running
        assert running is not None
        self.may_go_on.set()
        running.join()


IN_USE = DirectoryInUseError("in use by pid 7")


def test_the_first_attempt_is_made_at_once_so_that_a_restarted_engine_hits_at_once() -> None:
    service = FakeService()
    desk = Desk(service)
    assert desk.opening.attempt() is service
    assert desk.threads == [threading.main_thread()]
    assert not desk.opening.pending
    assert desk.opening.attempt() is None, "a store has one owner"


@pytest.mark.parametrize("error", [IN_USE, OSError(5, "EIO"), TimeoutError(110, "the ledger is locked")])
def test_later_attempts_do_not_keep_the_scheduler(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    desk = Desk(error, error, service)
    assert desk.opening.attempt() is None
    assert desk.opening.attempt() is None
    assert len(desk.threads) == 1, "not before its time"
    desk.retry()
    assert desk.opening.attempt() is None, "still at it"
    desk.end()
    assert desk.opening.attempt() is None, "it failed again"
    assert desk.opening.pending
    desk.retry()
    desk.end()
    assert desk.opening.attempt() is service
    assert not desk.opening.pending
    assert threading.main_thread() not in desk.threads[1:]
    assert len(desk.threads) == 3
    assert sum("is OFF until" in record.getMessage() for record in caplog.records) == 2
    desk.opening.give_up()
    assert service.closed == 0, "it was taken"


def test_a_later_attempt_that_fails_for_good_is_the_last_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(IN_USE, ValueError("a root that cannot be used"))
    desk.opening.attempt()
    desk.retry()
    desk.end()
    assert desk.opening.attempt() is None
    assert not desk.opening.pending
    assert "a root that cannot be used" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def open_before(desk: Desk) -> None:
    desk.end()
    desk.opening.give_up()


def open_after(desk: Desk) -> None:
    running: Any = desk.opening._running
    desk.opening.give_up()
    desk.may_go_on.set()
    running.join()


@pytest.mark.parametrize("race", [open_before, open_after])
def test_what_is_opened_when_nobody_wants_it_any_more_is_closed(
    race: Callable[[Desk], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdisk.vllm.opening._GIVE_UP_S", 0.0)
    service = FakeService()
    desk = Desk(IN_USE, service)
    desk.opening.attempt()
    desk.retry()
    race(desk)
    assert service.closed == 1
    assert not desk.opening.pending
    assert desk.opening.attempt() is None


def test_without_threads_it_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(IN_USE, FakeService())
    desk.opening.attempt()
    desk.now += RETRY_S

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert desk.opening.attempt() is None
    assert desk.opening.attempt() is None
    assert desk.opening._running is None
    desk.retry()
    desk.end()


def test_a_store_is_closed_before_vllm_kills_the_engine() -> None:
    from vllm.v1.utils import shutdown

    assert "timeout = 5.0" in inspect.getsource(shutdown)
    assert CLOSE_S_MAX < 5.0
