"""Task lists: one spelling, one digest, and draws that keep to them, with pools and without."""

from collections import Counter

import msgspec
import pytest

from shoal.protocol.encoding import WireError, digest, to_json
from shoal.protocol.task_draws import MAX_LISTED, EnvDraw, TaskList, TaskPool, draw_task, read_task_list

LIST = TaskList("ab" * 32, {"digits": 1}, 100, (3, 7, 50, 99))


def draws(env: EnvDraw, count: int = 4000) -> Counter[int]:
    return Counter(draw_task(number.to_bytes(32, "big"), [env])[1] for number in range(count))


def test_a_list_is_read_as_it_was_written_and_named_by_its_bytes() -> None:
    data = to_json(LIST)
    assert read_task_list(data) == LIST and LIST.digest == digest(data)
    assert LIST.flaw("ab" * 32, {"digits": 1}, 100) == ""
    for other in (("cd" * 32, {"digits": 1}, 100), ("ab" * 32, {"digits": 2}, 100), ("ab" * 32, {"digits": 1}, 101)):
        assert "measured on another environment" in LIST.flaw(*other)


@pytest.mark.parametrize("tasks", [(), (3, 3), (7, 3), (-1, 3), (3, 100), tuple(range(MAX_LISTED + 1))])
def test_a_list_that_is_not_ascending_and_within_its_environment_is_refused(tasks: tuple[int, ...]) -> None:
    num_tasks = 100 if len(tasks) < 100 else 1 << 20
    with pytest.raises(WireError):
        read_task_list(to_json(msgspec.structs.replace(LIST, tasks=tasks, num_tasks=num_tasks)))


def test_a_second_spelling_of_a_list_is_refused() -> None:
    with pytest.raises(WireError, match="the one way"):
        read_task_list(msgspec.json.format(to_json(LIST)))


def test_pools_change_how_often_listed_tasks_are_drawn() -> None:
    pools = (TaskPool(0.5, (7, 99)), TaskPool(0.0, (3,)))
    drawn = draws(EnvDraw("sums", 1.0, 4, pools, LIST.tasks))
    assert set(drawn) == {7, 50, 99}
    assert all(900 < drawn[task] < 1100 for task in (7, 99)) and 1900 < drawn[50] < 2100


def test_a_list_knows_its_tasks() -> None:
    listed, whole = EnvDraw("sums", 1.0, 4, listed=LIST.tasks), EnvDraw("sums", 1.0, 4)
    assert [task for task in range(-1, 101) if listed.has(task)] == list(LIST.tasks)
    assert [task for task in range(-1, 101) if whole.has(task)] == [0, 1, 2, 3]
