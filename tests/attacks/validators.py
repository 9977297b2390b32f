"""Validators that lie, for tests of what a bad one can do. Each is the product's validator with one thing changed."""

import contextlib

import msgspec

from shoal.net.client import PeerRefused
from shoal.protocol import messages as t
from shoal.roles.validator import Validator


class Liar(Validator):
    """Lies until it is suspended."""

    async def run(self) -> None:
        with contextlib.suppress(PeerRefused):
            await super().run()


class Hangman(Liar):
    """Claims a forgery in everything, to get the workers of rivals slashed."""

    async def _give(self, verdict: t.Verdict) -> None:
        forged = tuple(
            t.GroupVerdict(group.slot, True, "hard", "sampling", "a token that its seed does not choose")
            for group in verdict.groups
        )
        await super()._give(msgspec.structs.replace(verdict, groups=forged))


class Idler(Liar):
    """Skips the prefill: makes the checks without the model, claims that the rest passed, and invents projections."""

    async def _next_check(self) -> t.Check | None:
        check = await super()._next_check()
        if check is None:
            return None
        self.asked = check
        return msgspec.structs.replace(check, audited=(), draws=(), rate=0.0)

    async def _give(self, verdict: t.Verdict) -> None:
        groups = tuple(msgspec.structs.replace(group, audited=True) for group in verdict.groups)
        invented = dict.fromkeys(self.asked.project_for, (0.1, -0.2, 0.3, -0.4))
        await super()._give(msgspec.structs.replace(verdict, groups=groups, projections=invented))
