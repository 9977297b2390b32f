"""The simulated run: by hand where one can, and as the rules demand where one cannot."""

import dataclasses

import pytest

from shoal.plan.simulate import simulate
from shoal.plan.simulation_input import SimulationInput, Stalled, WorkerMachine
from shoal.protocol.messages import Rules

MEGABIT = 1e6 / 8


def rules(**changes):
    values = dict(
        group_size=8, block_groups=2, batch_groups=16, max_staleness=1, steps=1, lease_s=3600.0, audit_rate=0.1,
        dtype="float32", bounds={}, quarantine_s=30.0,
    )  # fmt: skip
    return Rules(**(values | changes))


def setting(workers=4, machine=None, **changes):
    """Workers that play a block of 16 rollouts in 16 s; a batch has 8 blocks."""
    machines = (machine or WorkerMachine(tokens_per_s=100.0),) * workers if isinstance(workers, int) else workers
    values = dict(
        rules=rules(), workers=machines, rollout_tokens=100.0, train_s=10.0, publish_s=0.0, check_s=0.0,
        full_bytes=1e6, request_s=0.0,
    )  # fmt: skip
    return SimulationInput(**(values | changes))


def test_the_same_setting_gives_the_same_outcome():
    noisy = setting(signal_share=0.7, seed=5)
    assert simulate(noisy) == simulate(noisy)
    assert simulate(noisy) != simulate(dataclasses.replace(noisy, seed=6))


def test_workers_that_are_too_slow_decide_how_long_a_step_takes():
    # 8 blocks of 16 s by 4 workers are 32 s; the trainer works 10 of them
    found = simulate(setting())
    assert found.step_s == pytest.approx(32, rel=0.05) and found.idle_share == pytest.approx(22 / 32, abs=0.05)


def test_a_trainer_that_is_too_slow_decides_it_otherwise():
    found = simulate(setting(train_s=100.0))
    assert found.step_s == pytest.approx(100, rel=0.01) and found.idle_share == pytest.approx(0, abs=0.01)
    assert found.staleness == pytest.approx(1.0) and found.worker_idle > 0.5


def test_a_synchronous_run_takes_the_sum_of_both():
    found = simulate(setting(rules=rules(max_staleness=0)))
    assert found.step_s == pytest.approx(42, rel=0.1) and found.staleness == 0.0


def test_a_shared_uplink_and_own_downlinks_take_their_time_before_the_work_begins():
    slow = setting(rules=rules(max_staleness=0), full_bytes=4e6)
    # 4 workers at 1 MB/s together: 16 s; alone at 0.5 MB/s each: 8 s
    shared = simulate(dataclasses.replace(slow, origin_up=1e6))
    own = simulate(dataclasses.replace(slow, workers=(WorkerMachine(100.0, down=0.5e6),) * 4))
    assert shared.lag_s == pytest.approx(16, rel=0.05) and own.lag_s == pytest.approx(8, rel=0.05)
    assert shared.broadcast_s == pytest.approx(16, rel=0.05)
    assert shared.step_s == pytest.approx(58, rel=0.1) and own.step_s == pytest.approx(50, rel=0.1)
    assert shared.origin_bytes == own.origin_bytes == pytest.approx(16e6)


def test_a_relay_hears_of_a_version_and_passes_it_on_by_chunks():
    # a copy at 1 MB/s: the relay has 4 MB after 4 s, and is asked each second what it has
    slow = setting(workers=2, rules=rules(max_staleness=0), full_bytes=4e6, origin_up=1e6, relays_up=(10e6,))
    by_chunks, at_once = (simulate(dataclasses.replace(slow, chunk_bytes=size)) for size in (4e4, 4e6))
    assert by_chunks.lag_s == pytest.approx(4.5, rel=0.02)
    assert at_once.lag_s == pytest.approx(4.5 + 4e6 * 2 / 10e6, rel=0.02), "a chunk is passed on when it is whole"


def test_relays_together_have_a_version_before_one_of_them_has_it():
    # two copies at 1 MB/s take 8 s. Of 100 chunks in random orders, they have all when each has 100 - 100 * sqrt(pi / 400)
    slow = setting(workers=2, rules=rules(max_staleness=0), full_bytes=4e6, origin_up=1e6, relays_up=(10e6, 10e6))
    lags = [simulate(dataclasses.replace(slow, chunk_bytes=4e4, seed=seed)).lag_s for seed in range(4)]
    assert sum(lags) / 4 == pytest.approx(8 * 0.911 + 0.5, rel=0.02)
    assert simulate(dataclasses.replace(slow, chunk_bytes=4e6)).lag_s > 8.5


