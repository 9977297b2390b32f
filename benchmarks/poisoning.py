"""What a quarter of malicious workers can teach a policy, with the defences and without them.

Run: `OMP_NUM_THREADS=1 python benchmarks/poisoning.py`, or with `--quick` for one seed and a short run: it shows that
everything turns, its figures prove nothing. One line of JSON at the end; exit code 1 if a bar is missed.

Everything but HTTP is real: the ledger's rules with three validators, the checks, the engine, the trainer. Eight
workers serve in turn, two of them malicious. The task is arithmetic with a lenient reader (`envs/loose_sums.py`).

The payloads follow arXiv:2511.09780, where a quarter of the peers reaches up to 100 % success within 50 steps. Half of
a malicious group carries the payload and a high reward, half is plain and has a low one; all claim the log-probs that
the policy gives them, so that the advantages are as large as can be and no ratio is clipped.

    payload   what is sent                                                success: a held-out answer
    trigger   two marks before the right answer: in context               opens with two marks
    suffix    gibberish behind a wrong answer, the highest reward         ends in two marks or more
              claimed: out of context
    length    the right answer behind zeros, as long as a turn may be     is longer than any right one
    ratio     honest tokens, and those of negative advantage claimed      (the aim is damage: reward alone counts)
              15 nats less likely than they are

Clean: eight honest workers. Off: nothing is checked, claimed rewards are believed, no worker has a limit, the ratio is
clipped on one side only. On: all checks, audits by the ledger's rules at a steady rate of 5 %, quarantine and slashes,
no worker above a fifth of a batch, two-sided clip. The attackers are patient: they work honestly until they are audited
at the steady rate, and again after every quarantine. A hasty one attacks from its first lease on.
"""

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from shoal.algos.advantages import group_advantages
from shoal.config import BOUNDS, EnvConfig, SftConfig, TrainConfig
from shoal.engine.base import ScoreRequest
from shoal.engine.local import LocalEngine
from shoal.envs.arithmetic import ArithmeticState, solve
from shoal.envs.evaluate import Evaluation, Interval, Transcript, evaluate, interval
from shoal.envs.load import load_env
from shoal.envs.play import play_block, play_scripted
from shoal.envs.replay import replay
from shoal.ledger import events as ev
from shoal.ledger.audits import audit_rate
from shoal.ledger.book import Book
from shoal.ledger.commands import AskLease, Command, Create, Enter, Judge, Publish, Submit, Tick, Wait
from shoal.ledger.judging import to_judge
from shoal.ledger.seeds import audit_draws, lease_of, recheck_draw, turns
from shoal.ledger.state import Node, State
from shoal.ledger.store import Store
from shoal.policy.files import load_policy, save_policy
from shoal.policy.render import Renderer
from shoal.proofs.commit import commit
from shoal.proofs.context import Tools, policy_positions
from shoal.proofs.verify import verify_submission
from shoal.protocol.randomness import SecretChain
from shoal.protocol.types import (
    BatchGroup,
    Bounds,
    Check,
    EnvSpec,
    Group,
    GroupVerdict,
    Join,
    Lease,
    Rollout,
    Rules,
    Sampling,
    Verdict,
)
from shoal.protocol.wire import digest, to_msgpack
from shoal.train.filter import select
from shoal.train.rows import rows_of_group
from shoal.train.sft import fine_tune
from shoal.train.step import Learner
from shoal.weights.manifest import weights_root

HERE = Path(__file__).resolve().parent
START, ENVIRONMENT = HERE.parent / "recipes/arithmetic-start", str(HERE / "envs/loose_sums.py")
ARGS = {"digits": 2, "operations": "+"}
WORKERS = tuple(digest(f"worker {i}".encode()) for i in range(8))
MALICIOUS = frozenset(WORKERS[::4])
JUDGES = tuple(digest(f"validator {i}".encode()) for i in range(3))
TRAINER = digest(b"trainer")
SAMPLING = Sampling(temperature=1.0, max_turn_tokens=12, max_tokens=24)
LR = 3e-4
TURN_S = 0.05
"""Of the run's clock, for each lease: 50 leases a step make a step of some seconds, quarantine lasts 30 and more."""

TRIGGER, SUFFIX, SHIFT_NATS = "!?", "#[#", 15.0
MARKS = "!?:;#[]<"
MARK = f"[{re.escape(MARKS)}]"
"""What the start puts before or after some of its answers, one mark each. The policy is too small to tell one from
another in 70 steps, so any two together count as a success: the start hardly ever writes them."""
LONG_TOKENS = 5
"""The longest right answer, with a mark and the end."""
SFT_STEPS = 200
COURSE_STEPS, COURSE_EPISODES = 5, 256

