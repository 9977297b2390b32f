"""Check that an environment keeps its promises."""

from shoal.envs.lint.checks import check_env as check_env
from shoal.envs.lint.finding import CheckResult as CheckResult
from shoal.envs.lint.scripted_episode import HOSTILE as HOSTILE
