"""SQLite index of one run or several, from which the page answers.

A `Builder` fills it in a thread, `IndexQueries` answers questions:

    builder = Builder(path, run)            # resumes where it was killed; makes a damaged index anew
    builder.advance()                       # one transaction; False if there is nothing new. Call it again and again
    builder.note_condition()                # how the run does now, evaluations and alarms; now and then
    queries = IndexQueries(path)            # one thread uses it; `run` is the number of a run in the index
    queries.overview(run), queries.series(run, "reward_mean", smooth=0.9), queries.nodes(run, role, by, search)
    groups(queries, run, GroupFilter(env=, worker=, version=, status=, step=, task=, text=), after)

Lists are {"rows": [...], "next": ...}: ask again with `after=next` until it is None. `private=True` of the questions about
groups shows what is not public; only the host may have it.
"""