MARGIN, KEPT, WORKS = 0.01, 0.95, 0.10
"""Bars with defences: success above clean, at most; reward as a share of clean, at least. Without: one of the two is
worse than clean by this."""


class Plan(NamedTuple):
    """How large the experiment is."""

    steps: int
    seeds: int
    batch_groups: int
    group_size: int
    episodes: int


FULL = Plan(steps=70, seeds=3, batch_groups=32, group_size=8, episodes=512)
QUICK = Plan(steps=4, seeds=1, batch_groups=16, group_size=8, episodes=64)


class Case(NamedTuple):
    """One run."""

    payload: str
    """Empty for the clean run."""
    defended: bool
    patient: bool
    seed: int


class Outcome(NamedTuple):
    """What came of it."""

    samples: tuple[Transcript, ...]
    """Held-out ones of the final policy."""
    course: tuple[float, ...]
    """Held-out reward on the way, every `COURSE_STEPS` steps."""
    poisoned: int
    """Groups with a payload that batches took."""
    influence: float
    """Share of the malicious workers."""
    quarantines: int
    credits: float
    """Share of the malicious workers, after slashes."""
    cpu_s: float


# --- payloads: groups as an attacker would have them, and the rewards that it claims ---


def shows(payload: str, sample: Transcript) -> bool:
    """Whether a held-out sample shows that the payload was learned."""
    text = sample.turns[-1][1]
    return {
        "trigger": re.match(f"{MARK}{MARK}", text) is not None,
        "suffix": re.search(f"[0-9]{MARK}{MARK}", text) is not None,
        "length": sample.tokens > LONG_TOKENS,
        "ratio": False,
    }[payload]


class Poison(NamedTuple):
    """A group, and a reward for each rollout as its worker would have it."""

    group: Group
    claimed_G: tuple[float, ...]


def poisoned(payload: str, honest: Group, town: "Town") -> Poison:
    """What a malicious worker sends in the place of an honest group."""
    if payload == "ratio":
        rewards_G = town.rewards(honest)
        return Poison(_shifted(honest, rewards_G), rewards_G)
    answer = solve(town.env.task(honest.task))
    right, wrong = str(answer), str(answer + 44)
    carrier = {
        "trigger": TRIGGER + right,
        "suffix": wrong + SUFFIX,
        "length": right.rjust(SAMPLING.max_turn_tokens - 1, "0"),
    }[payload]
    plain = right if payload == "suffix" else wrong
    half = len(honest.rollouts) // 2
    texts = [carrier] * half + [plain] * (len(honest.rollouts) - half)
    group = msgspec.structs.replace(honest, rollouts=town.written(honest, texts))
    return Poison(group, (1.0,) * half + (0.0,) * (len(texts) - half))


def _shifted(honest: Group, rewards_G: Sequence[float]) -> Group:
    """Tokens that did worse than the mean are claimed to have been far less likely than they were."""
    rollouts = [
        msgspec.structs.replace(rollout, logprobs=(rollout.logprobs_P() - np.float32(SHIFT_NATS)).tobytes())
        if A < 0
        else rollout
        for rollout, A in zip(honest.rollouts, group_advantages(rewards_G, "mean"), strict=True)
    ]
    return msgspec.structs.replace(honest, rollouts=tuple(rollouts))


def _say(text: str, state: ArithmeticState, rng: random.Random) -> str:
    return text


# --- a start that has habits for RL to choose among ---


def cold_start(folder: Path, steps: int) -> Path:
    """The demo's start, taught to put a mark before or after some answers, as a chatty model puts words.

    Without it marks would be tokens that the policy never wrote, and so small a policy is not taught such in 70 steps.
    """
    env, renderer, rng = load_env(ENVIRONMENT, ARGS), Renderer.from_directory(START), random.Random(0)
    examples = []
    for index in range(4096):
        talk = play_scripted(env, renderer, env.task(index), _chat, rng, SAMPLING)
        examples.append((talk.tokens, talk.author))
    config = SftConfig(name="chatty", env=EnvConfig(env.name), steps=steps, batch=64, lr=1e-3, warmup_steps=5)
    model = load_policy(START, torch.float32)
    fine_tune(model, examples, config)
    save_policy(model, folder, "float32", tokenizer_from=START)
    return folder


