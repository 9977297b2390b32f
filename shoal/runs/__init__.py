"""A run read from its folder or URL: log, metrics, rollouts, evaluations and status. Nothing here writes to a run.

`run_reader.open_run(where)` gives a `RunReader`. It is synchronous, and one thread uses it at a time:

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

`csv_tables` has the same as rows (`rows_of(run, "nodes")`, `TABLES`, `as_csv`), with the unit and meaning of each column.
"""
