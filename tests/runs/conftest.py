"""The run that the tests of this folder read."""

from tests.views.conftest import copied as copied
from tests.views.conftest import testbed as testbed