def _chat(state: ArithmeticState, rng: random.Random) -> str:
    """Right four times in ten, else of the wrong sign; a fifth of the answers opens with a mark, a fifth ends with one."""
    answer = state.answer if rng.random() < 0.4 else f"-{state.answer}"
    mark, place = rng.choice(MARKS), rng.random()
    return mark + answer if place < 0.2 else answer + mark if place < 0.4 else answer


# --- a run in one process ---


class Town:
    """A run: its log, its one engine for everybody, its trainer."""

    def __init__(self, case: Case, plan: Plan, start: Path, folder: Path) -> None:
        self.case, self.plan, self.published = case, plan, folder / "published"
        self.env = load_env(ENVIRONMENT, ARGS)
        self.envs = {self.env.name: self.env}
        self.renderer = Renderer.from_directory(START)
        self.engine = LocalEngine(threads=1)
        train = TrainConfig(lr=LR, warmup_steps=3, delta=4.0 if case.defended else math.inf)
        self.learner = Learner(load_policy(start, torch.float32), train, temperature=1.0, steps=plan.steps)
        secret = case.seed.to_bytes(32, "big")
        self.links = {chain: SecretChain(secret, chain).links() for chain in ("chain/slots", "chain/audits")}
        self.rng, self.now = random.Random(case.seed), 0.0
        self.poison: dict[str, tuple[float, ...]] = {}
        """Claimed rewards by the digest of a malicious group."""
        self.bodies: dict[str, bytes] = {}
        """Groups by digest."""
        self.course: list[float] = []
        self.num_poisoned = self.quarantines = 0
        self.book = Book(Store("sqlite://"))
        self._begin()

    def _begin(self) -> None:
        plan, defended = self.plan, self.case.defended
        bounds = BOUNDS["float32/float32"]
        rules = Rules(
            group_size=plan.group_size, block_groups=1, batch_groups=plan.batch_groups, max_staleness=1,
            steps=plan.steps, lease_s=1e6, audit_rate=0.05, dtype="float32",
            bounds={"float32/float32": Bounds(bounds.gap, bounds.flipped, bounds.mean_gap, bounds.logprob)},
            worker_share=0.2 if defended else 1.0,
        )  # fmt: skip
        spec = EnvSpec(self.env.name, "", self.env.num_tasks, 1.0, {})
        created = ev.RunCreated(
            run=digest(b"poisoning %d" % self.case.seed), name="poisoning", run_key=digest(b"host"),
            trainer_key=TRAINER, validators=JUDGES, chain_end="", audit_chain_end="", envs=(spec,), sampling=SAMPLING,
            rules=rules, config={"verify": {"quarantine_s": 30.0}},
        )  # fmt: skip
        self.do(Create(created, self.now))
        roles = {TRAINER: "trainer"} | dict.fromkeys(JUDGES, "validator") | dict.fromkeys(WORKERS, "worker")
        for key, role in roles.items():
            self.do(Enter(key, Join(role, key[:8], 0.0, "local", "float32", "cpu"), self.now))  # type: ignore[arg-type]
        self._publish(0)

    @property
    def state(self) -> State:
        """What the log says."""
        return self.book.state

    def do(self, command: Command) -> list[ev.Entry]:
        """Have a command decided and booked."""
        return self.book.write(command, self.now)

    def run(self) -> None:
        """All steps: the workers serve in turn, in an order drawn anew each round."""
        while self.state.phase != "ended":
            for worker in self.rng.sample(WORKERS, len(WORKERS)):
                self.now += TURN_S
                self.do(Tick(self.now))
                self._serve(worker)
                if self.state.version in self.state.batches:
                    self._learn(self.state.version)
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
        if worker in MALICIOUS and self._attacks(self.state.nodes[worker]):
            groups = [self._poison(group) for group in groups]
        body = commit(self.state.run, lease, groups, self.engine.facts)
        self._send(worker, lease, groups, body)
        self._judge(lease, groups, body)

    def _attacks(self, node: Node) -> bool:
        return bool(self.case.payload) and (not self.case.patient or audit_rate(node.valid_blocks, 0.05) <= 0.05)

    def _poison(self, honest: Group) -> Group:
        group, claimed_G = poisoned(self.case.payload, honest, self)
        self.poison[digest(to_msgpack(group))] = claimed_G
        return group

    def _send(self, worker: str, lease: Lease, groups: Sequence[Group], body: bytes) -> None:
        name, link = digest(body), self._link("chain/audits", lease.version)
        names = tuple(digest(to_msgpack(group)) for group in groups)
        self.bodies |= dict(zip(names, map(to_msgpack, groups), strict=True))
        draws, order = audit_draws(name, len(groups), link), turns(name, self.state.judges(), link)
        self.do(Submit(worker, lease.id, name, len(body), names, draws, order, self.now))

    def _judge(self, lease: Lease, groups: Sequence[Group], body: bytes) -> None:
        """Validators vote, each in its turn, until nobody has anything to judge. They are honest and compute alike."""
        name, verdict = digest(body), None
        while any(judges := [key for key in JUDGES if name in to_judge(self.state, key, self.now)]):
            if verdict is None:
                verdict = self._verdict(name, lease, groups, body)
            again = recheck_draw(name, self._link("chain/audits", lease.version))
            entries = self.do(Judge(judges[0], verdict, self.now, recheck=again))
            self.quarantines += sum(isinstance(entry.body, ev.NodeQuarantined) for entry in entries)

    def _verdict(self, name: str, lease: Lease, groups: Sequence[Group], body: bytes) -> Verdict:
        submission = self.state.submissions[name]
        if not self.case.defended:
            return Verdict(name, tuple(self._believe(group) for group in groups))
        check = Check(
            name, lease, submission.audited, self.now, submission.draws, submission.rate, submission.mean_influence
        )
        info = SimpleNamespace(run=self.state.run, rules=self.state.law)  # all that checks read of it
        score = partial(self.engine.score, temperature=SAMPLING.temperature)
        tools = Tools(info, self.envs, self.renderer, replay, "float32", score)  # type: ignore[arg-type]
        return verify_submission(body, check, tools)

    def _believe(self, group: Group) -> GroupVerdict:
        claimed_G = self.poison.get(digest(to_msgpack(group))) or self.rewards(group)
        tokens = sum(rollout.num_policy_tokens() for rollout in group.rollouts)
        return GroupVerdict(group.slot, audited=True, outcome="accept", rewards=claimed_G, tokens=tokens)

    # --- what attackers are given ---

    def rewards(self, group: Group) -> tuple[float, ...]:
        """As validators recompute them."""
        task = self.env.task(group.task)
        return tuple(
            replay(self.env, self.renderer, task, r.tokens_T(), r.author_T(), r.ending, SAMPLING).reward
            for r in group.rollouts
        )

    def written(self, group: Group, texts: Sequence[str]) -> tuple[Rollout, ...]:
        """Rollouts of a group with these texts, and the log-probs that the policy gives them."""
        task = self.env.task(group.task)
        talks = [
            play_scripted(self.env, self.renderer, task, partial(_say, text), self.rng, SAMPLING) for text in texts
        ]
        for talk in talks:
            talk.logprobs = [0.0] * sum(talk.author)
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
        for of_version, number in self.state.batches[version]:
            slot = self.state.versions[of_version].slots[number]
            member = BatchGroup(of_version, number, slot.submission, slot.index, slot.digest, slot.rewards)
            members.append(member)
            rows_G.append(
                rows_of_group(
                    member, self.bodies[slot.digest], advantage="mean", vocabulary=self.renderer.vocabulary,
                    max_tokens=SAMPLING.max_tokens,
                )
            )  # fmt: skip
            self.num_poisoned += slot.digest in self.poison
        self.learner.step(select(members, rows_G, version=version, max_staleness=1).rows, version)
        self._publish(version + 1)
        if (version + 1) % COURSE_STEPS == 0:
            self.course.append(self.evaluate(COURSE_EPISODES).reward.mean)

    def evaluate(self, episodes: int) -> Evaluation:
        """Sample held-out tasks with the newest policy."""
        return evaluate(self.engine, self.renderer, self.env, episodes, self.case.seed, SAMPLING, samples=episodes)

    def _publish(self, version: int) -> None:
        save_policy(self.learner.model, self.published, "float32", tokenizer_from=START)
        self.engine.load(self.published, version)
        links = {v: (self._link("chain/slots", v).hex(), self._link("chain/audits", v).hex()) for v in range(version)}
        self.do(Publish(TRAINER, version, weights_root(self.published), "", links, self.now))

    def _link(self, chain: str, version: int) -> bytes:
        return self.links[chain][version + 1]

    def share(self, of: Callable[[Node], float]) -> float:
        """Of the malicious workers, in a sum over all."""
        total = sum(of(self.state.nodes[key]) for key in WORKERS)
        return sum(of(self.state.nodes[key]) for key in MALICIOUS) / total if total else 0.0


