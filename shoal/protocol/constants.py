"""Numbers that every node of a run must agree on, with what breaks when one changes.

Nothing here is configurable: a run that needs another value is another protocol version.
"""

PROTOCOL_VERSION = 1
"""Sent in `GET /v1/run`; a node refuses a run of another version. Changing breaks: every older node."""

DOMAIN = b"shoal/v1/"
"""Prefix of every hash and signature, so that one made for one purpose never serves another.
Changing breaks: all seeds, all signatures, every replay of an older run."""

EPISODES = "episodes"
"""The kind of lease item whose slots are groups of rollouts. Changing breaks: every older node."""

COMPLETIONS = "completions"
"""The kind of lease item whose slots are groups of rollouts, too, but whose environment stays with the host: the worker
extends token ids, and asks the host for the environment's words after each turn. Changing breaks: every older node."""

CONTINUATIONS = "continuations"
"""The kind of lease item whose slots hold rollouts that continue those of an accepted group, from places within them.
Changing breaks: every older node."""

CONTROL_STOPS = "control"
"""In runs with this rule, every control token of the tokenizer ends a turn, except those that the chat template writes
within turns. Changing breaks: replay of every log that names no rule."""

MODEL_STOPS = "model"
"""In runs with this rule, a turn ends at the tokens with which the model was trained to end it. Changing breaks: every
older node."""

VLLM = "vllm"
"""Kind of the engine that samples with vLLM, as nodes name it. Changing breaks: bounds that run files have for it."""

MAIN_STREAM = "main"
"""The stream of policy versions in a run that trains one policy. Changing breaks: every log."""

ADMIN_ACTIONS = ("pause", "resume", "drain", "kick", "admit", "quarantine", "rate")
"""Of `POST /v1/admin/{action}`. One may be added. Changing breaks: requests of hosts with other versions."""

CHAIN_LENGTH = 4096
"""Links in one chain of secrets: one for each policy version that a run can have. A chain cannot be extended.
Changing breaks: the published chain end of existing runs."""

PHILOX_ROUNDS = 10
"""Rounds of Philox4x32. Changing breaks: every sampled token ever replayed."""

# Sizes, in bytes unless the name says otherwise. A larger request is answered 413, with the limit.
MAX_JSON_BYTES = 1 << 20
"""Size of a small request. Changing breaks: nothing stored; nodes may refuse each other's larger requests."""

MAX_JSON_DEPTH = 32
"""Depth of nesting in a small request. Changing breaks: nothing stored."""

MAX_SUBMISSION_BYTES = 64 << 20
"""One submission, msgpack. Changing breaks: leases sized against it."""

MAX_DISCARDED_BYTES = 2 * MAX_SUBMISSION_BYTES
"""A server reads up to this much of a body that it refused and drops it, so that the sender can read the refusal."""

SMALL_BODY_BYTES = 16 << 10
"""Body of a request from a key that may have no role in the run, such as a request to join or for a lease."""

MAX_BODIES_BYTES = 64 << 20
"""All bodies above SMALL_BODY_BYTES that a server holds in memory at one time; for more it answers 503. Submissions go to
disk instead, one for each lease at a time."""

MAX_HEADER_BYTES = 16 << 10
"""First line and headers of a request."""

MAX_CONNECTIONS = 4096
"""Connections that a server holds. For one more it closes the one that was idle longest. Fewer if the system allows fewer
open files."""

MAX_ADDRESS_CONNECTIONS = 256
"""Connections of one network address, except proxies that the run file trusts."""

MAX_CHUNK_BYTES = 8 << 20
"""One chunk of a checkpoint; 62 GB make 7,750 chunks. Changing breaks: manifests already signed."""

MAX_MANIFEST_BYTES = 4 << 20
"""One signed manifest. Changing breaks: very large policies."""

MAX_PATCH_CHAIN = 32
"""A patch begins at most so many versions before its own, and at most so many patches are applied one after another.
Changing breaks: manifests already signed."""

MAX_SAFETENSORS_HEADER_BYTES = 1 << 20
"""Header of a weights file. Changing breaks: policies with more than about 10,000 tensors."""

MAX_ADAPTER_RANK = 512
"""Rank of a low-rank adapter: A and B of a square matrix of width 1024 then have as many values as the matrix.
Changing breaks: nodes refuse each other's larger adapters."""

MAX_TENSORS = 10_000
"""Tensors of a policy."""

MAX_ROLLOUT_TOKENS = 1 << 20
"""Tokens of one rollout, prompt included, all rows together. Changing breaks: replay of longer ones."""

MAX_ROLLOUT_STEPS = 256
"""Turns or steps of one rollout with rewards of their own. Verdicts and batches repeat them. Changing breaks: runs that
credit more of them."""

