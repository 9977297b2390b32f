"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(52, 3242, 1309),
    "commands": Room(19, 2045, 1090),
    "config": Room(19, 2928, 1188),
    "engine": Room(23, 2544, 1399),
    "envs": Room(56, 9728, 5808),
    "graders": Room(11, 1957, 1005),
    "hub": Room(16, 2442, 1340),
    "launch": Room(45, 7982, 5006),
    "ledger": Room(54, 6603, 3770),
    "monitors": Room(17, 1530, 846),
    "net": Room(21, 2856, 1610),
    "plan": Room(13, 1427, 839),
    "policy": Room(44, 8297, 4512),
    "proofs": Room(18, 1487, 764),
    "protocol": Room(39, 3964, 1706),
    "roles": Room(101, 15299, 9337),
    "sandbox": Room(17, 2060, 1183),
    "shoal": Room(13, 2662, 1298),
    "train": Room(34, 3908, 2055),
    "watch": Room(53, 8308, 4625),
    "weights": Room(24, 3914, 2129),
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
