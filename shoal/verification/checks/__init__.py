"""Checks of a rollout, one file each. A check is pure: a group and a `Context` give a `CheckFailure` or none.

A new check needs its file here (`NAME`, `SEVERITY`, `check`, and a docstring for the table of docs/explanation/trust.md:
what it catches, what it cannot see), its place in `verification/verify.py` with a guard, its name in `CHECKS` of
`protocol/audit_selection.py`, and a new `PROTOCOL_VERSION`, because validators without it are outvoted. Its tests:
`tests/verification/test_checks.py`, `tests/guards.txt`, `tests/attacks/fuzz.py`.
"""
