/* to = a b, or that added to it: what BLAS computes, where that does not use the whole vectors of a processor.
 *
 * Blocks of some rows and vectors of columns are summed in registers: for each term a vector of b is multiplied by
 * one number of each row of a. Nothing is packed: planes are small, and their rows lie next to each other. A row of
 * b, or of `to`, has its columns next to each other; of a, whose rows are columns if it is turned, steps are told.
 * Of many terms some are summed at a time, and the sums added, so that errors grow no longer with all of them.
 */

typedef struct { int64_t rows, columns, terms, a_row, a_term, b_row, to_row; int adds; } product_t;

INLINE void product_block(
    const product_t *of, const int rows, const int vectors, const real *a, const real *b, real *to,
    const int64_t to_row, const int adds)
{
    lanes sums[MOST_ROWS][MOST_VECTORS];
    UNROLL for (int i = 0; i < rows; ++i)
        UNROLL for (int v = 0; v < vectors; ++v)
            sums[i][v] = (lanes){0};
    for (int64_t term = 0; term < of->terms; ++term, a += of->a_term, b += of->b_row) {
        lanes row[MOST_VECTORS];
        UNROLL for (int v = 0; v < vectors; ++v) row[v] = load_lanes(b + v * LANES, 1);
        UNROLL for (int i = 0; i < rows; ++i) {
            const lanes factor = a[i * of->a_row] - (lanes){0};  /* which is that number, be it -0 */
            UNROLL for (int v = 0; v < vectors; ++v) sums[i][v] += factor * row[v];
        }
    }
    UNROLL for (int i = 0; i < rows; ++i)
        UNROLL for (int v = 0; v < vectors; ++v) {
            real *at = to + i * to_row + v * LANES;
            store_lanes(at, 1, adds ? load_lanes(at, 1) + sums[i][v] : sums[i][v]);
        }
}

/* All rows of so many vectors of columns. */
INLINE void product_rows(const product_t *of, const int vectors, const real *a, const real *b, real *to)
{
    int64_t i = 0;
    for (; i + MOST_ROWS <= of->rows; i += MOST_ROWS)
        product_block(of, MOST_ROWS, vectors, a + i * of->a_row, b, to + i * of->to_row, of->to_row, of->adds);
    for (; i + 2 <= of->rows; i += 2)
        product_block(of, 2, vectors, a + i * of->a_row, b, to + i * of->to_row, of->to_row, of->adds);
    for (; i < of->rows; ++i)
        product_block(of, 1, vectors, a + i * of->a_row, b, to + i * of->to_row, of->to_row, of->adds);
}

/* Of a vector of columns those from `first` to `last`; the others are left as they are. */
APART void product_some(
    const product_t *of, const int first, const int last, const real *a, const real *b, real *to)
{
    for (int64_t i = 0; i < of->rows; i += MOST_ROWS) {
        const int rows = (int)least(MOST_ROWS, of->rows - i);
        const real *from = a + i * of->a_row;
        real sums[MOST_ROWS * LANES];
        if (rows == MOST_ROWS)
            product_block(of, MOST_ROWS, 1, from, b, sums, LANES, 0);
        else
            for (int each = 0; each < rows; ++each)
                product_block(of, 1, 1, from + each * of->a_row, b, sums + each * LANES, LANES, 0);
        for (int each = 0; each < rows; ++each) {
            real *row = to + (i + each) * of->to_row, *sum = sums + each * LANES;
            for (int c = first; c < last; ++c) row[c] = of->adds ? row[c] + sum[c] : sum[c];
        }
    }
}

/* All columns, where they do not fill a vector: those of b are copied to where zeros fill it. */
APART void product_narrow(const product_t *of, const real *a, const real *b, real *to)
{
    real vectors[MOST_TERMS * LANES];
    product_t in_vectors = *of;
    in_vectors.b_row = LANES;
    for (int64_t term = 0; term < of->terms; ++term)
        for (int c = 0; c < LANES; ++c) vectors[term * LANES + c] = c < of->columns ? b[term * of->b_row + c] : 0;
    product_some(&in_vectors, 0, (int)of->columns, a, vectors, to);
}

/* All columns, of some terms; the last vector of them begins earlier if need be. */
APART void product_terms(const product_t *of, const real *a, const real *b, real *to)
{
    const int64_t last = of->columns - LANES;
    int64_t j = 0;
    for (; j + MOST_VECTORS * LANES <= of->columns; j += MOST_VECTORS * LANES)
        product_rows(of, MOST_VECTORS, a, b + j, to + j);
    for (; j + 2 * LANES <= of->columns; j += 2 * LANES) product_rows(of, 2, a, b + j, to + j);
    for (; j + LANES <= of->columns; j += LANES) product_rows(of, 1, a, b + j, to + j);
    if (last < 0)
        product_narrow(of, a, b, to);
    else if (j < of->columns)
        product_some(of, (int)(j - last), LANES, a, b + last, to + last);
}

static void product(product_t of, const real *a, const real *b, real *to)
{
    const int64_t terms = of.terms;
    for (int64_t term = 0; term == 0 || term < terms; term += MOST_TERMS, of.adds = 1) {
        of.terms = least(MOST_TERMS, terms - term);
        product_terms(&of, a + term * of.a_term, b + term * of.b_row, to);
    }
}
