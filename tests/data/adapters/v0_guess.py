"""An environment of verifiers v0 that answers turn by turn, and ends with a word of its own; or misbehaves, if told to."""

import time

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    def __init__(self, fault: str, **kwargs):
        super().__init__(max_turns=5, **kwargs)
        self.fault = fault

    async def setup_state(self, state):
        state["secret"] = int(state["answer"])

    async def env_response(self, messages, state, **kwargs):
        guess = self.parser.parse(messages[-1].content)
        if self.fault == "error":
            raise vf.InfraError("the server is down")
        if self.fault == "clock":
            return [{"role": "user", "content": str(time.time_ns())}]
        if guess == str(state["secret"]):
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return []
        return [{"role": "user", "content": "higher" if guess < str(state["secret"]) else "lower"}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if self.fault == "forgets" and state["trajectory"] else messages


def found(state, parser) -> float:
    return float(state["final_env_response"] is not None)


def alike(completions) -> list[float]:
    return [1.0 for _ in completions]


def load_environment(fault: str = "") -> vf.Environment:
    def rows(first):
        return Dataset.from_list([{"question": "0-9?", "answer": str(i)} for i in range(first, first + 4)])

    parser = vf.ThinkParser()
    rubric = vf.Rubric(funcs=[alike if fault == "group" else found], parser=parser)
    return Guess(fault, dataset=rows(0), eval_dataset=rows(3), parser=parser, rubric=rubric)
