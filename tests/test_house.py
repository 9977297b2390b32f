"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(24, 2567, 953),
    "chat": Room(15, 3044, 1809),
    "cli": Room(20, 2106, 1117),
    "config": Room(13, 2841, 1139),
    "engine": Room(18, 2523, 1369),
    "env_packages": Room(13, 2374, 1271),
    "envs": Room(51, 9154, 5381),
    "graders": Room(11, 1957, 1004),
    "jobs": Room(15, 1940, 1197),
    "launch": Room(26, 4908, 3022),
    "ledger": Room(38, 6282, 3542),
    "models": Room(32, 6107, 3203),
    "monitors": Room(19, 2048, 1122),
    "net": Room(12, 2587, 1424),
    "plan": Room(10, 1376, 812),
    "protocol": Room(35, 3906, 1671),
    "roles": Room(70, 12633, 7660),
    "runs": Room(11, 2777, 1515),
    "sandbox": Room(14, 1962, 1118),
    "shoal": Room(13, 2789, 1387),
    "train": Room(32, 3986, 2066),
    "verification": Room(18, 1487, 763),
    "views": Room(41, 7518, 4345),
    "weights": Room(26, 4600, 2465),
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