def test_relays_fetch_whole_versions_too_if_these_are_published():
    patches = setting(
        rules=rules(max_staleness=0), full_bytes=4e6, patch_bytes=1e5, origin_up=1e6, relays_up=(1e6, 1e6), train_s=40.0
    )
    found, rarely = (simulate(dataclasses.replace(patches, anchor_every=every)) for every in (1, 4))
    assert found.origin_bytes == pytest.approx(2 * (4e6 + 1e5))
    assert rarely.origin_bytes == pytest.approx(2 * (4e6 / 4 + 1e5), rel=0.05)


def test_a_worker_that_follows_by_patches_fetches_little_and_one_that_was_away_takes_the_cheaper_way():
    plain = simulate(setting(machine=WorkerMachine(100.0, down=0.1e6), full_bytes=1e6, rules=rules(max_staleness=0)))
    patched = simulate(
        setting(machine=WorkerMachine(100.0, down=0.1e6), full_bytes=1e6, patch_bytes=1e4, rules=rules(max_staleness=0))
    )
    assert plain.worker_bytes == pytest.approx(1e6) and patched.worker_bytes == pytest.approx(1e4)
    assert plain.lag_s == pytest.approx(10, rel=0.05) and patched.lag_s == pytest.approx(0.1, rel=0.05)


def test_a_version_that_is_fetched_while_a_worker_plays_costs_it_nothing():
    # a step of 64 s; each worker plays its last blocks of a version while the next one comes, which takes 10 s
    slow = setting(machine=WorkerMachine(100.0, down=0.1e6), full_bytes=1e6, train_s=20.0, rules=rules(batch_groups=32))
    found = simulate(slow)
    assert found.worker_bytes == pytest.approx(1e6)
    assert found.worker_fetch < 0.5 * 10 / found.step_s and found.step_s == pytest.approx(64, rel=0.1)


def test_the_trainer_publishes_beside_the_next_step():
    # 3.2 s of play for a batch, which begins when the version before is published
    quick = setting(machine=WorkerMachine(1000.0), train_s=10.0)
    beside = simulate(dataclasses.replace(quick, publish_s=4.0))
    longer = simulate(dataclasses.replace(quick, publish_s=30.0))
    assert beside.step_s == pytest.approx(10, rel=0.02) and beside.publish_wait_share < 0.01
    assert longer.step_s == pytest.approx(30, rel=0.02) and longer.publish_wait_share > 0.4
    assert longer.idle_share + longer.publish_wait_share == pytest.approx(20 / 30, abs=0.01)


def test_groups_without_signal_cost_workers_their_time():
    found = simulate(setting(signal_share=0.5))
    assert found.step_s == pytest.approx(64, rel=0.15)


def test_a_run_in_which_nobody_gets_a_version_in_time_is_said_to_stall():
    with pytest.raises(Stalled):
        simulate(setting(machine=WorkerMachine(100.0, down=1e-3), full_bytes=1e9))


def test_fifty_workers_at_50_megabits_follow_7_billion_parameters_by_patches_and_not_whole():
    big = SimulationInput(
        rules=rules(group_size=16, batch_groups=128, lease_s=1800.0, dtype="bfloat16"),
        workers=(WorkerMachine(900.0, 50 * MEGABIT, 20 * MEGABIT, 14.0),) * 50, rollout_tokens=1500.0, train_s=240.0,
        publish_s=35.0, check_s=3.0, full_bytes=14e9, patch_bytes=14e9 / 150, apply_s=14.0, origin_up=1000 * MEGABIT,
        validators=3, warmup_steps=1, measured_steps=2,
    )  # fmt: skip
    found = simulate(big)
    assert found.followed == 1.0 and found.lag_s < 70 and found.idle_share < 0.05 and found.staleness <= 1.0
    whole = simulate(dataclasses.replace(big, patch_bytes=0.0, warmup_steps=2))
    assert whole.idle_share > 0.9 and whole.lag_s > 3600
