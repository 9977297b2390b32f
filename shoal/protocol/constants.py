"""Numbers that every node of a run must agree on, with what breaks when one changes.

Read by every room. Nothing here is configurable: a run that needs another value is another protocol version.
"""

PROTOCOL_VERSION = 1
"""Sent in `GET /v1/run`; a node refuses a run that speaks another. Changing breaks: every older node."""

DOMAIN = b"shoal/v1/"
"""Prefix of every hash and signature, so that one made for one purpose never serves another.
Changing breaks: all seeds, all signatures, every replay of an older run."""

EPISODES = "episodes"
"""The kind of lease item whose slots are groups of rollouts. Changing breaks: every older node."""

MAIN_STREAM = "main"
"""The stream of policy versions in a run that trains one policy. Changing breaks: every log."""

CHAIN_LENGTH = 4096
"""Links in one chain of secrets, that is versions that a run can have: a chain cannot be extended.
Changing breaks: the published chain end of existing runs."""

PHILOX_ROUNDS = 10
"""Rounds of Philox4x32. Changing breaks: every sampled token ever replayed."""

# Sizes, in bytes unless the name says otherwise. A larger request is answered 413, with the limit.
MAX_JSON_BYTES = 1 << 20
"""Small requests. Changing breaks: nothing stored; nodes may refuse each other's larger requests."""

MAX_JSON_DEPTH = 32
"""Nesting of small requests. Changing breaks: nothing stored."""

MAX_SUBMISSION_BYTES = 64 << 20
"""One submission, msgpack. Changing breaks: leases sized against it."""

MAX_DISCARDED_BYTES = 2 * MAX_SUBMISSION_BYTES
"""Of a body that was refused, this much is taken and thrown away, so that the sender can read the refusal."""

SMALL_BODY_BYTES = 16 << 10
"""A request of a key that need have no role in the run, such as one to join or for a lease."""

MAX_BODIES_BYTES = 64 << 20
"""Bodies above SMALL_BODY_BYTES that a server reads into memory at one time; past it the answer is a 503. Submissions go
to disk instead: one for each lease at a time."""

MAX_HEADER_BYTES = 16 << 10
"""First line and headers of a request."""

MAX_CONNECTIONS = 4096
"""Connections that a server holds; for one more the longest idle is closed. Fewer where the system allows fewer files."""

MAX_ADDRESS_CONNECTIONS = 256
"""Connections of one network address, proxies that the run file trusts excepted."""

MAX_CHUNK_BYTES = 8 << 20
"""One chunk of a checkpoint; 62 GB make 7,750 chunks. Changing breaks: manifests already signed."""

MAX_MANIFEST_BYTES = 4 << 20
"""One signed manifest. Changing breaks: very large policies."""

MAX_SAFETENSORS_HEADER_BYTES = 1 << 20
"""Header of a weights file. Changing breaks: policies with more than about 10,000 tensors."""

MAX_TENSORS = 10_000
"""Tensors of a policy."""

MAX_ROLLOUT_TOKENS = 1 << 20
"""Tokens of one rollout, prompt included. Changing breaks: replay of longer ones."""

MAX_LOGPROB = 1e-3
"""Nats that a token's log-probability may be: rounding may put a certain token's just above 0. One bound for validators
and trainer: what the ones accept, the other must be able to learn from, or it can never go on. Changing breaks: replay."""

MAX_GROUP_ROLLOUTS = 4096
"""Rollouts of one group."""

MAX_BLOCK_ROLLOUTS = 4096
"""Rollouts of one block."""

MAX_LEASE_BLOCKS = 64
"""Blocks in one lease; more would let one lapse hold up a batch for long."""

MAX_NODES = 400
"""Nodes in one answer to `GET /v1/nodes`: as many of the longest as fit into MAX_JSON_BYTES. An answer with so many goes on
after its last node. Changing breaks: older readers stop early."""

MAX_EVENTS = 1000
"""Events in one answer to `GET /v1/events`. Changing breaks: older readers stop early."""

MAX_EVENTS_BYTES = 8 << 20
"""An answer with so many events, or that passes this many bytes, goes on after its last event; any other is the log's
end. Changing breaks: older readers stop early."""

MAX_FACT_CHARS = 64
"""Characters of a node's name, and of each fact of its engine; none of them controls a terminal. Changing breaks: logs
that hold longer ones."""

MAX_OPEN_LEASES = 2
"""Leases that one worker may hold: one being played and one prefetched."""

# Time, in seconds.
SIGNATURE_WINDOW_S = 60
"""A signed request is taken this long before and after its `created`. Changing breaks: nodes with slower clocks."""

LONG_POLL_S = 20.0
"""How long the coordinator holds a poll open. Below every common proxy's idle timeout."""

REQUEST_TIMEOUT_S = 60.0
"""A client gives up on an answer after this; longer than LONG_POLL_S by a margin for slow links."""

BODY_WINDOW_S, BODY_WINDOW_BYTES = 30.0, 256 << 10
"""In each such window a body must bring so many bytes more, or its end: 8.7 kB/s pass, a body that stalls does not."""

HEADER_TIMEOUT_S = 10.0
"""A request's headers must end this long after the connection was made, or after their first byte on one in use."""

IDLE_TIMEOUT_S = 75.0
"""A connection without a request is closed after this."""

REST_TIMEOUT_S = 5.0
"""The rest of a body that was refused is taken for this long; then the connection is closed."""

STALL_TIMEOUT_S = 120.0
"""A client that takes nothing of its answer for this long is cut off."""

MANIFEST_LIFETIME_S = 7 * 24 * 3600
"""A manifest expires after this; a source that stays behind is noticed by then."""

# Rates: token buckets of the HTTP edge, requests per second and the burst above it.
ADDRESS_REQUESTS_PER_S, ADDRESS_BURST = 500.0, 2000
"""Of one network address, before any signature is verified. A home or a laptop with many nodes stays far below."""

KEY_REQUESTS_PER_S, KEY_BURST = 100.0, 500
"""Of one key, once its signature is verified."""

MAX_BUCKETS = 65_536
"""Addresses, and keys, whose rate is remembered: about 10 MB. Past it the longest idle are forgotten."""
