"""An environment of verifiers v1 with two agents, who take turns to name a number: the higher one wins."""

from itertools import count

import verifiers.v1 as vf


class DuelData(vf.TaskData):
    limit: int


class DuelTask(vf.Task[DuelData]):
    pass


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    trains: str = "left right"


class Duel(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.left.trainable = "left" in self.config.trains
        agents.right.trainable = "right" in self.config.trains

    async def run(self, task, agents):
        seat = vf.Task(vf.TaskData(prompt=None, system_prompt=f"Up to {task.data.limit}."))
        async with agents.left.interaction(seat) as left, agents.right.interaction(seat) as right:
            sums = []
            for player in (left, right):
                for turn in (1, 2):
                    segment = await player.turn(f"Turn {turn}. Available moves: [1] [2] [3]")
                    if segment.terminated:
                        break
                    number = {"[1]": 1, "[2]": 2, "[3]": 3}.get(segment.last_reply, 0)
                    player.trace.info["sum"] = player.trace.info.get("sum", 0) + number
                sums.append(player.trace.info.get("sum", 0))
        for trace, own, other in ((left.trace, *sums), (right.trace, *sums[::-1])):
            trace.record_reward("win", float((own > other) - (own < other)))


class Duels(vf.Taskset[DuelTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in count():
            yield DuelTask(DuelData(prompt=None, limit=3, name=f"duel {i}"))


__all__ = ["Duel", "Duels"]
