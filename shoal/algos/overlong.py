"""The soft punishment of answers that come near the length limit: that of DAPO (arXiv:2503.14476, equation 13).

Called by `envs/shaping` and, through `graders/format`, by environments. Pure: it knows no task, token or text.

    symbol    meaning                                                argument
    |y|       length of the answer                                   length
    L_max     length at which the punishment is whole                limit
    L_cache   how far below it the punishment begins                 buffer
    R         0                                  |y| <= L_max - L_cache
              (L_max - L_cache - |y|) / L_cache  up to L_max
              -1                                 above

Without it, a right answer that is cut off gets the reward of a wrong one, which is noise. Here the last tokens before the
limit say that they are too many. Changed from the paper: nothing; with a buffer of 0 the step at L_max remains.
"""


def overlong(length: float, limit: float, buffer: float) -> float:
    """R, from -1 to 0."""
    if length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer) if buffer > 0 else -1.0
