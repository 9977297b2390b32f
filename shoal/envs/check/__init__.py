"""Check that an environment keeps its promises."""

from shoal.envs.check.finding import Finding as Finding
from shoal.envs.check.promises import check_env as check_env
from shoal.envs.check.walk import HOSTILE as HOSTILE
