"""Does cheating pay? Strategies of workers and validators, each played many times by the rules of
`shoal/ledger/constants.py`.

    python benchmarks/economics.py

`--search` only searches for the best cheat (`benchmarks/market/search.py`). The last line is JSON.

Each strategy is compared with honesty in the same run by its profit: its pay, less what its groups cost.
`benchmarks/market/market.py` is the model of a run. Detection is a parameter here; `benchmarks/detection.py` measures it.

Axes: J groups that are forged in a block, N valid blocks.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.market.market import BLOCK_S, QUARANTINE_S, Outcome, play, play_beside_rival
from benchmarks.market.search import search
from benchmarks.market.terms import ALL, HONEST, NONE, ONE, Draws, Move, Strategy, Terms
from benchmarks.measure import arguments, report
from shoal.ledger.constants import LAW
from shoal.protocol.constants import MAX_LEASE_BLOCKS

PAY, HONEST_COST, CHEAT_COST, MILD_COST = 1.0, 0.7, 0.05, 0.35
"""Pay and costs of one group. A full forgery costs almost no work; a mild one (a smaller number format) costs half."""

RIVAL_BLOCKS = 2000
"""Blocks of the runs with friends among the validators."""

COLLUDERS = {3: (1, 2), 5: (1, 2, 3), 9: (1, 2, 3, 4, 5)}
"""For each number of validators, the numbers of friends that are tried."""

SEATS = ((1, 0), (3, 0), (3, 1), (5, 0), (5, 1), (5, 2))
"""Numbers of validators and of friends among them, for which the search looks for the best cheat."""

BEHIND = {"idle": 0, "saturated": 25}
"""Turns that validators are behind."""


# --- strategies ---


def sleeper(wakes: int) -> Strategy:
    """Honest until a turn, then forges everything until it is slashed; after that honest under a new key."""
    return Strategy(
        f"sleeper, wakes at {wakes}",
        lambda see: Move(1, ALL if see.turn >= wakes and not see.slashes else NONE),
    )


def turncoat(name: str, forged: int, valid_blocks: int, keys: int = 1, patience: int = 1_000_000) -> Strategy:
    """Forges in every block once a key has this many valid blocks, and goes on with a new key after a slash."""
    return Strategy(
        name, lambda see: Move(1, forged if see.valid >= valid_blocks else NONE), keys,
        patience=patience,
    )  # fmt: skip


ONE_PERCENT = Strategy("1 % of groups", lambda see: Move(1, ONE if see.coin < 0.01 * Terms().groups else NONE))

LARGE_LEASE = Strategy(
    "small leases, then a large one",
    lambda see: Move(MAX_LEASE_BLOCKS, ALL) if see.valid >= LAW.vesting_blocks else Move(1, NONE),
)

BURST = Strategy(
    "64 leases before the first is judged",
    lambda see: Move(1, ALL, leases=MAX_LEASE_BLOCKS) if see.valid >= LAW.vesting_blocks else Move(1, NONE),
)

AFTER_PROBATION = turncoat("after probation, all", ALL, LAW.probation_blocks)

CHEATS = (
    sleeper(200),
    sleeper(400),
    sleeper(2000),
    ONE_PERCENT,
    AFTER_PROBATION,
    turncoat("after probation, one group a block", ONE, LAW.probation_blocks),
    turncoat("at the lowest rate, one group a block", ONE, LAW.vesting_blocks),
    LARGE_LEASE,
    BURST,
    turncoat("100 identities, after probation", ALL, LAW.probation_blocks, keys=100),
    turncoat("new key after each slash, from the start", ALL, 0),
)

UNPUNISHED = turncoat("at the lowest rate, all; new key when refused", ALL, LAW.vesting_blocks, patience=1)
"""For runs in which a refusal slashes nobody."""


# --- the best response ---


def best_response(
    terms: Terms,
    cheat_cost: float,
    forfeit_blocks: int = LAW.refused_blocks,
    stake_blocks: int = LAW.vesting_blocks,
) -> tuple[float, float]:
    """How much more the best possible plan earns than honesty, as a share of honesty's profit; and its share of cheating
    moves.

    Found by dynamic programming over turns left and valid blocks, for three honest validators. In each block the worker
    may forge any number of groups, and starts again when it is slashed or refused. A refusal without a slash costs
    `forfeit_blocks` of unvested pay.
    """
    valid_N, groups = np.arange(max(stake_blocks, math.ceil(LAW.trust / terms.steady)) + 1), terms.groups
    forged_J = np.arange(groups + 1)
    cost_J = forged_J * cheat_cost + (groups - forged_J) * HONEST_COST
    stake_N = np.minimum(valid_N, stake_blocks) * groups
    caught_NJ = np.array(
        [[_caught(terms, j, LAW.audit_rate(n, terms.steady)) for j in range(groups + 1)] for n in valid_N.tolist()]
    )
    lost_N = np.minimum(stake_N, forfeit_blocks * groups) if terms.mild else stake_N
    after_N = np.minimum(valid_N + 1, valid_N[-1])
    value_N, cheats = np.zeros(len(valid_N)), 0.0
    for _ in range(terms.blocks):
        paid_NJ = (1 - caught_NJ) * (groups * PAY + value_N[after_N])[:, None]
        value_NJ = paid_NJ + caught_NJ * (value_N[0] - lost_N * PAY)[:, None] - cost_J
        cheats += float((value_NJ.argmax(axis=1) > 0).mean())
        value_N = value_NJ.max(axis=1)
    honest = terms.blocks * groups * (PAY - HONEST_COST)
    return round(float(value_N[0]) / honest - 1, 9) + 0.0, cheats / terms.blocks


def _caught(terms: Terms, forged: int, rate: float) -> float:
    """Probability that two of three validators find something in a block with this many forged groups."""
    if not terms.alone:
        return 1 - (1 - rate * terms.power) ** forged
    total = 0.0
    for looked in range(1, forged + 1):
        chance = math.comb(forged, looked) * rate**looked * (1 - rate) ** (forged - looked)
        found = 1 - (1 - terms.power) ** looked
        recheck = 0.0 if terms.mild else LAW.recheck_rate
        total += chance * (found * (found + (1 - found) * found) + (1 - found) * recheck * found * found)
    return total


# --- tables ---


class Estimate(NamedTuple):
    """A mean and half of its 95 % interval."""

    mean: float
    margin: float


def estimate(values: Iterable[float]) -> Estimate:
    """The mean over runs, with a normal interval."""
    array = np.array(list(values))
    return Estimate(float(array.mean()), float(1.96 * array.std(ddof=1) / math.sqrt(len(array))))


def profit(outcome: Outcome, cheat_cost: float = CHEAT_COST) -> float:
    """Pay less costs, in units of a group's pay."""
    return outcome.credits * PAY - outcome.honest * HONEST_COST - outcome.forged * cheat_cost


