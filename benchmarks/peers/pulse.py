"""PULSE's weight sync (arXiv:2602.03839), written anew from its description, for `benchmarks/patches.py`.

The values, not the differences, at the changed places, as coordinates of the tensor seen as a matrix: the rows as
differences from place to place (uint8 if all fit, else int32), the columns as differences within a row and whole at its
beginning (uint16 if all fit, else int32), the values as stored; tensor after tensor; all of it through zstd at level 1.
Names, shapes and counts are left out here, which favours PULSE.
"""

import sys
from collections.abc import Iterator

if __name__ == "__main__":  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

import numpy as np

from shoal.weights.delta.tensor_codes import EncodedTensor, Weights


def encode(base: Weights, new: Weights, level: int = 1) -> tuple[bytes, dict[str, int]]:
    """The bytes that lead from one version to the next, and what the reader is told besides: changes by tensor."""
    import pyarrow

    parts, counts = [], {}
    for name, tensor in base.items():
        at = np.flatnonzero(tensor.codes != new[name].codes)
        rows, columns = np.divmod(at, _width(tensor))
        row_steps = np.diff(rows, prepend=0)
        column_steps = np.where(row_steps > 0, columns, np.diff(columns, prepend=0))
        parts += [_smallest(row_steps, np.uint8), _smallest(column_steps, np.uint16), new[name].codes[at].tobytes()]
        counts[name] = len(at)
    return pyarrow.Codec("zstd", compression_level=level).compress(b"".join(parts), asbytes=True), counts


def apply(weights: Weights, data: bytes, counts: dict[str, int]) -> None:
    """Write the new values in place. Only for checking `encode`: it trusts its bytes and assumes small steps."""
    import pyarrow

    values = sum((3 + tensor.codes.itemsize) * counts[name] for name, tensor in weights.items())
    left = memoryview(pyarrow.Codec("zstd").decompress(data, values, asbytes=True))
    for name, tensor in weights.items():
        row_steps, left = np.frombuffer(left[: counts[name]], np.uint8), left[counts[name] :]
        column_steps, left = np.frombuffer(left[: 2 * counts[name]], "<u2"), left[2 * counts[name] :]
        size_bytes = counts[name] * tensor.codes.itemsize
        new, left = np.frombuffer(left[:size_bytes], tensor.codes.dtype), left[size_bytes:]
        rows = np.cumsum(row_steps, dtype=np.int64)
        for row, first, end in _runs(rows):
            columns = np.cumsum(column_steps[first:end], dtype=np.int64)
            tensor.codes[row * _width(tensor) + columns] = new[first:end]


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    firsts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
    ends = [*firsts, len(rows)][1:]
    yield from ((int(rows[first]), first, end) for first, end in zip(firsts, ends, strict=True))


def _width(tensor: EncodedTensor) -> int:
    return tensor.shape[-1] if tensor.shape else 1


def _smallest(steps: np.ndarray, small: type[np.unsignedinteger]) -> bytes:
    fits = len(steps) == 0 or steps.max() <= np.iinfo(small).max
    return steps.astype(small if fits else np.int32).tobytes()
