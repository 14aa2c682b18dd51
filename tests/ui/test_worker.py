import threading

from sgnb.ui.worker import Worker


def test_what_is_asked_for_meanwhile_is_done_once_more_and_never_twice_at_a_time() -> None:
    entered, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        entered.set()
        assert go_on.wait(10)
        done.append(threading.current_thread().name)

    worker = Worker(work, "sgnb-test")
    worker.ask()
    assert entered.wait(10)
    for _ in range(5):
        worker.ask()
    go_on.set()
    assert worker.wait(10)
    assert done == ["sgnb-test", "sgnb-test"]


def test_a_closed_worker_begins_nothing() -> None:
    done: list[int] = []
    worker = Worker(lambda: done.append(1), "sgnb-test")
    worker.close()
    worker.ask()
    assert worker.wait(10)
    assert done == []
