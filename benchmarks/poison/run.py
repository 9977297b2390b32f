"""A run in one process, with malicious workers among the honest: the ledger's rules, checks, engine and trainer.

Called by `benchmarks/poisoning.py`, which says what the worlds are and compares what came of them.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import torch

from benchmarks.poison.payloads import ARGS, ENVIRONMENT, SAMPLING, START, poisoned, say
from shoal.chat.renderer import Renderer
from shoal.config import BOUNDS, SamplingConfig, TrainConfig
from shoal.engine.interface import ScoreRequest
from shoal.engine.native import LocalEngine
from shoal.envs.evaluate import evaluate
from shoal.envs.load import load_env
from shoal.envs.play_episodes import play_block, play_scripted
from shoal.envs.replay import replay_group
from shoal.evaluation_files import Evaluation
from shoal.ledger.commands import AskLease, JoinRun, Publish, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Wait
from shoal.ledger.event import Entry
from shoal.ledger.log.sqlite_store import Store
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.members import NodeQuarantined
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.slot_draws import audit_draws, lease_of, recheck_draw, turns
from shoal.ledger.state import State
from shoal.ledger.state_records import NodeRecord, SubmissionRecord
from shoal.ledger.verdict_decisions import to_judge
from shoal.models.checkpoint import load_policy, save_policy
from shoal.protocol.algorithm_config import Clip, Grpo, narrowest_bound
from shoal.protocol.audit_and_pay import influence, must_audit, paid_tokens
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import (
    BatchGroup,
    Check,
    EnvSpec,
    Group,
    GroupVerdict,
    Join,
    Lease,
    Rollout,
    Rules,
    Verdict,
)
from shoal.protocol.seed_chain import SecretChain
from shoal.protocol.tolerances import Dtype, claims_bend_ratios, wire_bounds
from shoal.train.batch_filter import select
from shoal.train.learner import Learner
from shoal.train.logprobs import loaded_anew, with_own_denominators
from shoal.train.rows import TrainingRow, rows_of_group
from shoal.verification.check_context import Tools, policy_positions
from shoal.verification.encode_submission import encode_submission
from shoal.verification.verify import verify_submission
from shoal.weights.manifest import weights_root

WORKERS = tuple(digest(f"worker {i}".encode()) for i in range(8))
MALICIOUS = frozenset(WORKERS[::4])
JUDGES = tuple(digest(f"validator {i}".encode()) for i in range(3))
TRAINER = digest(b"trainer")
LR = 3e-4
TURN_S = 0.05
"""Of the run's clock, for each lease: 50 leases a step make a step of some seconds, quarantine lasts 30 and more."""

COURSE_STEPS, COURSE_EPISODES = 5, 256


class Plan(NamedTuple):
    """How large the experiment is."""

    steps: int
    seeds: int
    batch_groups: int
    group_size: int
    episodes: int


class Case(NamedTuple):
    """One run."""

    payload: str
    """Empty for the clean run."""
    defended: bool
    patient: bool
    seed: int
    dtype: Dtype = "float32"
    """In which workers sample and versions are published."""


