"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(52, 3242, 1309),
    "commands": Room(19, 2037, 1085),
    "config": Room(18, 2873, 1171),
    "engine": Room(23, 2544, 1399),
    "envs": Room(75, 11916, 6912),
    "hub": Room(16, 2358, 1288),
    "launch": Room(43, 7695, 4813),
    "ledger": Room(51, 6223, 3561),
    "monitors": Room(17, 1530, 846),
    "net": Room(21, 2856, 1610),
    "plan": Room(13, 1413, 836),
    "policy": Room(44, 8370, 4552),
    "proofs": Room(18, 1485, 763),
    "protocol": Room(39, 3936, 1697),
    "roles": Room(101, 15218, 9283),
    "sandbox": Room(17, 2060, 1183),
    "shoal": Room(12, 2370, 1203),
    "train": Room(34, 3920, 2064),
    "watch": Room(53, 8293, 4621),
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
