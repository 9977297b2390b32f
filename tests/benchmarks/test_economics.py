"""The fast model of `benchmarks/economics.py` must pay and slash as the real rules do, draw for draw, and find no profit
in cheating."""

import pytest

from benchmarks import economics as eco
from benchmarks.market import market
from benchmarks.market.search import search, worth
from benchmarks.market.terms import ALL, HONEST, NONE, ONE, Draws, Move, Strategy, Terms
from shoal.ledger.constants import Law
from tests.benchmarks.real_rules import try_case, try_case_beside_rival

SHORT = Terms(blocks=260)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
EARLY = eco.turncoat("all, after 10", ALL, 10)
LATE = eco.turncoat("one, after 60", ONE, 60)


def whim(see):
    """Any move, by the coin: long and short forgeries, lapses, more when the stake is small."""
    kind = int(see.coin * 40)
    if see.valid < 10 or kind > 12:
        return Move(1, ALL if see.stake < 0.2 and see.valid > 20 and kind < 20 else NONE)
    return Move(1, kind % 3, length=2 ** (kind % 6), drop=kind > 9)


WHIM = Strategy("whim", whim)
EARNEST = Strategy("earnest whim", lambda see: whim(see)._replace(drop=False))
"""Without lapses: who dropped a block is not given it again, if there are others."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("terms", "strategy"),
    [
        (SHORT, HONEST),
        (SHORT, eco.sleeper(100)),
        (SHORT, eco.ONE_PERCENT),
        (SHORT, EARLY),
        (SHORT._replace(power=0.5), LATE),
        (SHORT._replace(power=0.5, alone=True), EARLY),
        (SHORT._replace(power=0.5, alone=True), eco.LARGE_LEASE),
        (SHORT, eco.LARGE_LEASE),
        (SHORT, eco.BURST),
        (SHORT, eco.turncoat("whitewash", ALL, 0)),
        (SHORT._replace(steady=0.3), eco.turncoat("ten keys", ALL, 10, keys=10)),
        (SHORT._replace(mild=True), eco.UNPUNISHED),
        (SHORT._replace(mild=True), eco.turncoat("mild, one key", ALL, 10)),
        (SHORT._replace(mild=True), eco.LARGE_LEASE),
        (SHORT._replace(alarm=0.02), HONEST),
        (SHORT._replace(alarm=0.02, alike=1.0), HONEST),
        (SHORT._replace(alarm=0.05, alike=0.5, mild=True), HONEST),
        (SHORT._replace(lapses=0.1), HONEST),
        (SHORT._replace(validators=2, alarm=0.05), HONEST),
        (SHORT._replace(validators=1, alarm=0.02), EARLY),
        (SHORT, WHIM),
        (SHORT._replace(validators=1), WHIM),
        (SHORT._replace(mild=True, power=0.5), WHIM),
        (SHORT._replace(delay=25), WHIM),
        (SHORT._replace(delay=25, power=0.5, alone=True), EARNEST._replace(keys=3)),
        (SHORT._replace(delay=25, validators=1, power=0.5), WHIM._replace(patience=1)),
        (SHORT._replace(power=0.5), EARNEST),
    ],
    ids=lambda value: value.name if isinstance(value, Strategy) else None,
)
def test_pay_and_slashes_are_as_by_the_real_rules(terms, strategy, seed):
    assert market.play(terms, strategy, Draws(terms, (9, seed))) == try_case(terms, strategy, (9, seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sly", [False, True], ids=["blunt", "sly"])
@pytest.mark.parametrize(("validators", "friends"), [(3, 1), (3, 2), (5, 2), (9, 4)])
def test_pay_and_slashes_are_as_by_the_real_rules_with_colluding_validators(validators, friends, sly, seed):
    terms = SHORT._replace(blocks=150, validators=validators, friends=friends, sly=sly)
    for strategy in (EARLY, EARNEST):
        fast = market.play_beside_rival(terms, strategy, (9, seed))
        assert fast == try_case_beside_rival(terms, strategy, HONEST, (9, seed))


@pytest.mark.parametrize("mild", [False, True], ids=["hard", "mild"])
def test_a_failed_recheck_costs_what_it_costs_under_the_real_rules(mild):
    law = Law(recheck_rate=0.5)
    terms = SHORT._replace(law=law, power=0.5, alone=True, alarm=0.02, mild=mild)
    seldom = Strategy("seldom", lambda see: Move(1, int(see.coin < 0.2)), renew=False)
    for seed in range(4):
        assert market.play(terms, seldom, Draws(terms, (9, seed))) == try_case(terms, seldom, (9, seed))


def test_without_validators_nothing_is_paid():
    bench = market.Bench(SHORT)
    bench.faults = [3, 3, 3]
    worker = market.Worker(bench, HONEST, Draws(SHORT, (9, 0)))
    for turn in range(SHORT.blocks):
        worker.step(turn)
    assert worker.outcome().credits == 0 and worker.outcome().honest == 4 * SHORT.blocks


def test_validators_find_the_same_unless_each_looks_alone():
    draws = Draws(SHORT._replace(power=0.5), (9, 0))
    assert (draws.found[ALL] == draws.found[ALL][:, :1]).all()
    alone = Draws(SHORT._replace(power=0.5, alone=True), (9, 0))
    assert not (alone.found[ALL] == alone.found[ALL][:, :1]).all()


# --- the bars ---


def over_honest(strategy, runs=12, **terms):
    terms = Terms(blocks=2200)._replace(**terms)
    made = eco.estimate(eco.profit(market.play(terms, strategy, Draws(terms, (8, run)))) for run in range(runs))
    return made.mean + made.margin - eco.honest_profit(terms)


@pytest.mark.parametrize("strategy", eco.CHEATS, ids=lambda strategy: strategy.name)
def test_each_cheat_loses_against_honesty(strategy):
    assert over_honest(strategy) < -100


def test_no_plan_beats_honesty_while_findings_are_hard():
    for power in (0.95, 0.5):
        gain, cheats = eco.best_response(Terms(blocks=500, power=power), eco.CHEAT_COST)
        assert abs(gain) < 1e-9 and cheats == 0.0


@pytest.mark.parametrize(
    ("validators", "friends", "delay"),
    [(1, 0, 0), (3, 0, 0), pytest.param(3, 1, 0, marks=pytest.mark.slow), (3, 1, 25)],
)
def test_the_best_cheat_that_a_search_finds_loses_against_honesty(validators, friends, delay):
    assert best_found(Terms(blocks=1000, validators=validators, friends=friends, delay=delay)) < 1.0


def best_found(terms):
    """Profit of the best cheat of a short search, as a share of an honest one."""
    honest = eco.honest_profit(terms)
    found = search(terms, lambda outcome: eco.profit(outcome) / honest, rounds=1, runs=8)
    return worth(found.outcomes, lambda outcome: eco.profit(outcome) / honest)


def test_without_a_stake_the_search_finds_a_cheat_that_pays():
    gain, _ = eco.best_response(Terms(blocks=500), eco.CHEAT_COST, stake_blocks=0)
    assert gain > 0.05


def test_one_colluding_validator_of_three_does_not_make_cheating_pay():
    for sly in (False, True):
        terms = Terms(blocks=600, friends=1, sly=sly)
        pairs = [market.play_beside_rival(terms, eco.AFTER_PROBATION, (8, run)) for run in range(10)]
        assert max(eco.profit(cheat) for cheat, _ in pairs) < eco.honest_profit(terms) - 500
        assert sum(rival.slashes for _, rival in pairs) == 0


def test_an_honest_worker_with_false_alarms_loses_under_one_percent():
    assert -over_honest(HONEST, alarm=0.001) < 0.01 * 2200 * 4 * eco.PAY


def test_an_honest_slow_worker_is_never_slashed():
    terms = Terms(blocks=1000, lapses=0.1)
    assert sum(market.play(terms, HONEST, Draws(terms, (8, run))).slashes for run in range(10)) == 0
