"""The peer of `benchmarks/toploc.py`: CPU-seconds of the python package `toploc` 0.1.6 for a chunk, one JSON line.

    OMP_NUM_THREADS=1 .venv-toploc/bin/python benchmarks/peers/toploc_speed.py '[512, 4096]' CHUNKS REPEATS

It is given what it likes best: bfloat16 activations as a list for building, and for checking both its ways, of which
the faster counts. Process time counts the threads that its C++ part starts.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median

if {"-h", "--help"} & {*sys.argv[1:]}:  # before the imports, which a reader may not have
    print(__doc__)
    sys.exit()

import torch
from toploc import build_proofs_bytes, verify_proofs_bytes

K, CHUNK_TOKENS = 128, 32


def main() -> None:
    widths, chunks, repeats = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    figures = {}
    for width in widths:
        states = torch.randn(chunks * CHUNK_TOKENS, width, generator=torch.Generator().manual_seed(0)).bfloat16()
        as_list = list(states)
        proofs = build_proofs_bytes(as_list, CHUNK_TOKENS, K, skip_prefill=True)
        assert len(proofs) == chunks and len(proofs[0]) == 2 + 2 * K
        figures[width] = {
            "build": seconds(lambda given=as_list: build_proofs_bytes(given, CHUNK_TOKENS, K, True), repeats) / chunks,
            "check": min(
                seconds(lambda given=given, p=proofs: verify_proofs_bytes(given, p, CHUNK_TOKENS, K, True), repeats)
                for given in (states, as_list)
            )
            / chunks,
        }
    print(json.dumps(figures))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median CPU-seconds of the process."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return median(times)


if __name__ == "__main__":
    main()
