/* One value of each plane, transformed along d, h and w into the pixels of a tile.
 *
 * Made for every form and VALUE, as what gathers is. A value is the sum of `addends` planes. What is written is
 * the result and `shift`, or these added to what was there. Returned is `total` and the sum of all results times
 * zero: NaN if one was not finite.
 */

/* What lies outside of `inside` is not written. */
INLINE VALUE NAME(tile)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    const int adds, const box_t inside, real *pixels, const steps_t step, VALUE total)
{
    VALUE slices[SLICES][ROWS_IN * COLUMNS_IN];
    OVER_SLICES for (int p = 0; p < ROWS_IN * COLUMNS_IN; ++p) {
        VALUE line[SLICES_IN];
        UNROLL for (int d = 0; d < SLICES_IN; ++d) {
            const real *value = planes + (d * ROWS_IN * COLUMNS_IN + p) * plane;
            line[d] = LOAD(value, 1);
            for (int64_t other = 1; other < addends; ++other) line[d] += LOAD(value + other * addend, 1);
        }
        ALONG_D(line, 1, slices[0] + p, ROWS_IN * COLUMNS_IN);
    }
    OVER_SLICES for (int d = 0; d < SLICES; ++d) {
        VALUE middle[ROWS * COLUMNS_IN];
        UNROLL for (int j = 0; j < COLUMNS_IN; ++j) ALONG_H(slices[d] + j, COLUMNS_IN, middle + j, COLUMNS_IN);
        UNROLL for (int i = 0; i < ROWS; ++i) {
            VALUE sums[COLUMNS];
            ALONG_W(middle + i * COLUMNS_IN, 1, sums, 1);
            UNROLL for (int j = 0; j < COLUMNS; ++j)
                if (holds(inside, d, i, j)) {
                    real *pixel = pixels + d * step.d + i * step.h + j * step.w;
                    const VALUE result = sums[j] + shift;
                    total += sums[j] * 0;
                    STORE(pixel, step.c, adds ? result + LOAD(pixel, step.c) : result);
                }
        }
    }
    return total;
}

static VALUE NAME(scatter)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    const int adds, const box_t inside, real *pixels, const steps_t step, const VALUE total)
{
    const box_t whole = {0, SLICES, 0, ROWS, 0, COLUMNS};
    if (is_equal(inside, whole) && addends == 1 && !adds && step.c == 1)
        return NAME(tile)(
            planes, plane, 1, 0, shift, 0, whole, pixels, (steps_t){step.d, step.h, step.w, 1}, total);
    return NAME(tile)(planes, plane, addends, addend, shift, adds, inside, pixels, step, total);
}
