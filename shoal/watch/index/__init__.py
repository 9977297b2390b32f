from shoal.watch.index.build import Builder as Builder
from shoal.watch.index.groups import Filter as Filter
from shoal.watch.index.groups import filters as filters
from shoal.watch.index.groups import group as group
from shoal.watch.index.groups import groups as groups
from shoal.watch.index.groups import number_of as number_of
from shoal.watch.index.groups import same_task as same_task
from shoal.watch.index.look import Look as Look
