"""Validators that differ: two judged the same work differently. One of them lies, or computes differently.

The log names validators that were outvoted; this names one as soon as it differs from several, and both if there are
only two.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, measured

STEPS = 20
"""That are looked at: only some submissions are judged twice."""
REMEDY = (
    "Compute the same groups yourself: `shoal audit RUN`. Then `shoal admin kick` the validator that is wrong, or measure "
    "bounds for its engine with `shoal calibrate`"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At verdicts of the newest steps on the same submissions."""
    nodes = view.nodes_of(STEPS)
    differed = {key: sum(one.differed for one in done) for key, done in nodes.items()}
    compared = {key: sum(one.compared for one in done) for key, done in nodes.items()}
    shares = {key: differed[key] / count for key, count in compared.items() if count}
    least, most = view.limit("validators.differences"), view.limit("validators.share")
    beside = view.limit("validators.beside")
    for key in nodes:
        faults = sum(one.faults for one in nodes[key])
        if faults:
            what = f"validator {view.name_of(key)} was outvoted, or judged without doing the work, {faults} times"
            yield LimitExceeded("critical", what, REMEDY, (measured("faults", faults, 0.0),), key)
        elif differed[key] >= least and shares[key] > most:
            others = [share for other, share in shares.items() if other != key]
            if len(others) > 1 and shares[key] <= beside * median(others):
                continue  # it differs from the one that differs from all
            counts = f"{differed[key]} of {compared[key]} verdicts"
            what = f"validator {view.name_of(key)} disagreed with others on {counts}"
            yield LimitExceeded("warning", what, REMEDY, (measured("differing share", shares[key], most),), key)
