"""An engine goes from version to version in place, with the roots checked, or loads anew. Nobody can see which."""

import asyncio
import shutil
from dataclasses import replace

import pytest

from shoal.engine.hot_swap import WeightChange
from shoal.engine.native import LocalEngine
from shoal.errors import Overreach, StateError
from shoal.roles import validator as judging
from shoal.roles.node.session import Session
from shoal.weights.delta import tensor_codes
from shoal.weights.engine_loader import LoadedEngine
from shoal.weights.manifest import weights_root
from tests.engine.test_hot_swap import is_torn, none_is_too_small, rollouts, same, versions  # noqa: F401
from tests.roles.in_memory_run import Town, tiny_run

SLOW = {"train": {"lr": 1e-6}, "policy": {"dtype": "bfloat16"}}
"""Steps that leave most values as they were."""


@pytest.fixture
def two(tmp_path):
    return versions(tmp_path)


@pytest.fixture
def counted(monkeypatch):
    """Versions that were loaded anew, and versions that were reached in place."""
    loaded, changed = [], []
    load, change = LocalEngine.load, LocalEngine.change

    def noted_load(engine, directory, version):
        loaded.append(version)
        load(engine, directory, version)

    def noted_change(engine, before, after, version, is_right):
        if done := change(engine, before, after, version, is_right):
            changed.append(version)
        return done

    monkeypatch.setattr(LocalEngine, "load", noted_load)
    monkeypatch.setattr(LocalEngine, "change", noted_change)
    return loaded, changed


def policy_with(directory=None, dtype="bfloat16"):
    policy = LoadedEngine(LocalEngine(threads=1, dtype=dtype), lambda directory: object())
    if directory is not None:
        policy.load(directory, 0, weights_root(directory))
    return policy


def fresh(directory):
    return policy_with(directory).engine


def test_versions_follow_each_other_in_place_and_back(two, counted):
    first, second = two
    policy = policy_with(first)
    policy.load(second, 1, weights_root(second))
    assert same(policy.engine, fresh(second)) and rollouts(policy.engine)[0] == rollouts(fresh(second))[0]
    policy.load(first, 0, weights_root(first))
    assert same(policy.engine, fresh(first)) and policy.engine.version == 0
    loaded, changed = counted
    assert changed == [1, 0] and loaded == [0] * 4, "the first version, and three to compare with"


def test_without_a_root_every_version_is_loaded_anew(two, counted):
    policy = policy_with()
    for version, directory in enumerate((*two, two[0])):
        policy.load(directory, version)
    policy.load(two[1], 3, weights_root(two[1]))
    assert counted == ([0, 1, 2, 3], [])


def flip(directory):
    """Damage a value in the middle of a version's weights."""
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, shutil.rmtree, lambda base: (base / "model.safetensors").write_bytes(b"")])
def test_a_base_that_is_damaged_or_gone_is_not_gone_on_from(two, counted, harm):
    policy = policy_with(two[0])
    harm(two[0])
    policy.load(two[1], 1, weights_root(two[1]))
    assert counted == ([0, 1], []) and same(policy.engine, fresh(two[1]))


