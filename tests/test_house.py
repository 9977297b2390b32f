"""Each room of `shoal/` keeps within its budget. A commit that opens or grows a room raises it here, and says why."""

from deploy.house import Room, files_below, rooms

BUDGETS = {
    "algos": Room(51, 3190, 1294),
    "commands": Room(19, 2045, 1090),
    "config": Room(19, 2917, 1181),
    "engine": Room(23, 2544, 1399),
    "envs": Room(75, 11915, 6913),
    "hub": Room(16, 2442, 1340),
    "launch": Room(45, 7980, 5004),
    "ledger": Room(54, 6592, 3766),
    "monitors": Room(17, 1530, 846),
    "net": Room(21, 2856, 1610),
    "plan": Room(13, 1427, 839),
    "policy": Room(44, 8294, 4509),
    "proofs": Room(18, 1486, 763),
    "protocol": Room(39, 3943, 1694),
    "roles": Room(101, 15297, 9335),
    "sandbox": Room(17, 2060, 1183),
    "shoal": Room(12, 2361, 1198),
    "train": Room(34, 3848, 2027),
    "watch": Room(53, 8307, 4624),
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
