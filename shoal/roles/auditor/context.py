"""What an auditor needs to recompute groups: the log, the environments, and one version of the policy at a time.

The policy is the host's, so its tokenizer runs in a child process, and nothing is loaded or scored that needs more memory
than is allowed. It judges nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import Renderer
from shoal.engine.interface import Engine, PolicyScore, ScoreRequest
from shoal.engine.open import EngineSpec, kind_for, open_engine
from shoal.env import Env
from shoal.envs.replay import replay_group
from shoal.ledger.event import Entry
from shoal.ledger.log.check import Audit
from shoal.ledger.status import run_info_of
from shoal.ledger.verdicts import Decision, Rechecked, VerdictGiven
from shoal.models.memory import EngineMemory, engine_memory_in, scored_on_gpu
from shoal.runs.log_source import PublicRun, fetch_weights
from shoal.verification.check_context import Tools
from shoal.weights.engine_loader import LoadedEngine, contained
from shoal.weights.memory_limit import Memory, share_of_free_mb


class AuditContext:
    """What is needed to recompute groups: the log, the environments, and one version's weights at a time."""

    def __init__(
        self, run: PublicRun, log: Audit, envs: Mapping[str, Env], spec: EngineSpec, home: Path, max_memory_mb: int
    ) -> None:
        """`spec` is of the engine, but for its dtype and its noise, which are the run's."""
        self.run, self.log, self.envs, self.spec, self.home = run, log, envs, spec, home
        self._limit_mb = max_memory_mb or share_of_free_mb()
        self.state = log.state
        self._open_renderer = contained(RendererLimits.within(self._limit_mb), self.state.sampling.stops)
        self.verdicts: dict[str, list[VerdictGiven]] = defaultdict(list)
        self.decisions: dict[str, Decision] = {}
        self.forged: set[str] = set()
        """Submissions that were accepted, and that a recheck then found forged."""
        self.take_verdicts(log.entries)
        self.scores: list[PolicyScore] = []
        """Scores of the submission that was judged last."""
        self._policy: LoadedEngine | None = None
        self._room: tuple[Memory, EngineMemory] | None = None
        """The limit of memory, and what the policy that was loaded last needs."""
        self._renderer: Renderer | None = None

    def take_verdicts(self, entries: Iterable[Entry]) -> None:
        """What validators and the rules said in these entries of the log."""
        for entry in entries:
            match entry.body:
                case VerdictGiven(submission=name):
                    self.verdicts[name].append(entry.body)
                case Decision(submission=name):
                    self.decisions[name] = entry.body
                case Rechecked(submission=name, outcome="forged"):
                    self.forged.add(name)

    async def take_weights(self, version: int) -> Engine:
        """An engine with a version's published weights; raises as `fetch_weights`."""
        directory = await fetch_weights(self.run, self.state, version, self.home)
        if self._policy is None:
            kind, noise = kind_for(directory), self.state.sampling.noise
            engine = open_engine(replace(self.spec, kind=kind, dtype=self.state.rules.dtype, noise=noise))
            self._policy = LoadedEngine(engine, self._open_renderer)
        memory = self._room[0] if self._room else Memory.of(self._limit_mb, device=self._policy.engine.facts.device)
        self._room = memory, engine_memory_in(directory, self.state.rules.dtype)
        needs = self._room[1]
        # guard: audited-policy-fits-memory
        memory.demand(f"loading version {version}", needs.load(), needs.loaded)
        self._policy.load(directory, version)
        self._renderer = self._policy.renderer
        return self._policy.engine

    async def take_renderer(self) -> None:
        """Load the newest version's renderer if there is none: all versions have the same. Raises as `fetch_weights`."""
        if self._renderer is None:
            directory = await fetch_weights(self.run, self.state, self.state.main.version, self.home)
            self._renderer = self._open_renderer(directory)

    @property
    def vocabulary(self) -> int:
        """Token ids of the policy, once its renderer is there."""
        assert self._renderer is not None
        return self._renderer.vocabulary

    def is_overruled(self, verdict: VerdictGiven, slot: int) -> bool:
        """Whether the log decided otherwise than this verdict on the slot's block, or the block is disputed."""
        name, size = verdict.submission, self.state.rules.block_groups
        decision, block = self.decisions[name], slot // size
        accepts = all(group.outcome in ("accept", "void") for group in verdict.groups if group.slot // size == block)
        accepted = block in decision.accepted and name not in self.forged
        return block in decision.disputed or accepts != accepted

    def tools(self, engine: Engine | None) -> Tools:
        """The validator's tools."""
        state = self.state
        assert state.sampling is not None and self._renderer is not None
        temperature = state.sampling.temperature

        def score(requests: list[ScoreRequest]) -> list[PolicyScore]:
            assert engine is not None and self._room is not None, "nothing is audited without weights"
            (memory, needs), hidden = self._room, state.rules.proofs != "none"
            lengths = [len(request.token_ids) for request in requests]
            need, what = needs.score(sum(lengths), max(lengths), hidden), f"of {sum(lengths)} tokens"
            on_gpu = needs.loaded + scored_on_gpu(need)
            memory.demand(f"recomputing {len(requests)} rollouts {what}", needs.loaded + need, on_gpu)
            self.scores = engine.score(requests, temperature, hidden)
            return self.scores

        return Tools(run_info_of(state), self.envs, self._renderer, replay_group, dtype=state.rules.dtype, score=score)