MAX_ROLLOUT_ROWS = 128
"""Rows of one rollout. The indices at which so many begin fit into what `protocol/message_sizes` allows a rollout with its
tokens. Changing breaks: replay of rollouts with more, and the sizes of leases."""

MAX_LOGPROB = 1e-3
"""Largest log-probability of a token, nats: rounding can lift that of a certain token just above 0. Validators and the
trainer share this bound, so that the trainer can learn from all that validators accept. Changing breaks: replay."""

MAX_GROUP_ROLLOUTS = 4096
"""Rollouts of one group."""

MIN_LR_FACTOR = 0.01
"""Smallest factor by which a host lowers the learning rate during a run; a run that needs less is to be drained."""

MAX_MEASURED = 8
"""Figures in the evidence for a host's request. Changing breaks: logs that hold more."""

MAX_STANDING_ALARMS = 64
"""Alarms that a status tells. Changing breaks: watchers of an older shoal, which refuse a status with more."""

MAX_BLOCK_ROLLOUTS = 4096
"""Rollouts of one block."""

MAX_LEASE_BLOCKS = 64
"""Blocks in one lease; more would let one lapse hold up a batch for long."""

MAX_NODES = 400
"""Nodes in one answer to `GET /v1/nodes`: so many of the longest fit into MAX_JSON_BYTES. After a full answer, ask again
from its last node on. Changing breaks: older readers stop early."""

MAX_EVENTS = 1000
"""Events in one answer to `GET /v1/events`. Changing breaks: older readers stop early."""

MAX_EVENTS_BYTES = 8 << 20
"""An answer with MAX_EVENTS events, or with more than this many bytes, is full: ask again from its last event on. Any other
answer reaches the end of the log. Changing breaks: older readers stop early."""

MAX_SAID_CHARS = 300
"""Characters of what a worker says of a call of an environment that it stopped. Changing breaks: reports of older workers.
"""

MAX_FACT_CHARS = 64
"""Characters of a node's name, and of each fact about its engine. No character may control a terminal. Changing breaks:
logs that hold longer ones."""

MAX_URL_CHARS = 300
"""Characters of a relay's URL: a name of a host has at most 253. Older coordinators take 64."""

MAX_OPEN_LEASES = 2
"""Leases that one worker may hold: one being played and one prefetched."""

# Time, in seconds.
SIGNATURE_WINDOW_S = 60
"""A server accepts a signed request up to this long before and after its `created`. Changing breaks: nodes whose clocks are
wrong by more."""

LONG_POLL_S = 20.0
"""How long the coordinator holds a poll open. Below every common proxy's idle timeout."""

REQUEST_TIMEOUT_S = 60.0
"""A client gives up on an answer after this; longer than LONG_POLL_S by a margin for slow links."""

BODY_WINDOW_S, BODY_WINDOW_BYTES = 30.0, 256 << 10
"""In each window of this length, a body must bring this many bytes or end: 8.7 kB/s pass, a body that stalls does not."""

BOOKED_WITHIN_S = SIGNATURE_WINDOW_S + BODY_WINDOW_S
"""The time of an event and the time at which its request was signed differ by at most this, and by BODY_WINDOW_S more for
each BODY_WINDOW_BYTES of the body. Changing breaks: logs."""

HEADER_TIMEOUT_S = 10.0
"""Headers must be complete this long after the connection was made; on a connection in use, after their first byte."""

IDLE_TIMEOUT_S = 75.0
"""A server closes a connection after this long without a request."""

REST_TIMEOUT_S = 5.0
"""A server reads the rest of a body that it refused for this long; then it closes the connection."""

STALL_TIMEOUT_S = 120.0
"""A server closes the connection of a client that reads nothing of its answer for this long."""

MANIFEST_LIFETIME_S = 7 * 24 * 3600
"""A manifest expires after this. So a source that stays behind is noticed by then."""

# Rates: token buckets of the HTTP edge, requests per second and the burst above it.
ADDRESS_REQUESTS_PER_S, ADDRESS_BURST = 500.0, 2000
"""For one network address, before any signature is verified. A home or a laptop with many nodes stays far below."""

KEY_REQUESTS_PER_S, KEY_BURST = 100.0, 500
"""For one key, after its signature is verified."""

ADDRESS_NEWCOMERS_PER_S, ADDRESS_NEWCOMERS_BURST = 0.1, 1000
"""For keys of one network address that join for the first time. Each join is an event of about 500 bytes and a member for
ever, so an address adds 0.5 MB to the log at once, and then 4.3 MB a day."""

MAX_BUCKETS = 65_536
"""Addresses, and keys, whose rates a server remembers, in about 10 MB. For more it forgets those that were idle longest."""
