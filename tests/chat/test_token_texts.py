"""Texts of single tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.chat.renderer import LONGEST, UNKNOWN, pieces_of


@pytest.fixture
def by_bytes():
    """A tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain", "a \N{SNOWMAN} of \N{PILE OF POO}!", "e\u0301", ""])
def test_pieces_joined_are_the_text_and_each_character_is_its_last_tokens(by_bytes, text):
    ids = by_bytes.encode(text).ids
    pieces = pieces_of(by_bytes.decode, ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert all(len(piece) <= 1 for piece in pieces)


def test_bytes_that_are_no_character_are_told_and_what_follows_is_whole(by_bytes):
    snowman, first = by_bytes.encode("\N{SNOWMAN}").ids, by_bytes.encode("\N{SNOWMAN}").ids[:1]
    assert pieces_of(by_bytes.decode, snowman[:2])[-1].strip(UNKNOWN) == ""
    pieces = pieces_of(by_bytes.decode, first * (3 * LONGEST) + by_bytes.encode("after").ids)
    assert "".join(pieces).strip(UNKNOWN) == "after" and len(pieces) == 3 * LONGEST + 5
