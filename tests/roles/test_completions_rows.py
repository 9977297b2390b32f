"""The host plays environments whose rollouts have several rows, settings, or a comparison of siblings."""

import asyncio
from collections import defaultdict

from msgspec.structs import replace

from shoal.config import TinyPolicy
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import from_msgpack
from shoal.roles.auditor.rejudge_groups import AGREE, GroupChoice, audit_rollouts
from shoal.runs.log_source import FolderRun
from tests.envs import musing, pile, rivals
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

ENVS = [
    {"name": pile.__file__},
    {"name": musing.__file__, "max_turn_tokens": 5},
    {"name": rivals.__file__, "label": "rivals", "system": "play", "examples": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "aa"},
    ]},
]  # fmt: skip


def test_rows_settings_and_comparisons_give_the_bytes_of_episodes(tmp_path):
    """The run of one file plays the environments as a worker of episodes would; here strangers do not have them."""
    policy = tmp_path / "policy"
    make_tiny(
        TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=128), policy, 5, "float32"
    )
    config = tiny_run(
        envs=ENVS, seed=7, steps=2, policy={"path": str(musing.with_template(policy))}, verify={"proofs": "toploc"},
        sampling={"max_turn_tokens": 6, "max_tokens": 120, "max_rollout_tokens": 300}, storage={"retain": "all"},
        rollouts={"batch_groups": 6},
    )  # fmt: skip
    testbed = RunTestbed(
        tmp_path / "run", replace(config, envs=tuple(replace(env, kind=COMPLETIONS) for env in config.envs))
    )
    strangers = [testbed.worker(f"stranger-{i}", own_files=False) for i in range(2)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *strangers))
    testbed.stage.close()
    assert testbed.audit().findings == [] and testbed.coordinator.state.refused == {}
    rows, rewards = defaultdict(set), defaultdict(set)
    for name, submission in testbed.coordinator.state.submissions.items():
        record = from_msgpack(testbed.coordinator.blobs.get(submission.record), t.Record)
        for data, recorded in zip(
            from_msgpack(testbed.coordinator.blobs.get(name), t.Submission).groups, record.groups, strict=True
        ):
            group = from_msgpack(data, t.Group)
            rows[group.env] |= {len(rollout.rows()) for rollout in group.rollouts}
            rewards[group.env] |= {rollout.reward for rollout in recorded.rollouts}
    assert max(rows["pile"]) == 2 and max(rows["musing"]) == 3 and rows["rivals"] == {1}
    assert rewards["rivals"] == {0.0, 1.0}
    found = asyncio.run(audit_rollouts(FolderRun(testbed.folder.root), GroupChoice(), threads=1, own_files=False))
    assert found.exit_code() == AGREE and found.with_model == found.groups > 0, str(found)
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
