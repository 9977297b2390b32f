"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(24, 2574, 953),
    "chat": Room(15, 3048, 1809),
    "cli": Room(20, 2113, 1117),
    "config": Room(13, 2841, 1138),
    "engine": Room(18, 2526, 1369),
    "env_packages": Room(13, 2378, 1271),
    "envs": Room(51, 9242, 5420),
    "graders": Room(11, 1957, 1004),
    "jobs": Room(15, 1942, 1197),
    "launch": Room(36, 7727, 4766),
    "ledger": Room(37, 6179, 3467),
    "models": Room(32, 6120, 3203),
    "monitors": Room(17, 1534, 846),
    "net": Room(12, 2589, 1424),
    "plan": Room(11, 1409, 827),
    "protocol": Room(35, 3917, 1671),
    "roles": Room(72, 13280, 7982),
    "sandbox": Room(14, 1966, 1118),
    "shoal": Room(12, 2564, 1266),
    "train": Room(32, 3999, 2066),
    "verification": Room(18, 1490, 763),
    "watch": Room(51, 8304, 4613),
    "weights": Room(24, 4245, 2283),
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