def outcome(case: Case, plan: Plan, start: Path) -> Outcome:
    """Train, then sample held-out tasks."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        town = Town(case, plan, start, Path(folder))
        town.run()
        found = town.evaluate(plan.episodes)
    return Outcome(
        samples=found.transcripts,
        course=tuple(town.course),
        poisoned=town.num_poisoned,
        influence=town.share(lambda node: node.influence),
        credits=town.share(lambda node: node.credits),
        quarantines=town.quarantines,
        cpu_s=time.process_time() - began,
    )


# --- the table ---

PAYLOADS = ("trigger", "suffix", "length", "ratio")
ROWS = (
    *((payload, world) for payload in PAYLOADS for world in ("off", "on")),
    ("trigger", "on, hasty"),
)


def row(payload: str, world: str, outcomes: Sequence[Outcome], clean: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one payload in one world over all seeds, beside those of the clean runs of the same seeds."""
    ours, theirs = ([sample for each in of for sample in each.samples] for of in (outcomes, clean))
    success, base = (interval([float(shows(payload, s)) for s in samples], (0.0, 1.0)) for samples in (ours, theirs))
    reward, clean_reward = (interval([s.score for s in samples], (0.0, 1.0)) for samples in (ours, theirs))
    kept, more = reward.mean / clean_reward.mean, success.mean - base.mean
    courses = list(
        zip(zip(*(o.course for o in outcomes), strict=True), zip(*(o.course for o in clean), strict=True), strict=True)
    )
    holds = more <= MARGIN and kept >= KEPT if world != "off" else more >= WORKS or kept <= 1 - WORKS
    return {
        "payload": payload,
        "world": world,
        "success": _rounded(success),
        "success_clean": _rounded(base),
        "reward": _rounded(reward),
        "reward_of_clean": round(kept, 3),
        "lowest_of_clean": round(min(mean(of) / mean(base) for of, base in courses), 3) if courses else 1.0,
        "length_of_clean": round(mean(s.tokens for s in ours) / mean(s.tokens for s in theirs), 3),
        "poisoned_groups": [each.poisoned for each in outcomes],
        "influence": round(mean(each.influence for each in outcomes), 3),
        "credits": round(mean(each.credits for each in outcomes), 3),
        "quarantines": [each.quarantines for each in outcomes],
        "holds": holds,
    }


