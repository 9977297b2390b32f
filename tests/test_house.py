"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(51, 3190, 1294),
    "commands": Room(19, 2037, 1085),
    "config": Room(18, 2861, 1164),
    "engine": Room(23, 2544, 1399),
    "envs": Room(56, 9729, 5807),
    "graders": Room(11, 1957, 1005),
    "hub": Room(16, 2358, 1288),
    "launch": Room(43, 7695, 4813),
    "ledger": Room(51, 6212, 3557),
    "monitors": Room(17, 1530, 846),
    "net": Room(21, 2856, 1610),
    "plan": Room(13, 1413, 836),
    "policy": Room(44, 8373, 4555),
    "proofs": Room(18, 1486, 764),
    "protocol": Room(39, 3915, 1685),
    "roles": Room(101, 15218, 9283),
    "sandbox": Room(17, 2060, 1183),
    "shoal": Room(13, 2671, 1303),
    "train": Room(34, 3861, 2038),
    "watch": Room(53, 8294, 4622),
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