class PoisonedRun:
    """A run: its log, its one engine for everybody, its trainer."""

    def __init__(self, case: Case, plan: Plan, start: Path, folder: Path) -> None:
        self.case, self.plan, self.folder = case, plan, folder
        self.env = load_env(ENVIRONMENT, ARGS)
        self.envs = {self.env.name: self.env}
        self.renderer = Renderer.from_directory(START)
        self.engine = LocalEngine(threads=1, dtype=case.dtype)
        train = TrainConfig(lr=LR, warmup_steps=3, algorithm=Grpo(loss=Clip(delta=4.0 if case.defended else math.inf)))
        self.learner = Learner(load_policy(start, torch.float32), train, SamplingConfig(), steps=plan.steps)
        secret = case.seed.to_bytes(32, "big")
        self.links = {chain: SecretChain(secret, chain).links() for chain in ("chain/slots", "chain/audits")}
        self.rng, self.now = random.Random(case.seed), 0.0
        self.poison: dict[str, tuple[float, ...]] = {}
        """Claimed rewards by the digest of a malicious group."""
        self.bodies: dict[str, bytes] = {}
        """Groups by digest."""
        self.course: list[float] = []
        self.num_poisoned = self.quarantines = 0
        self.log_writer = LogWriter(Store("sqlite://"))
        self._begin()

    def _begin(self) -> None:
        plan, defended = self.plan, self.case.defended
        rules = Rules(
            group_size=plan.group_size, block_groups=1, batch_groups=plan.batch_groups, max_staleness=1,
            steps=plan.steps, lease_s=1e6, audit_rate=0.05, dtype=self.case.dtype,
            bounds={pair: wire_bounds(BOUNDS[pair]) for pair in (f"{self.case.dtype}/{self.case.dtype}",)},
            worker_share=0.2 if defended else 1.0, quarantine_s=30.0,
        )  # fmt: skip
        spec = EnvSpec(self.env.name, "", self.env.num_tasks, 1.0, {})
        created = RunCreated(
            run=digest(b"poisoning %d" % self.case.seed), name="poisoning", run_key=digest(b"host"),
            trainer_key=TRAINER, validators=JUDGES, chain_end="", audit_chain_end="", envs=(spec,), sampling=SAMPLING,
            rules=rules, config={}, law=LAW,
        )  # fmt: skip
        self.do(Create(created, self.now))
        roles = {TRAINER: "trainer"} | dict.fromkeys(JUDGES, "validator") | dict.fromkeys(WORKERS, "worker")
        for key, role in roles.items():
            join = Join(role, key[:8], 0.0, "local", self.case.dtype, "cpu")  # type: ignore[arg-type]
            self.do(JoinRun(key, join, self.now))
        self._publish(0)

    @property
    def state(self) -> State:
        """What the log says."""
        return self.log_writer.state

    def do(self, command: object) -> list[Entry]:
        """Have a command decided and booked."""
        return self.log_writer.write(command, self.now)

    def run(self) -> None:
        """All steps: the workers serve in turn, in an order drawn anew each round."""
        while self.state.phase != "ended":
            for worker in self.rng.sample(WORKERS, len(WORKERS)):
                self.now += TURN_S
                self.do(Tick(self.now))
                self._serve(worker)
                if self.state.main.version in self.state.main.batches:
                    self._learn(self.state.main.version)
                if self.state.phase == "ended":
                    break

    # --- workers and validators ---

    def _serve(self, worker: str) -> None:
        try:
            self.do(AskLease(worker, (), 0.0, self.now))
        except Wait:
            return
        (held,) = self.state.open_leases_of(worker)
        lease = lease_of(self.state, held, self._link("chain/slots", held.version))
        (block,) = lease.blocks
        groups = play_block(self.engine, self.renderer, self.envs, block, self.plan.group_size, SAMPLING)
        if worker in MALICIOUS and self._attacks(self.state.members[worker]):
            groups = [self._poison(group) for group in groups]
        body = encode_submission(self.state.run, lease, groups, self.engine.facts)
        self._send(worker, lease, groups, body)
        self._judge(lease, groups, body)

    def _attacks(self, node: NodeRecord) -> bool:
        return bool(self.case.payload) and (not self.case.patient or LAW.audit_rate(node.valid_blocks, 0.05) <= 0.05)

    def _poison(self, honest: Group) -> Group:
        group, claimed_G = poisoned(self.case.payload, honest, self)
        self.poison[digest(to_msgpack(group))] = claimed_G
        return group

    def _send(self, worker: str, lease: Lease, groups: Sequence[Group], body: bytes) -> None:
        name, link = digest(body), self._link("chain/audits", lease.version)
        names = tuple(digest(to_msgpack(group)) for group in groups)
        self.bodies |= dict(zip(names, map(to_msgpack, groups), strict=True))
        held = self.state.leases[lease.id]
        draws = audit_draws(self.state, held, link)
        order = turns(held, self.state.judges(), link)
        self.do(Submit(worker, lease.id, name, len(body), names, draws, order, self.now, int(self.now)))

    def _judge(self, lease: Lease, groups: Sequence[Group], body: bytes) -> None:
        """Validators judge, each in its turn, until nothing is left to judge. They are honest and all compute the same."""
        name, verdict = digest(body), None
        while any(judges := [key for key in JUDGES if name in to_judge(self.state, key, self.now)]):
            if verdict is None:
                verdict = self._verdict(name, lease, groups, body)
            held, link = self.state.leases[lease.id], self._link("chain/audits", lease.version)
            again = recheck_draw(held, link)
            entries = self.do(SubmitVerdict(judges[0], verdict, self.now, recheck=again))
            self.quarantines += sum(isinstance(entry.body, NodeQuarantined) for entry in entries)

    def _verdict(self, name: str, lease: Lease, groups: Sequence[Group], body: bytes) -> Verdict:
        submission = self.state.submissions[name]
        if not self.case.defended:
            return Verdict(
                name, tuple(self._believe(*each, submission) for each in zip(groups, submission.draws, strict=True))
            )
        check = Check(
            name,
            lease,
            submission.audited,
            self.now,
            submission.draws,
            submission.rate,
            submission.mean_influence,
            submission.mean_pay,
        )
        info = SimpleNamespace(run=self.state.run, rules=self.state.rules)  # all that checks read of it
        score = partial(self.engine.score, temperature=SAMPLING.temperature)
        tools = Tools(info, self.envs, self.renderer, replay_group, self.case.dtype, score)  # type: ignore[arg-type]
        return verify_submission(body, check, tools)

    def _believe(self, group: Group, draw: float, submission: SubmissionRecord) -> GroupVerdict:
        """Accept a group as it is claimed. The rules want it to be called audited exactly when it was drawn for that."""
        claimed_G = self.poison.get(digest(to_msgpack(group))) or self.rewards(group)
        tokens = sum(rollout.num_policy_tokens() for rollout in group.rollouts)
        pay = paid_tokens(tokens, self.state.rules)
        weight = influence(claimed_G, tokens, self.state.rules.algorithm)
        drawn = must_audit(draw, submission.rate, weight, submission.mean_influence, pay, submission.mean_pay)
        due = group.slot in submission.audited or drawn
        return GroupVerdict(group.slot, audited=due, outcome="accept", rewards=claimed_G, tokens=tokens)

    # --- what attackers are given ---

    def rewards(self, group: Group) -> tuple[float, ...]:
        """As validators recompute them."""
        task = self.env.task(group.task)
        return tuple(f.reward for f in replay_group(self.env, self.renderer, task, group.rollouts, SAMPLING))

    def written(self, group: Group, texts: Sequence[str]) -> tuple[Rollout, ...]:
        """Rollouts of a group with these texts, and the log-probs that the policy gives them."""
        task = self.env.task(group.task)
        talks = [play_scripted(self.env, self.renderer, task, partial(say, text), self.rng, SAMPLING) for text in texts]
        for talk in talks:
            for row in talk.rows:
                row.logprobs = [0.0] * sum(row.author)
        bare = [talk.rollout(self.engine.version) for talk in talks]
        requests = [ScoreRequest(r.tokens_T().tolist(), policy_positions(r).tolist(), bytes(32)) for r in bare]
        scores = self.engine.score(requests, SAMPLING.temperature)
        return tuple(
            msgspec.structs.replace(rollout, logprobs=score.logprobs_P.astype("<f4").tobytes())
            for rollout, score in zip(bare, scores, strict=True)
        )

    # --- the trainer ---

    def _learn(self, version: int) -> None:
        members, rows_G = [], []
        for of_version, number in self.state.main.batches[version]:
            slot = self.state.main.versions[of_version].slots[number]
            member = BatchGroup(of_version, number, slot.submission, slot.index, slot.digest, slot.rewards)
            members.append(member)
            rows_G.append(
                rows_of_group(
                    member, self.bodies[slot.digest], algorithm=self.state.rules.algorithm,
                    vocabulary=self.renderer.vocabulary, max_tokens=SAMPLING.max_tokens,
                )
            )  # fmt: skip
            self.num_poisoned += slot.digest in self.poison
        chosen = select(members, rows_G, algorithm=self.state.rules.algorithm, version=version, max_staleness=1)
        self.learner.step(self._denominators(chosen.rows), version)
        self._publish(version + 1)
        if (version + 1) % COURSE_STEPS == 0:
            self.course.append(self.evaluate(COURSE_EPISODES).reward.mean)

    def _denominators(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        """As the trainer of a run makes them; without defences, those that workers claim."""
        rules = self.state.rules
        if not self.case.defended or not claims_bend_ratios(
            rules.bounds, rules.dtype, narrowest_bound(rules.algorithm)
        ):
            return rows
        published = {version: self._directory(version) for version in {row.version for row in rows}}
        logprobs_at = loaded_anew(rules.dtype, 1.0, self.learner.config.microbatch_tokens, torch.float32)
        return with_own_denominators(rows, published, logprobs_at)

    def evaluate(self, episodes: int) -> Evaluation:
        """Sample held-out tasks with the newest policy."""
        return evaluate(self.engine, self.renderer, self.env, episodes, self.case.seed, SAMPLING, samples=episodes)

    def _publish(self, version: int) -> None:
        published = self._directory(version)
        save_policy(self.learner.model, published, self.case.dtype, tokenizer_from=START)
        self.engine.load(published, version)
        links = {v: (self._link("chain/slots", v).hex(), self._link("chain/audits", v).hex()) for v in range(version)}
        self.do(Publish(TRAINER, version, weights_root(published), "", links, self.now))

    def _directory(self, version: int) -> Path:
        """Of a published version; the last two are kept."""
        return self.folder / f"published-{version % 2}"

    def _link(self, chain: str, version: int) -> bytes:
        return self.links[chain][version + 1]

    def share(self, of: Callable[[NodeRecord], float]) -> float:
        """Of the malicious workers, in a sum over all."""
        total = sum(of(self.state.members[key]) for key in WORKERS)
        return sum(of(self.state.members[key]) for key in MALICIOUS) / total if total else 0.0
