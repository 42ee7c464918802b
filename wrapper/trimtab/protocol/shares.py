"""How a step's microbatches are shared out over replicas that are equally fast. Pure."""


def even_shares(microbatches: int, replicas: int, multiple: int = 1) -> tuple[int, ...]:
    """[R] of each replica: multiples of `multiple` (what the schedule takes at once), as equal as can be.

    The first replicas take one more, as when the microbatches are dealt in turn: which are slower is not known before
    they have run. Raises ValueError where a replica would get none, or where there are no such multiples.
    """
    groups, rest = divmod(microbatches, multiple)
    if rest:
        raise ValueError(f"{microbatches} microbatches are no multiple of {multiple}")
    least, more = divmod(groups, replicas)
    if not least:
        raise ValueError(f"{microbatches} microbatches are fewer than {multiple} for each of {replicas} replicas")
    return tuple(multiple * (least + (replica < more)) for replica in range(replicas))
