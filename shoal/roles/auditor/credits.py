"""The auditor's third job: explain who was paid what and why, and keep and check signed statements of balances.

Balances come from a replay of the log, never from what a coordinator says.
"""

import asyncio
from pathlib import Path

from shoal.errors import ConfigError, PeerError, cause_of
from shoal.ledger.log.check import Audit
from shoal.ledger.log.pay_history import disagreements, explain, is_signed
from shoal.ledger.state import State
from shoal.protocol.encoding import WireError, from_json, to_json
from shoal.protocol.messages.responses import Statement
from shoal.roles.auditor.verify_log import replay_log
from shoal.run_folder import write_atomically
from shoal.runs.public_run import ANSWER_S, PublicRun, UrlRun, open_run
from shoal.terminal import printable, say


def show_credits(source: str, node: str, statement: Path | None, max_memory_mb: int = 0) -> bool:
    """Print all balances; or, for one node (its name or the start of its key), explain each credit.

    If `statement` is a path, ask the coordinator for a signed statement and write it there. `max_memory_mb` is as of
    `UrlRun`. Returns whether the log holds.
    Raises `ConfigError`, `PeerError`, `StateError`.
    """

    async def whole() -> Audit:
        async with open_run(source, max_memory_mb) as run:
            log = await replay_log(run)
            key = node_named(log.state, node) if node else ""
            if statement is not None:
                await _keep_statement(run, log, key, statement)
            say("\n".join(explained(log, key) if key else balances(log.state)))
            return log

    log = asyncio.run(whole())
    for finding in log.findings:
        say(f"FINDING: {finding}")
    return not log.findings


def check_statement(path: Path, source: str, max_memory_mb: int = 0) -> bool:
    """Check a statement's signature and, if `source` is given, compare it with that log; print and return the result.

    Raises `ConfigError` if the file is not a statement.
    """
    try:
        statement = from_json(path.read_bytes(), Statement)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}. Give a file that --statement wrote") from None
    except WireError as error:
        raise ConfigError(f"{path} is not a statement ({error}). Give a file that --statement wrote") from None
    place = f"event {statement.seq} of run {statement.run[:12]}, head {statement.head[:12]}"
    say(f"{printable(statement.name)} ({statement.node[:12]}): {statement.credits} tokens after {place}")
    findings = [] if is_signed(statement) else ["not signed by the key that it names: it was forged or edited"]
    if source and not findings:
        findings = asyncio.run(_against(statement, source, max_memory_mb))
    for finding in findings:
        say(f"FINDING: {finding}")
    if not findings:
        compared = "the log gives the same" if source else "give --log to compare key and balance with a log"
        say(f"signed by run key {statement.run_key}; {compared}")
    return not findings


async def _against(statement: Statement, source: str, max_memory_mb: int) -> list[str]:
    async with open_run(source, max_memory_mb) as run:
        log = await replay_log(run)
    return [*log.findings, *disagreements(statement, log.entries)]


async def _keep_statement(run: PublicRun, log: Audit, key: str, path: Path) -> None:
    if not isinstance(run, UrlRun) or not key:
        raise ConfigError("--statement takes a coordinator's URL and a node: its host signs with the run's key")
    found = await run.client.get_json(f"/v1/nodes/{key}/statement", Statement, deadline_s=ANSWER_S)
    named = (found.run, found.run_key, found.node)
    if named != (log.state.run, log.state.run_key, key) or not is_signed(found):
        raise PeerError(f"{run.name} gave a statement of another run or node, or one that the run key did not sign")
    write_atomically(path, to_json(found) + b"\n")


def node_named(state: State, name: str) -> str:
    """Key of the only node that has this name, or whose key starts with it. Raises `ConfigError`."""
    keys = [key for key, node in state.members.items() if node.name == name or key.startswith(name)]
    if len(keys) != 1:
        found = f"{len(keys)} nodes match" if keys else "no node matches"
        raise ConfigError(f"{found} {name!r}: give a name or the start of one key, from the table of `shoal credits`")
    return keys[0]


def balances(state: State) -> list[str]:
    """A table of all workers with their pay, and the sum."""
    lines = [
        f"{'node':<20} {'key':<12} {'credits':>9} {'accepted':>8} {'refused':>7} {'lapsed':>12} {'unfilled':>12}  standing"
    ]
    for key, node in sorted(state.members.items(), key=lambda item: -item[1].credits):
        if node.role == "worker":
            lines.append(
                f"{printable(node.name)[:20]:<20} {key[:12]} {node.credits:>9} {node.accepted:>8} {node.refused:>7} "
                f"{_lapses(state, key):>12} {_unfilled(state, key):>12}  {node.standing}{', left' if node.left else ''}"
            )
    lines.append(f"{state.issued} tokens paid; replayed to event {state.seq}, head {state.head[:12]}")
    return lines


def _lapses(state: State, key: str) -> str:
    """How many of its leases lapsed, such as "2 of 40"."""
    return f"{state.members[key].lapsed} of {state.members[key].leases}"


def _unfilled(state: State, key: str) -> str:
    """How many of the blocks that it was leased it left to others, such as "2 of 40"."""
    return f"{state.members[key].unfilled} of {state.members[key].given}"


def explained(log: Audit, key: str) -> list[str]:
    """Lines that explain each credit of a node (group, submission, validators), and what was not paid and why."""
    state = log.state
    node, lines = state.members[key], []
    for line in explain(log.entries, state, key):
        place = f"{line.version}/{line.slot}" if line.slot >= 0 else "-"
        words = [f"{line.credits:+7d}" if line.credits else f"{'':>7}", f"{place:>9}", line.detail]
        if line.check:
            bound = f", limit {line.bound:.3g}" if line.bound else ""
            words.append(f"[{line.check}: {line.figure:.3g}{bound}]")
        if line.submission:
            words.append(f"submission {line.submission[:12]}")
        if line.validators:
            audited = "audited" if line.audited else "not audited"
            words.append(f"by {', '.join(validator[:12] for validator in line.validators)}, {audited}")
        lines.append("  ".join([f"{line.seq:>6}", *words]))
    share = node.lapsed / node.leases if node.leases else 0.0
    return [
        " event   tokens  ver/slot  what",
        *lines,
        f"{printable(node.name)} ({key[:12]}): {node.credits} tokens; {node.accepted} groups accepted, "
        f"{node.refused} refused; {node.lapsed} of {node.leases} leases lapsed ({share:.1%}); "
        f"{_unfilled(state, key)} blocks unfilled",
    ]
