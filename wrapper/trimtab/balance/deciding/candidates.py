"""What could be done about a pipeline: the best of each kind, its step time by simulation, and what it costs. Pure.

One candidate of each kind, possible or not, in the order of `Kind`. Whether any is worth it is for `decide`.
"""

from trimtab.balance.deciding import in_place, restarting
from trimtab.balance.deciding.outlook import Candidate, Outlook
from trimtab.balance.deciding.situation import Kind, Situation


def candidates(situation: Situation) -> tuple[Candidate, ...]:
    """The best of each kind."""
    outlook = Outlook(situation)
    return (
        outlook.candidate(Kind.NOTHING, "all stays as it is", situation.plan, 0.0),
        in_place.layers(outlook),
        in_place.microbatches(outlook),
        in_place.recompute(outlook),
        restarting.other_schedule(outlook),
        _repack(outlook),
        restarting.other_shape(outlook),
        restarting.other_nodes(outlook),
        restarting.fewer_nodes(outlook),
    )


def _repack(outlook: Outlook) -> Candidate:
    gain_ratio = outlook.situation.uneven_data_ratio
    if gain_ratio is None:
        return Candidate(kind=Kind.REPACK, obstacle="how uneven the samples are is not measured")
    return Candidate(
        kind=Kind.REPACK,
        change="samples spread over microbatches by their work",
        plan=outlook.situation.plan,
        predicted_step_seconds=outlook.step_seconds * (1 - gain_ratio),
        gain_ratio=gain_ratio,
        cost_seconds=0.0,
    )
