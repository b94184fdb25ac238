/* Windows of an image, transformed along d, h and w, one value to each plane.
 *
 * Made for every form, and for VALUE, which is `lanes`, neighbouring channels, or `real`, one channel. Loops over
 * slices are unrolled where there is but one, and stay loops elsewhere, since the code would fill the cache.
 */

/* What lies outside of `inside` is zero. */
INLINE void NAME(window)(
    const real *window, const steps_t step, const box_t inside, real *planes, const int64_t plane)
{
    VALUE slices[SLICES_IN][ROWS * COLUMNS];
    OVER_SLICES for (int d = 0; d < SLICES_IN; ++d) {
        VALUE middle[ROWS * COLUMNS_IN];
        UNROLL for (int j = 0; j < COLUMNS_IN; ++j) {
            VALUE line[ROWS_IN];
            UNROLL for (int i = 0; i < ROWS_IN; ++i)
                line[i] = holds(inside, d, i, j) ? LOAD(window + d * step.d + i * step.h + j * step.w, step.c)
                                                 : (VALUE){0};
            ALONG_H(line, 1, middle + j, COLUMNS_IN);
        }
        UNROLL for (int i = 0; i < ROWS; ++i) ALONG_W(middle + i * COLUMNS_IN, 1, slices[d] + i * COLUMNS, 1);
    }
    OVER_SLICES for (int p = 0; p < ROWS * COLUMNS; ++p) {
        VALUE sums[SLICES];
        ALONG_D(slices[0] + p, ROWS * COLUMNS, sums, 1);
        UNROLL for (int d = 0; d < SLICES; ++d) STORE(planes + (d * ROWS * COLUMNS + p) * plane, 1, sums[d]);
    }
}

static void NAME(gather)(
    const real *window, const steps_t step, const box_t inside, real *planes, const int64_t plane)
{
    const box_t whole = {0, SLICES_IN, 0, ROWS_IN, 0, COLUMNS_IN};
    if (!is_equal(inside, whole))
        NAME(window)(window, step, inside, planes, plane);
    else if (step.c == 1)
        NAME(window)(window, (steps_t){step.d, step.h, step.w, 1}, whole, planes, plane);
    else
        NAME(window)(window, step, whole, planes, plane);
}
