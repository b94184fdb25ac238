"""Parts of a whole, as equal as they can be."""


def part_of(total: int, number: int, count: int) -> tuple[int, int]:
    """Return the first and the end of part `number` of `count`; their sizes differ by one at most."""
    return total * number // count, total * (number + 1) // count
