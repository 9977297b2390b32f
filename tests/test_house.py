"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(24, 2567, 953),
    "chat": Room(15, 3044, 1809),
    "cli": Room(20, 2103, 1118),
    "config": Room(11, 2490, 1005),
    "engine": Room(18, 2523, 1369),
    "env_packages": Room(13, 2374, 1271),
    "envs": Room(51, 9154, 5381),
    "graders": Room(11, 1957, 1004),
    "jobs": Room(15, 1939, 1198),
    "launch": Room(25, 4742, 2892),
    "ledger": Room(38, 6274, 3531),
    "models": Room(32, 6107, 3203),
    "monitors": Room(9, 1981, 1085),
    "net": Room(12, 2588, 1425),
    "plan": Room(8, 1357, 804),
    "protocol": Room(24, 3853, 1671),
    "roles": Room(69, 12496, 7617),
    "runs": Room(13, 2866, 1587),
    "sandbox": Room(14, 1962, 1118),
    "shoal": Room(13, 2758, 1366),
    "train": Room(32, 3993, 2069),
    "verification": Room(9, 1430, 718),
    "views": Room(38, 7417, 4270),
    "weights": Room(21, 4513, 2428),
}
"""Files, lines and statements by room, at most."""


def test_each_room_keeps_within_its_budget() -> None:
    found = rooms(files_below("shoal"))
    assert found.keys() == BUDGETS.keys()
    for name, size in found.items():
        assert all(figure <= most for figure, most in zip(size, BUDGETS[name], strict=True)), f"{name}: {size}"


def test_statements_are_counted_without_texts_that_stand_alone() -> None:
    (file,) = [one for one in files_below("shoal") if one.path == "shoal/terminal.py"]
    assert 10 < file.statements < file.lines and file.room == "shoal" and file.module == "shoal.terminal"
