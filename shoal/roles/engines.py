"""Whether an engine that a user chose may take part in a run.

Called before a node opens its engine, and when it joins. Such an engine computes in another way than those that replay
its work, so honest work would be refused where nobody has measured how far they differ. The coordinator refuses such a
worker, too.
"""

from shoal.errors import PeerError
from shoal.protocol.bounds import engine_kind, unmeasured
from shoal.protocol.constants import VLLM
from shoal.protocol.needs import ADAPTERS, CODED_BASE
from shoal.protocol.types import RunInfo


def demand_engine_fits(run: RunInfo, implementation: str) -> None:
    """Raise `PeerError` if a run has no bounds for the pairs of this engine, or asks for what it cannot give."""
    why = unmeasured(run.rules, implementation)
    if why:  # guard: pairs-without-bounds
        raise PeerError(why)
    if engine_kind(implementation) != VLLM:
        return
    if run.rules.proofs != "none":  # guard: vllm-proves-nothing
        raise PeerError("this run asks for proofs of activations, which vllm cannot give: join without --engine")
    if CODED_BASE in run.needs:  # guard: vllm-reads-no-codes
        raise PeerError(
            "the versions of this run are adapters of a model in NF4, which only shoal's own engine reads: join without "
            "--engine"
        )
    if ADAPTERS in run.needs and run.rules.dtype != "float32":  # guard: vllm-adapts-in-float32
        raise PeerError(
            f"the versions of this run are adapters in {run.rules.dtype}, which vllm computes in float32 only here: join "
            "without --engine"
        )
