"""The page of a run: a web application that shows what an index knows, and changes nothing."""

from shoal.watch.page.app import page_app as page_app
from shoal.watch.page.page_runs import PageRuns as PageRuns
from shoal.watch.page.serve import serve as serve
