"""Each room of `shoal/` keeps within its budget. A commit that opens a room, or grows one by more than a fiftieth, raises
it here and says why. An addition of the usual size changes nothing here.
"""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(17, 2470, 926),
    "chat": Room(13, 2954, 1766),
    "cli": Room(14, 2044, 1086),
    "config": Room(11, 2509, 1020),
    "engine": Room(15, 2005, 1125),
    "env_packages": Room(13, 2344, 1258),
    "envs": Room(47, 8856, 5198),
    "graders": Room(11, 1950, 1000),
    "jobs": Room(10, 1929, 1189),
    "launch": Room(25, 4736, 2894),
    "ledger": Room(36, 6241, 3539),
    "models": Room(31, 6412, 3361),
    "monitors": Room(9, 1971, 1082),
    "net": Room(12, 2559, 1439),
    "plan": Room(7, 1343, 798),
    "protocol": Room(24, 3878, 1680),
    "roles": Room(60, 12220, 7465),
    "runs": Room(12, 2828, 1564),
    "sandbox": Room(11, 1848, 1037),
    "shoal": Room(13, 2943, 1468),
    "train": Room(21, 3713, 1925),
    "verification": Room(9, 1432, 715),
    "views": Room(37, 7331, 4225),
    "weights": Room(20, 4474, 2417),
}
"""Files, lines and statements by room."""


def most_of(budget: int) -> int:
    """A budget and a fiftieth of it, at least one more."""
    return budget + max(1, budget // 50)


def test_each_room_keeps_within_its_budget() -> None:
    found = rooms(files_below("shoal"))
    assert found.keys() == BUDGETS.keys()
    for name, size in found.items():
        assert all(figure <= most_of(budget) for figure, budget in zip(size, BUDGETS[name], strict=True)), (
            f"{name}: {size}"
        )


def test_statements_are_counted_without_texts_that_stand_alone() -> None:
    (file,) = [one for one in files_below("shoal") if one.path == "shoal/terminal.py"]
    assert 10 < file.statements < file.lines and file.room == "shoal" and file.module == "shoal.terminal"
