"""The attempts of a job in words; the same in terminal and page. Pure."""

from collections.abc import Iterator

from trimtab.report.figures import Share
from trimtab.report.summary import Attempt, Goodput, Summary
from trimtab.wording import ABSENT, duration, listed, percent, plural


def place_in_chain(summary: Summary) -> str:
    """Which of the job's attempts this is, and how the one before it ended; empty where there is no other."""
    number, attempts = summary.attempt_number, summary.attempts
    if not attempts:
        return f"attempt {number}; the one before is in {summary.previous}" if number > 1 else ""
    if len(attempts) == 1:
        return ""
    before = f"; the one before: {attempts[number - 2].sentence}" if number > 1 else ""
    return f"attempt {number} of {len(attempts)}{before}"


def state_and_sentence(state: str, sentence: str) -> str:
    """ "finished: trained to step 60"; of a sentence that begins with the state, the sentence alone."""
    return sentence if sentence.startswith(state) else f"{state}: {sentence}"


def goodput_shares(goodput: Goodput) -> tuple[Share, ...]:
    """The parts of a chain's wall time, but those that are nothing."""
    parts = (
        ("compute", "useful steps", goodput.useful_seconds),
        ("imbalance", "steps taken again", goodput.repeated_seconds),
        ("fill", "saving checkpoints", goodput.saving_seconds),
        ("waiting", "between attempts", goodput.waiting_seconds),
        ("starting", "starting and ending", goodput.starting_seconds),
        ("other", "between steps", goodput.other_seconds),
    )
    wall = sum(seconds for _, _, seconds in parts)
    return tuple(Share(key, name, seconds / wall) for key, name, seconds in parts if seconds > 0)


def chain_sentences(summary: Summary) -> Iterator[str]:
    """What there is to say of a chain as one run."""
    chain = summary.chain
    if chain is None:
        return
    goodput = chain.goodput
    yield (
        f"Goodput {percent(goodput.ratio)}: {duration(goodput.useful_seconds)} of useful steps in "
        f"{duration(goodput.wall_seconds)}, from the first start to the last end."
    )
    if again := sum(attempt.repeated_steps for attempt in summary.attempts):
        text = f"{plural(again, 'step')} {'was' if again == 1 else 'were'} taken again after a resume"
        if chain.largest_loss_difference == 0:
            text += ", with the same losses"
        elif chain.largest_loss_difference is not None:
            text += f"; their losses differ by {chain.largest_loss_difference:.1e} at most, as a fraction"
        yield f"{text}."
    for note in chain.notes:
        yield f"{note[:1].upper()}{note[1:]}."


def attempt_details(attempt: Attempt) -> str:
    """Where an attempt ran, and what it waited and took again; empty where nothing is known."""
    parts = []
    if attempt.nodes:
        parts.append(f"{plural(len(attempt.nodes), 'node')}: {listed(list(attempt.nodes))}")
    if attempt.shape:
        parts.append(attempt.shape)
    if attempt.orders:
        parts.append(f"{plural(attempt.orders, 'order')} carried out")
    if attempt.waited_seconds is not None:
        parts.append(f"waited {duration(attempt.waited_seconds)}")
    if attempt.repeated_steps:
        parts.append(f"{plural(attempt.repeated_steps, 'step')} taken again")
    if attempt.lost_steps:
        parts.append(f"{plural(attempt.lost_steps, 'step')} lost")
    return "; ".join(parts)


def steps_of(attempt: Attempt) -> str:
    """ "31-60", "-"."""
    return ABSENT if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}"
