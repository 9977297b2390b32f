"""What a worker would submit of turns that an engine wrote, for the engine that replays them; and two turns to compare."""

from collections.abc import Sequence

from shoal.engine.interface import Continuation, EngineRequest, PolicyScore, ScoreRequest
from shoal.engine.native import LocalEngine


def claims_of(requests: Sequence[EngineRequest], turns: Sequence[Continuation]) -> list[ScoreRequest]:
    """Each conversation with its turn, whose tokens are to be scored."""
    return [
        ScoreRequest(
            [*request.token_ids, *turn.token_ids],
            range(len(request.token_ids), len(request.token_ids) + len(turn.token_ids)),
            request.seed,
        )
        for request, turn in zip(requests, turns, strict=True)
    ]


def two_turns(engine: LocalEngine) -> tuple[list[Continuation], list[PolicyScore]]:
    """What an engine writes in two turns, and what it says of the second."""
    requests = [EngineRequest(f"{i}", [i, 7, 3], bytes([i]) * 32, 12, frozenset({0})) for i in range(5)]
    turns = engine.extend(requests, 0.9)
    further = [r._replace(token_ids=[*r.token_ids, *t.token_ids, 9]) for r, t in zip(requests, turns, strict=True)]
    more = engine.extend(further, 0.9)
    engine.forget(request.rollout for request in requests)
    return [*turns, *more], engine.score(claims_of(further, more), 0.9, hidden=True)
