"""An environment of verifiers v0 whose reward functions fail on some answers."""

import verifiers as vf
from datasets import Dataset


def brittle(completion, answer) -> float:
    text = completion[-1].content
    if text == "nothing":
        return None
    return float(int(text) == int(answer))


async def patient(completion, **kwargs) -> float:
    if completion[-1].content == "7":
        raise TimeoutError("the judge did not answer")
    return 0.0


def odd(completion) -> float:
    raise ValueError("a metric")


def load_environment(grouped: bool = False) -> vf.Environment:
    data = Dataset.from_list([{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)])
    rubric = vf.Rubric(funcs=[brittle, patient, odd], weights=[1.0, 0.5, 0.0])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.RubricGroup([rubric]) if grouped else rubric)
