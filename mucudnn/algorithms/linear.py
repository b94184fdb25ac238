"""Products with a constant matrix, written out in C: what transforms of tiles are made of."""

from mucudnn.algorithms.forms import Matrix

_LEAST_FACTOR = 1e-15
"""Entries of a matrix below it are zeros that were rounded: sines of multiples of pi."""


def product_in_c(name: str, matrix: Matrix, value: str = "real") -> str:
    """Return a function in C that writes matrix · x to y, whose elements lie some steps apart.

    Args:
        name: of the function.
        matrix: (rows, columns).
        value: type of the elements, which can be multiplied by a `real`; that type and the word `INLINE` are
            defined before.
    """
    rows = [f"    y[{i} * y_step] = {_sum(row, value)};" for i, row in enumerate(matrix.tolist())]
    head = f"INLINE void {name}(const {value} *x, const int x_step, {value} *y, const int y_step)"
    return "\n".join([head, "{", *rows, "}", ""])


def _sum(row: list[float], value: str) -> str:
    """Return sum of row[j] · x_j, without the products that are 0 or x_j itself."""
    terms = []
    for j, factor in enumerate(row):
        x = f"x[{j} * x_step]"
        if abs(factor) > _LEAST_FACTOR:
            sign = "-" if factor < 0 else "+"
            terms.append(f"{sign} {x}" if abs(factor) == 1 else f"{sign} (real){abs(factor)!r} * {x}")
    return " ".join(terms) or ("0" if value == "real" else f"({value}){{0}}")