def test_a_base_that_is_damaged_while_it_is_read_leaves_no_old_value(two, counted, monkeypatch):
    """The disk then says of a value that it does not change, and the engine would keep the old one."""
    policy, make = policy_with(two[0]), WeightChange.make
    before, after = (bytearray((directory / "model.safetensors").read_bytes()) for directory in two)
    assert len(before) == len(after)

    def damaging(change):
        at = next(at for at in range(len(before) // 2, len(before)) if before[at] != after[at]) & ~1
        before[at : at + 2] = after[at : at + 2]
        (two[0] / "model.safetensors").write_bytes(before)
        make(change)

    monkeypatch.setattr(WeightChange, "make", damaging)
    policy.load(two[1], 1, weights_root(two[1]))
    assert same(policy.engine, fresh(two[1])) and counted == ([0, 1, 0], [])


def test_a_base_that_is_deleted_meanwhile_is_still_gone_on_from(two, counted, monkeypatch):
    """A version that is fetched ahead makes room for itself."""
    policy, make = policy_with(two[0]), WeightChange.make

    def deleting(change):
        shutil.rmtree(two[0])
        make(change)

    monkeypatch.setattr(WeightChange, "make", deleting)
    policy.load(two[1], 1, weights_root(two[1]))
    assert counted == ([0], [1]) and same(policy.engine, fresh(two[1]))


def test_a_base_that_vanishes_while_it_is_opened_is_not_gone_on_from(two, counted, monkeypatch):
    policy, find = policy_with(two[0]), tensor_codes.find_tensors

    def vanishing(directory):
        found = find(directory)
        if directory == two[0]:
            shutil.rmtree(directory)
        return found

    monkeypatch.setattr(tensor_codes, "find_tensors", vanishing)
    policy.load(two[1], 1, weights_root(two[1]))
    assert counted == ([0, 1], []) and same(policy.engine, fresh(two[1]))


def test_a_version_that_is_damaged_after_it_was_verified_is_never_used(two, tmp_path):
    policy, root = policy_with(two[0]), weights_root(two[1])
    whole = shutil.copytree(two[1], tmp_path / "whole")
    flip(two[1])
    with pytest.raises(StateError, match="second was damaged after it was verified: start again"):
        policy.load(two[1], 1, root)
    assert is_torn(policy.engine)
    policy.load(whole, 1, root)
    assert same(policy.engine, fresh(whole))


@pytest.mark.parametrize("failure", [StateError, MemoryError])
def test_a_change_that_fails_halfway_is_followed_by_a_load(two, counted, monkeypatch, failure):
    policy, write, calls = policy_with(two[0]), WeightChange._write, []

    def failing(change, name, place):
        calls.append(name)
        if len(calls) == 5:
            raise failure("in the middle")
        write(change, name, place)

    monkeypatch.setattr(WeightChange, "_write", failing)
    root = weights_root(two[1])
    if failure is StateError:
        policy.load(two[1], 1, root)
    else:
        with pytest.raises(MemoryError):
            policy.load(two[1], 1, root)
        assert is_torn(policy.engine)
        policy.load(two[1], 1, root)
    assert counted == ([0, 1], []) and same(policy.engine, fresh(two[1]))


def test_a_node_without_memory_for_a_change_leaves_and_does_not_play_on(tmp_path, monkeypatch):
    """The worker is a stranger with a limit: what it says of a failed allocation is an `Overreach`."""
    town = Town(tmp_path / "run", tiny_run(**SLOW, steps=3))
    worker = town.worker("stranger", own_files=False)

    async def story():
        trainer = asyncio.create_task(town.trainer().run())
        others = [asyncio.create_task(town.validator().run()), asyncio.create_task(town.worker("other").run())]
        try:
            with pytest.raises(Overreach, match="took more memory than the"):
                await asyncio.wait_for(worker.run(), 60.0)
        finally:
            for task in (trainer, *others):
                task.cancel()
            await asyncio.gather(trainer, *others, return_exceptions=True)

    make = WeightChange.make

    def make_for(change):
        if change._decoder is worker.session.engine._loaded:
            raise MemoryError
        make(change)

    monkeypatch.setattr(WeightChange, "make", make_for)
    asyncio.run(story())
    assert is_torn(worker.session.engine)


# --- in a run ---


def lived(root, **changes):
    town = Town(root, tiny_run(**SLOW, steps=4, **changes))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert town.audit().findings == []
    return town


def test_a_run_in_place_ends_with_the_weights_of_one_that_loads_every_version(tmp_path, monkeypatch, counted):
    town = lived(tmp_path / "run")
    loaded, changed = counted
    assert len(changed) >= 6 and loaded.count(0) == 2, "worker and validator load the first version only"
    monkeypatch.setattr(LocalEngine, "change", lambda *args: False)
    assert lived(tmp_path / "plain").weights() == town.weights()


def test_a_validator_that_steps_back_and_forth_gives_the_same_verdicts(tmp_path, monkeypatch, counted):
    judged, seats, verify = [], [], judging.verify_submission
    monkeypatch.setattr(
        Session, "__post_init__", lambda seat, make=Session.__post_init__: (make(seat), seats.append(seat))
    )

    def noted(body, check, tools, *more):
        verdict = verify(body, check, tools, *more)
        kept = tmp_path / f"version-{check.lease.version}"
        if not kept.exists():
            (seat,) = [one for one in seats if one.engine.version == check.lease.version and one.home.name[:3] == "val"]
            shutil.copytree(seat._in_use, kept)
        judged.append((body, check, tools, more, verdict))
        return verdict

    monkeypatch.setattr(judging, "verify_submission", noted)
    town = Town(tmp_path / "run", tiny_run(**SLOW, steps=4, rollouts={"block_rollouts": 8}))
    people = [town.worker("honest"), town.worker("cheat", "other-seed")]
    asyncio.run(town.live(town.trainer(), town.validator(), *people))
    monkeypatch.setattr(judging, "verify_submission", verify)
    outcomes = {group.outcome for *_, verdict in judged for group in verdict.groups}
    assert {"accept", "hard"} <= outcomes and len({check.lease.version for _, check, *_ in judged}) == 4

    policy = policy_with()
    back_and_forth = [*reversed(judged), *judged, *judged[::2], *judged[::-3]]
    for body, check, tools, more, verdict in back_and_forth:
        version = check.lease.version
        directory = tmp_path / f"version-{version}"
        if policy.engine.version != version:
            policy.load(directory, version, weights_root(directory))

        def score(requests, check=check):
            return policy.engine.score(requests, check.lease.sampling.temperature, bool(check.project_for))

        assert verify(body, check, replace(tools, score=score), *more) == verdict
    assert counted[1].count(0) >= 1 and counted[1].count(1) >= 2, "it went back in place"