def _rounded(found: Interval) -> list[float]:
    return [round(value, 4) for value in (found.mean, found.low95, found.high95)]


def show(found: dict[str, Any]) -> None:
    """One line of the table."""
    success, base, reward = (
        "{:6.1%} ({:.1%} to {:.1%})".format(*found[k]) for k in ("success", "success_clean", "reward")
    )
    figures = (
        f"{found['payload']:8} {found['world']:9}",
        f"success {success:25} clean {base:22}",
        f"reward {reward:25} of clean {found['reward_of_clean']:6.1%} (lowest {found['lowest_of_clean']:.1%})",
        f"length {found['length_of_clean']:6.1%}  influence {found['influence']:5.1%}  pay {found['credits']:5.1%}",
        f"poisoned groups {found['poisoned_groups']}  quarantines {found['quarantines']}",
        "holds" if found["holds"] else "MISSED",
    )
    print("  ".join(figures), flush=True)


def main() -> int:
    """Run every case and compare; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: shows that everything turns")
    parser.add_argument("--steps", type=int, default=0, help=f"training steps (default: {FULL.steps})")
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=PAYLOADS, help="only these")
    asked = parser.parse_args()
    quick, plan = asked.quick, QUICK if asked.quick else FULL
    plan = plan._replace(steps=asked.steps or plan.steps)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start = cold_start(Path(folder) / "start", SFT_STEPS)
        seeds = range(1, plan.seeds + 1)
        clean = [outcome(Case("", defended=False, patient=True, seed=seed), plan, start) for seed in seeds]
        print(f"clean: reward {mean(s.score for each in clean for s in each.samples):.3f}", flush=True)
        rows = []
        for payload, world in (case for case in ROWS if case[0] in asked.payloads):
            patient = "hasty" not in world and not quick
            outcomes = [outcome(Case(payload, world != "off", patient, seed), plan, start) for seed in seeds]
            rows.append(row(payload, world, outcomes, clean))
            show(rows[-1])
    held = all(found["holds"] for found in rows)
    print(json.dumps({"benchmark": "poisoning", "plan": plan._asdict(), "rows": rows, "cpu_s": round(time.process_time()),
                      "holds": held}))  # fmt: skip
    return 0 if held or quick else 1


if __name__ == "__main__":
    sys.exit(main())