def honest_profit(terms: Terms) -> float:
    """Profit of an honest worker in a run in which nothing goes wrong."""
    return terms.blocks * terms.groups * (PAY - HONEST_COST)


def cheating(runs: int) -> list[dict[str, Any]]:
    """Each strategy against honesty: for several powers of detection, and for runs in which nobody can be slashed."""
    rows = []
    heading("strategy", "power", "findings", "cost", "profit", "over honest", "95 %", "slashed", "forged", "slashes")
    for findings, terms, strategies in (
        ("common", Terms(), CHEATS),
        ("common", Terms(power=0.5), CHEATS),
        ("own", Terms(alone=True), (sleeper(400), ONE_PERCENT, LARGE_LEASE)),
        ("soft", Terms(mild=True), (UNPUNISHED,)),
        ("of one key", Terms(validators=1), (UNPUNISHED,)),
    ):
        outcomes: dict[str, list[Outcome]] = {strategy.name: [] for strategy in strategies}
        for run in range(runs):
            draws = Draws(terms, (0, run))
            for strategy in strategies:
                outcomes[strategy.name].append(play(terms, strategy, draws))
        for name, of_strategy in outcomes.items():
            for cost in (CHEAT_COST, MILD_COST) if UNPUNISHED in strategies else (CHEAT_COST,):
                rows.append(_against_honesty(terms, findings, name, cost, of_strategy))
    return rows


