"""How much the embedded engine holds at a time: what bounds its memory beyond weights and caches.

Read by `reading`, `writing` and `scoring`, and by `needs` and `launch/fits`, which add it up. Light: what a run needs is
also asked on a machine without torch.
"""

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384, "mps": 4096}
"""Padded tokens of one prefill, at most: as many as fit a CPU's cache, or fill a GPU."""

PREFILL_BYTES = 1 << 30
"""What a layer makes of a prefill on a GPU, at most: a large policy fills a GPU with fewer tokens."""

NOISE_VALUES = 1 << 15
"""Noise values made, and logits kept, at a time in a turn: enough to spread the cost of small operations, but little to
throw away if the turn ends early."""

SCORED_VALUES = 1 << 22
"""Number of logits and noise values held at a time when scoring."""
