"""An environment of verifiers v0 with tools over several turns, rewards that ask for arguments by name, and weights."""

import random

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "bread": 5, "cheese": 8}


async def price(item: str) -> int:
    """What an item costs.

    Args:
        item: The item.
    """
    return PRICES[item]


def discount() -> str:
    """Today's discount in percent."""
    return str(random.randint(1, 90))


def correct(parser, completion, answer) -> float:
    return float(parser.parse_answer(completion) == answer)


async def polite(completion, **kwargs) -> float:
    return float("please" in str(completion[-1].content))


def asked(state, info) -> float:
    return float(len(state["trajectory"]) > info["least"])


def load_environment(rows: int = 6) -> vf.Environment:
    items = [list(PRICES)[i % 3] for i in range(rows)]
    data = Dataset.from_list([
        {"question": f"{i}: what does {item} cost?", "answer": str(PRICES[item]), "info": {"least": 1}}
        for i, item in enumerate(items)
    ])  # fmt: skip
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[correct, polite, asked], weights=[1.0, 0.25, 0.0], parser=parser)
    return vf.ToolEnv(
        dataset=data, tools=[price, discount], max_turns=4, rubric=rubric, parser=parser, system_prompt="A shop."
    )