def _against_honesty(
    terms: Terms, findings: str, name: str, cost: float, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    made = estimate(profit(outcome, cost) for outcome in outcomes)
    over = made.mean - honest_profit(terms)
    slashed = float(np.mean([outcome.slashes > 0 for outcome in outcomes]))
    forged = float(np.mean([outcome.forged for outcome in outcomes]))
    slashes = float(np.mean([outcome.slashes for outcome in outcomes]))
    row(name, terms.power, findings, cost, f"{made.mean:,.1f}", f"{over:,.1f}", f"{made.margin:.1f}", f"{slashed:.1%}",
        f"{forged:,.0f}", f"{slashes:.2f}")  # fmt: skip
    return {
        "strategy": name, "power": terms.power, "findings": findings, "cheat_cost": cost, "profit": round(made.mean, 2),
        "over_honest": round(over, 2), "margin": round(made.margin, 2), "slashed": slashed,
        "forged_groups": round(forged, 1), "slashes": round(slashes, 3),
    }  # fmt: skip


def best_responses() -> list[dict[str, Any]]:
    """What the best plan gains as detection and stake shrink, and if findings are only soft."""
    rows = []
    heading("best response to", "power", "stake", "forfeit", "gain", "cheats in")
    stake, forfeit = LAW.vesting_blocks, LAW.refused_blocks
    cases = [("hard findings", power, CHEAT_COST, stake, 0) for power in (0.95, 0.5, 0.2, 0.1, 0.05)]
    cases += [("hard findings", 0.95, CHEAT_COST, less, 0) for less in (20, 4, 1)]
    cases += [(f"soft findings, a cheat costs {cost}", power, cost, stake, blocks)
              for cost, power in ((CHEAT_COST, 0.95), (CHEAT_COST, 0.5), (MILD_COST, 0.95))
              for blocks in (0, 2, 4, forfeit)]  # fmt: skip
    for name, power, cost, stake, forfeit in cases:
        terms = Terms(power=power, mild=name.startswith("soft"))
        gain, cheats = best_response(terms, cost, forfeit, stake)
        row(name, power, stake, forfeit, f"{gain:.2%}", f"{cheats:.2%}")
        rows.append({"case": name, "power": power, "cheat_cost": cost, "stake_blocks": stake,
                     "forfeit_blocks": forfeit, "gain": round(gain, 5), "cheating_moves": round(cheats, 5)})  # fmt: skip
    return rows


def honesty(runs: int) -> list[dict[str, Any]]:
    """What false alarms and lapses cost an honest worker, as a share of the pay for the blocks that it finished."""
    rows = []
    heading("honest worker", "pay lost", "95 %", "slashes", "refused", "faults")
    for name, terms in (
        ("false alarms 0.1 %, each validator its own", Terms(alarm=0.001)),
        ("false alarms 0.1 %, half of them common", Terms(alarm=0.001, alike=0.5)),
        ("false alarms 0.1 %, all of them common", Terms(alarm=0.001, alike=1.0)),
        ("false alarms 0.1 %, all common and soft", Terms(alarm=0.001, alike=1.0, mild=True)),
        ("slow: 4 % of leases lapse", Terms(lapses=0.04)),
        ("slow: 6 % of leases lapse", Terms(lapses=0.06)),
        ("slow: 10 % of leases lapse", Terms(lapses=0.1)),
        ("slow: 10 % lapse, own false alarms 0.1 %", Terms(lapses=0.1, alarm=0.001)),
    ):
        outcomes, shares = [], []
        for run in range(runs):
            draws = Draws(terms, (1, run))
            outcomes.append(play(terms, HONEST, draws))
            shares.append(1 - outcomes[-1].credits / (terms.groups * (terms.blocks - sum(draws.late))))
        lost = estimate(shares)
        slashes, refused = sum(o.slashes for o in outcomes) / runs, sum(o.refused for o in outcomes) / runs
        faults = sum(sum(o.faults) for o in outcomes) / runs
        row(name, f"{lost.mean:.3%}", f"{lost.margin:.3%}", f"{slashes:.3f}", f"{refused:.2f}", f"{faults:.2f}")
        rows.append({"case": name, "lost": round(lost.mean, 6), "margin": round(lost.margin, 6),
                     "slashes": round(slashes, 4), "refused": round(refused, 3), "faults": round(faults, 3)})  # fmt: skip
    return rows


def collusion(runs: int) -> list[dict[str, Any]]:
    """With friends among the validators: what their worker gains over honesty, and what an honest rival loses.

    With more than three validators a fifth of the runs is enough: the differences are large.
    """
    rows = []
    heading("friends", "how", "over honest", "95 %", "rival loses", "95 %", "its slashes", "honest out", "friends out")
    for validators, shares in COLLUDERS.items():
        for friends in shares:
            for sly in (False, True):
                terms = Terms(blocks=RIVAL_BLOCKS, validators=validators, friends=friends, sly=sly)
                rows.append(_beside_rival(terms, AFTER_PROBATION, runs if validators == 3 else max(2, runs // 5)))
    return rows


def _beside_rival(terms: Terms, strategy: Strategy, runs: int) -> dict[str, Any]:
    pairs = [play_beside_rival(terms, strategy, (2, run)) for run in range(runs)]
    made = estimate(profit(cheat) for cheat, _ in pairs)
    over = made.mean - honest_profit(terms)
    lost = estimate(1 - rival.credits / (terms.blocks * terms.groups) for _, rival in pairs)
    slashes = sum(rival.slashes for _, rival in pairs) / runs
    out = np.array([[count >= LAW.validator_faults for count in rival.faults] for _, rival in pairs]).mean(axis=0)
    friends_out, honest_out = float(out[: terms.friends].sum()), float(out[terms.friends :].sum())
    how, seats = "sly" if terms.sly else "blunt", f"{terms.friends} of {terms.validators}"
    row(seats, how, f"{over:,.1f}", f"{made.margin:.1f}", f"{lost.mean:.2%}", f"{lost.margin:.2%}", f"{slashes:.2f}",
        f"{honest_out:.2f}", f"{friends_out:.2f}")  # fmt: skip
    return {
        "validators": terms.validators, "friends": terms.friends, "how": how, "over_honest": round(over, 2),
        "margin": round(made.margin, 2), "rival_lost": round(lost.mean, 5), "rival_margin": round(lost.margin, 5),
        "rival_slashes": round(slashes, 3), "honest_suspended": round(honest_out, 3),
        "friends_suspended": round(friends_out, 3),
    }  # fmt: skip


def best_found(rounds: int, runs: int) -> list[dict[str, Any]]:
    """The best cheat that a search finds for each set of validators, and its profit as a share of honesty's."""
    rows = []
    heading("the search's best cheat against", "validators", "profit", "95 %", "forged", "slashes", "tried")
    for validators, friends in SEATS:
        for how, delay in BEHIND.items():
            terms = Terms(blocks=RIVAL_BLOCKS, validators=validators, friends=friends, delay=delay)
            honest = honest_profit(terms)
            found = search(terms, lambda outcome, honest=honest: profit(outcome) / honest, rounds, runs)  # type: ignore[misc]
            made = estimate(profit(outcome) / honest for outcome in found.outcomes)
            forged = sum(o.forged for o in found.outcomes) / sum(o.forged + o.honest for o in found.outcomes)
            slashes = sum(o.slashes for o in found.outcomes) / runs
            row(f"{validators} validators, {friends} friends", how, f"{made.mean:.1%}", f"{made.margin:.1%}",
                f"{forged:.1%}", f"{slashes:.2f}", found.tried)  # fmt: skip
            print(f"    {found.scheme}")
            rows.append({
                "validators": validators, "friends": friends, "how": how, "profit": round(made.mean, 4),
                "margin": round(made.margin, 4), "forged": round(forged, 4), "slashes": round(slashes, 3),
                "tried": found.tried, "strategy": str(found.scheme),
            })  # fmt: skip
    return rows


def heading(*cells: str) -> None:
    """The first line of a table."""
    print()
    row(*cells)


def row(first: object, *others: object) -> None:
    """A line of a table."""
    print(f"{first!s:<46}" + "".join(f"{cell!s:>12}" for cell in others), flush=True)


def main() -> None:
    parser = arguments(__doc__, "a twentieth of the runs")
    parser.add_argument("--runs", type=int, default=300, help="runs of each strategy (default: 300)")
    parser.add_argument("--search", action="store_true", help="only search")
    args = parser.parse_args()
    runs = max(2, args.runs // 20 if args.quick else args.runs)
    began, terms = time.process_time(), Terms()
    rounds, fresh = (1, 8) if args.quick else (5, 40)
    if args.search:
        report("economics", {"best_found": best_found(rounds, fresh)})
        return
    parameters = {
        "runs": runs, "blocks": terms.blocks, "groups_a_block": terms.groups, "validators": terms.validators,
        "audit_rate": terms.steady, "pay": PAY, "honest_cost": HONEST_COST, "cheat_cost": CHEAT_COST,
        "block_s": BLOCK_S, "quarantine_s": QUARANTINE_S, "probation_blocks": LAW.probation_blocks,
        "trust": LAW.trust, "recheck_rate": LAW.recheck_rate, "vesting_blocks": LAW.vesting_blocks,
        "refused_blocks": LAW.refused_blocks, "validator_faults": LAW.validator_faults,
        "free_lapses": LAW.free_lapses, "blocks_beside_rival": RIVAL_BLOCKS,
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in parameters.items()))
    result = {
        "parameters": parameters, "cheating": cheating(runs),
        "best_response": best_responses(), "best_found": (found := best_found(rounds, fresh)),
        "best_profit": {
            f"{row['validators']}_validators_{row['friends']}_friends_{row['how']}": row["profit"] for row in found
        },
        "honest": honesty(runs), "collusion": collusion(runs),
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
    }  # fmt: skip
    report("economics", result)


if __name__ == "__main__":
    main()
