"""What a worker's log says of its pay."""

import asyncio
import logging

from shoal.protocol.messages import NodeState
from shoal.roles.node.activity import NodeReport


def test_a_change_of_pay_has_its_sign_and_a_loss_its_cause(caplog) -> None:
    paid = iter((100, 100, 60))

    class Client:
        accepted = 0

        async def get_json(self, *_, **__) -> NodeState:
            self.accepted += 4
            return NodeState("a" * 64, "worker", "a", "good", next(paid), self.accepted, 0, 0, {}, "")

    standing = NodeReport(Client(), "a" * 64, NodeState("a" * 64, "worker", "a", "new", 0, 0, 0, 0, {}, ""))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            asyncio.run(standing.tell(1.0, last=True))
    told = [line for record in caplog.records if (line := record.getMessage()).startswith("accepted groups=4 ")]
    assert [line.split("credits=")[1].split(" total")[0] for line in told] == [
        "+100", "+0 (lapsed leases took pay)", "-40 (lapsed leases took pay)",
    ]  # fmt: skip
