"""Taking a seat in a run: what a node cannot do, it refuses in one line before it joins."""

import asyncio

import msgspec
import pytest

from shoal.errors import PeerError
from tests.roles.town import Town, tiny_run

ROLES = ("worker", "validator")


def meets(town, role, error, match):
    """A role refuses the town's run, and has not joined it."""
    node = town.worker("worker") if role == "worker" else town.validator()
    with pytest.raises(error, match=match) as raised:
        asyncio.run(asyncio.wait_for(node.run(), 30.0))
    assert "\n" not in str(raised.value) and not town.desk.state.members


def saying(town, **changes):
    """The town, describing itself otherwise."""
    info = town.desk.info
    town.desk.info = lambda: msgspec.structs.replace(info(), **changes)
    return town


@pytest.mark.parametrize("role", ROLES)
def test_a_run_of_another_protocol_is_refused(tmp_path, role):
    town = saying(Town(tmp_path / "run", tiny_run()), protocol=2)
    meets(town, role, PeerError, "the run speaks protocol 2, we speak 1")
