"""What a worker would submit of turns that an engine wrote, for the engine that replays them."""

from collections.abc import Sequence

from shoal.engine.interface import Continuation, EngineRequest, ScoreRequest


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
