"""Watching a run: what pages, tables, pictures, reports and notebooks are made from. Nothing here writes to a run.

`open_run(where)` reads a run's folder or URL. It is synchronous, and one thread uses it at a time:

    with open_run("runs/wordle") as run:
        run.catch_up()                      # replays the log as far as it goes; `refresh()` gives the next page of it
        run.state, run.marks                # the replayed `State`, and the numbers of the events behind it
        run.events(after=-1)                # events again: `Entry` with seq, time, kind, typed body, hash
        run.metrics(after=-1)               # one dict a step; `new_metrics()` gives lines since the last call
        run.condition()                     # `Status` and whether the coordinator said so just now
        run.nodes(), run.versions(), run.manifest(3), run.evaluations()
        run.places(), run.place_of(version, slot), run.place_named(digest)
        run.group(place, with_pieces=True)  # turns with author, text, token ids, log-probs, advantages; rewards, standing
        run.replayed(place)                 # and named parts of rewards and chat roles: the environment plays it again

Errors are `ShoalError`s in one line. `PeerError`: a URL does not answer now; try again. `Replaced`: another run is in its
place; open it again. `NothingYet`: private, gone or not there yet. Private bodies and held-out tasks take `private=True`
and the host's folder with its run key. All texts are strangers': they may hold any characters, so escape them.

`tables` has the same as rows (`rows_of(run, "nodes")`, `TABLES`, `as_csv`), with the unit and meaning of each column.

`notebook_run` has the same for `shoal.open`: each table as a `Frame` (polars, pandas, Arrow), and single rollouts with what
the weights say of their tokens. `live` draws steps as they come.

`index` is a page's own SQLite file, of one run or several. A `Builder` fills it in a thread, a `Look` answers questions:

    builder = Builder(path, run)            # resumes where it was killed; makes a damaged index anew
    builder.advance()                       # one transaction; False if there is nothing new. Call it again and again
    builder.note_condition()                # how the run does now, evaluations and alarms; now and then
    look = Look(path)                       # one thread uses it at a time
    look.runs()                             # `run` is the number of a run in the index, the first argument of the rest
    look.overview(run), look.names(run), look.series(run, "reward_mean", points=500, smooth=0.9), look.heldout(run)
    look.nodes(run, role, by, search, after), look.node(run, key), look.versions(run), look.ages(run)
    look.refusal_counts(run), look.refusals(run, check, worker), look.validators(run), look.differences(run)
    look.timeline(run, kinds, node, search, after), look.kinds(run), look.event(run, seq), look.alarms(run), look.acts(run)
    groups(look, run, Filter(env=, worker=, version=, status=, step=, task=, reward_from=, reward_to=, text=), after)
    group(look, run, number), same_task(look, run, env, task), number_of(look, run, digest=), filters(look, run)

Lists are {"rows": [...], "next": ...}: ask again with `after=next` until it is None. `private=True` of the questions about
groups shows what is not public; only the host may have it.
"""

from shoal.watch.index import Builder as Builder
from shoal.watch.index import GroupFilter as GroupFilter
from shoal.watch.index import IndexQueries as IndexQueries
from shoal.watch.reading import GroupRef as GroupRef
from shoal.watch.reading import Replaced as Replaced
from shoal.watch.reading import RunReader as RunReader
from shoal.watch.reading import open_run as open_run
from shoal.watch.tables import TABLES as TABLES
from shoal.watch.tables import as_csv as as_csv
from shoal.watch.tables import rows_of as rows_of
