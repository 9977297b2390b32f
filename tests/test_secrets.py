"""What a run keeps secret: strangers must not be able to compute it, and nothing that they send may change it."""

from pathlib import Path
from typing import Any

import pytest

import shoal.run_folder as folder_module
from shoal.errors import StateError
from shoal.ledger.slot_draws import audit_draws, recheck_draw
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import Rules
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, SecretChain
from shoal.run_folder import RunFolder
from tests.roles.testbed import RunTestbed, tiny_run

OPEN = [{"bind": "0.0.0.0"}, {"bind": "192.168.1.7"}, {"bind": "::"}, {"bind": ""}, {"public_url": "https://x.y"}]
ALONE = [{"bind": "127.0.0.1"}, {"bind": "127.0.0.9"}, {"bind": "::1"}, {"bind": "localhost"}]


def begun(root: Path, *, for_others: bool = False, **changes: Any) -> RunFolder:
    folder = RunFolder(root)
    folder.prepare(tiny_run(**changes), root.parent, for_others=for_others)
    return folder


def guessed(seed: int) -> bytes:
    """What anyone can compute from a run file with a fixed seed."""
    return domain_hash("fixed seed", seed.to_bytes(8, "big"))


@pytest.mark.parametrize("host", OPEN)
def test_a_run_that_others_can_join_has_a_secret_that_its_seed_does_not_tell(tmp_path: Path, host: dict) -> None:
    folders = [begun(tmp_path / name, seed=7, host=host) for name in "ab"]
    assert len({*(folder.secret() for folder in folders), guessed(7)}) == 3
    assert len({folder.run_id() for folder in folders}) == 2


@pytest.mark.parametrize("host", ALONE)
def test_a_run_of_this_machine_alone_can_be_repeated_from_its_seed(tmp_path: Path, host: dict) -> None:
    one, two = (begun(tmp_path / name, seed=7, host=host) for name in "ab")
    assert one.secret() == two.secret() == guessed(7)
    assert begun(tmp_path / "c", seed=-1, host=host).secret() != begun(tmp_path / "d", seed=-1, host=host).secret()


def test_the_seed_fixes_the_first_weights_of_a_hosted_run_and_the_secret_does_not_show_in_them(tmp_path: Path) -> None:
    config = tiny_run(seed=7)
    hosted, alone = begun(tmp_path / "a", seed=7, for_others=True), begun(tmp_path / "b", seed=7)
    assert hosted.weights_seed(config) == alone.weights_seed(config)
    drawn = begun(tmp_path / "c", seed=-1)
    assert drawn.weights_seed(tiny_run(seed=-1)) != int.from_bytes(drawn.secret()[:4], "big")


@pytest.mark.parametrize("host", OPEN)
def test_a_run_that_began_alone_with_a_seed_is_never_opened_to_others(tmp_path: Path, host: dict) -> None:
    begun(tmp_path / "run", seed=7)
    with pytest.raises(StateError, match=r"seed = 7.*--out"):
        begun(tmp_path / "run", seed=7, host=host)
    with pytest.raises(StateError, match=r"seed = 7.*--out"):
        begun(tmp_path / "run", seed=7, for_others=True)
    begun(tmp_path / "run", seed=7)  # alone it goes on


def test_a_secret_that_a_kill_left_without_a_run_is_not_hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = folder_module.write_atomically

    def killed(path: Path, data: bytes, **options: Any) -> None:
        if path.name == "run.json":
            raise KeyboardInterrupt
        write(path, data, **options)

    monkeypatch.setattr(folder_module, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path / "run", seed=7)
    monkeypatch.undo()
    assert RunFolder(tmp_path / "run").secret() == guessed(7)
    assert begun(tmp_path / "run", seed=8, for_others=True).secret() not in (guessed(7), guessed(8))


def test_a_hosted_run_resumes_with_its_secret(tmp_path: Path) -> None:
    first = begun(tmp_path / "run", seed=7, host=OPEN[0]).secret()
    assert begun(tmp_path / "run", seed=7, host=OPEN[1]).secret() == first


@pytest.mark.parametrize(("for_others", "known"), [(True, False), (False, True)])
def test_the_attack_with_a_known_seed_works_only_where_nobody_can_join(
    tmp_path: Path, for_others: bool, known: bool
) -> None:
    """An attacker has the run file and the log. The links that it computes would tell every task and every audit."""
    begun(tmp_path / "run", seed=7, for_others=for_others)
    testbed = RunTestbed(tmp_path / "run", tiny_run(seed=7), for_others=for_others)
    ends = (testbed.coordinator.state.chain_end, testbed.coordinator.state.audit_chain_end)
    attackers = tuple(SecretChain(guessed(7), purpose).end().hex() for purpose in (SLOT_CHAIN, AUDIT_CHAIN))
    assert (attackers == ends) is known
    assert ("seed" in testbed.coordinator.state.config) is not known


# --- draws ---


def test_each_lease_slot_and_link_has_draws_of_its_own() -> None:
    state = State(rules=Rules(4, 4, 4, 1, 9, 60.0, 0.05, "float32", {}))
    lease = LeaseRecord("17", "w" * 64, "main", 3, (2, 5), 0.0, 60.0)
    again = LeaseRecord("18", "w" * 64, "main", 3, (2, 5), 0.0, 60.0)
    found = [audit_draws(state, each, link) for each in (lease, again) for link in (b"link", b"other")]
    assert len({draw for draws in found for draw in draws}) == 4 * 8
    assert recheck_draw(lease, b"link") != recheck_draw(again, b"link")
