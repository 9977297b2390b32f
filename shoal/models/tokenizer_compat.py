"""Whether two models read and write the same token ids.

It compares tokenizers by what they say, not by their bytes: the same vocabulary is often saved with other settings. Light:
no torch. Chat templates may differ.
"""

from pathlib import Path

from shoal.errors import StateError
from shoal.models.auto_tokenizer import open_tokenizer
from shoal.models.config import ModelConfig


def demand_same_vocabulary(directory: Path, policy: Path, what: str) -> None:
    """Raise `StateError` if the model in a directory gives token ids another text than the policy does, or lacks some that
    the policy may write. `what` is the key of the run file that names it."""
    theirs, ours = vocabulary_of(directory), vocabulary_of(policy)
    if theirs != ours:  # guard: same-vocabulary
        odd = sorted(text for text in theirs.keys() | ours.keys() if theirs.get(text) != ours.get(text))[0]
        raise StateError(
            f"{what} = {directory}: its tokenizer is not the policy's, for {odd!r} is {_name(theirs, odd)} there and "
            f"{_name(ours, odd)} in the policy: choose a model of the same family"
        )
    there, here = (ModelConfig.from_directory(one).vocab_size for one in (directory, policy))
    if there < here:  # guard: no-id-beyond-its-embedding
        raise StateError(
            f"{what} = {directory}: it has {there} token ids, and the policy may write {here}: choose a model with as many"
        )


def vocabulary_of(directory: Path) -> dict[str, int]:
    """The id of each token, by its text. Raises `StateError`."""
    return open_tokenizer(directory).tokenizer.get_vocab(with_added_tokens=True)


def _name(vocabulary: dict[str, int], text: str) -> str:
    return f"token {vocabulary[text]}" if text in vocabulary else "no token"
