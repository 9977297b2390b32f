"""The tables of `docs/design/economics.md` from a result of `benchmarks/economics.py`."""

from typing import Any

from benchmarks.pages.markdown import percent, table

Rows = list[dict[str, Any]]


def tables(result: dict[str, Any]) -> dict[str, str]:
    """By the name under which the page quotes each."""
    cheating, plans = result["cheating"], result["best_response"]
    return {
        "best_plan": _best_plan([row for row in plans if row["case"] == "hard findings"]),
        "strategies": _strategies([row for row in cheating if row["findings"] == "common"]),
        "best_found": _found(result["best_found"]),
        "own_findings": table(
            ("Strategy", "Over honesty"),
            [(row["strategy"], _over(row)) for row in cheating if row["findings"] == "own"],
        ),
        "forfeits": _forfeits([row for row in plans if row["case"] != "hard findings"]),
        "unpunished": table(
            ("Runs", "A cheated group costs", "Over honesty"),
            [
                (UNPUNISHED[row["findings"]], row["cheat_cost"], _over(row))
                for row in cheating
                if row["findings"] in UNPUNISHED
            ],
        ),
        "honest": table(
            ("Honest worker", "Pay lost", "Slashes in a run", "Refused submissions"),
            [
                (row["case"], f"{100 * row['lost']:.3f} ± {percent(row['margin'], 3)}", f"{row['slashes']:.3f}",
                 f"{row['refused']:.2f}")
                for row in result["honest"]
            ],
        ),
        "collusion": table(
            ("Friends", "How", "Their worker, over honesty", "The rival loses", "Slashes of the rival",
             "Suspended: honest, friends"),
            [_friends(row) for row in result["collusion"]],
        ),
    }  # fmt: skip


UNPUNISHED = {"soft": "three validators, every finding mild", "of one key": "one validator, any cheat"}


def _over(row: dict[str, Any]) -> str:
    return f"{row['over_honest']:,.1f} ± {row['margin']:.1f}"


def _best_plan(plans: Rows) -> str:
    return table(
        ("*d*", "Stake, blocks", "The best plan gains", "Moves in which it forges"),
        [
            (row["power"], row["stake_blocks"], percent(row["gain"], 2), percent(row["cheating_moves"], 1))
            for row in plans
        ],
    )


def _strategies(rows: Rows) -> str:
    """Surely detected beside half detected, by strategy."""
    sure, unsure = ([row for row in rows if row["power"] == power] for power in (0.95, 0.5))
    half = {row["strategy"]: row for row in unsure}
    return table(
        ("Strategy", "*d* = 0.95", "*d* = 0.5", "Slashes, *d* = 0.95", "Profit itself, *d* = 0.95"),
        [
            (
                row["strategy"],
                _over(row),
                _over(half[row["strategy"]]),
                f"{row['slashes']:,.1f}",
                f"{row['profit']:,.0f}",
            )
            for row in sure
        ],
    )


def _found(rows: Rows) -> str:
    return table(
        ("Validators, friends", "They are", "Profit, of an honest one", "Forges", "Slashes", "The best cheat found"),
        [
            (
                f"{row['validators']}, {row['friends']}",
                row["how"],
                f"{100 * row['profit']:,.1f} ± {percent(row['margin'], 1)}",
                percent(row["forged"], 1),
                f"{row['slashes']:.1f}",
                row["strategy"],
            )
            for row in rows
        ],
    )


def _forfeits(plans: Rows) -> str:
    """What the best plan gains, by the blocks that a refusal takes."""
    blocks = sorted({row["forfeit_blocks"] for row in plans})
    gains: dict[tuple[float, float], dict[int, float]] = {}
    for row in plans:
        gains.setdefault((row["cheat_cost"], row["power"]), {})[row["forfeit_blocks"]] = row["gain"]
    first, *between, last = blocks
    return table(
        ("A cheated group costs", "*d*", f"{first} blocks", *map(str, between), f"{last} (the rule)"),
        [(*case, *(percent(gain[count], 1) for count in blocks)) for case, gain in gains.items()],
    )


def _friends(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['friends']} of {row['validators']}",
        row["how"],
        f"{row['over_honest']:+,.0f} ± {row['margin']:.0f}",
        percent(row["rival_lost"], 1),
        f"{row['rival_slashes']:.1f}",
        f"{row['honest_suspended']:.1f}, {row['friends_suspended']:.1f}",
    )
