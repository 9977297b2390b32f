"""The text of each token of a sequence, such that the pieces joined are the text of the whole.

Pure: the tokenizer's `decode` is an argument.
"""

from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"
"""What bytes that are not a whole character become."""


def pieces_of(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """One text for each token. A character of several tokens is the last one's; the others have an empty text.

    A token is decoded after the ones before it, back to the last that ended with a whole character, because some tokenizers
    write the first token of a sequence in another way.
    """
    pieces, first, told = list[str](), 0, 0
    for end in range(1, len(token_ids) + 1):
        before, whole = decode(token_ids[first:told]), decode(token_ids[first:end])
        is_whole = not whole.endswith(UNKNOWN) or end == len(token_ids) or end - told > LONGEST
        if is_whole:
            pieces.append(whole[len(before) :])
            first, told = told, end
        else:
            pieces.append("")
    return pieces


LONGEST = 8
"""Most tokens of one character. So bytes that never become one are told, and the work for a token is bounded."""
