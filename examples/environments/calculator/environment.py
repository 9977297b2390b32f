"""Digit sums of large powers: too much to do in the head, and one line of Python.

The policy may call a tool, which runs its program in the sandbox, and then answers with a number. The pool starts its
sandbox at the first call, so loading this file starts nothing. Each program begins in an empty world, and cannot reach
this process. A state is the task, what programs have printed, and the answer.
"""

import functools

from shoal.env import Ended, Env, Limits, Pool, Step, require_index
from shoal.graders.extract import last_number
from shoal.graders.number_answers import numeric

MAX_CALLS, MAX_OUTPUT = 4, 1000
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and read what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class Calculator(Env):
    name = "calculator"
    num_tasks, num_heldout = 200, 50
    tools = (PYTHON,)

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return 3 + index % 25, 30 + index // 25 + (20 if heldout else 0)

    def reset(self, task):
        ask = f"What is the sum of the decimal digits of {task[0]}**{task[1]}? End with the number."
        return (task, (), ""), [{"role": "user", "content": ask}]

    def step(self, state, action):
        task, printed, _ = state
        if not action.tool_calls or len(printed) >= MAX_CALLS:
            return Step((task, printed, action.visible), None, True)
        texts = [run(call) for call in action.tool_calls[: MAX_CALLS - len(printed)]]
        results = [{"role": "tool", "name": "python", "content": text} for text in texts]
        return Step((task, (*printed, *texts), ""), results, False)

    def score(self, state):
        return numeric(last_number(state[2]), self.solution(state[0])).score

    def solution(self, task):
        return str(sum(map(int, str(task[0] ** task[1]))))

    def players(self):
        return {"right": calls_then_answers, "wrong": lambda state, rng: "0"}


@functools.cache
def pool():
    return Pool(1, Limits(wall_s=2.0, cpu_s=2, memory_mb=128))


def run(call):
    code = call.arguments.get("code")
    if call.name != "python" or not isinstance(code, str):
        return "error: call python with the argument code"
    outcome = pool().run(code)
    text = (outcome.stdout + outcome.stderr).decode("utf-8", "replace")[-MAX_OUTPUT:]
    return text if isinstance(outcome, Ended) else f"{text}\nstopped: {outcome.reason.value}"


def calls_then_answers(state, rng):
    (base, exponent), printed, _ = state
    if printed:
        return printed[-1]
    code = f"print(sum(map(int, str({base}**{exponent}))))"
    return f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'


environment = Calculator
