/* One value of each plane, transformed into the pixels of a tile: left x them x right'.
 *
 * Made for every form and VALUE, as what gathers is. A value is the sum of `addends` planes. What is written is
 * the result and `shift`, or these added to what was there. Returned is `total` and the sum of all results times
 * zero: NaN if one was not finite.
 */

/* The first `rows` and `columns` of the tile lie in the image. */
INLINE VALUE NAME(tile)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    const int adds, const int rows, const int columns, real *pixels, const int64_t step_h,
    const int64_t step_w, const int64_t step_c, VALUE total)
{
    VALUE middle[ROWS * COLUMNS_IN];
    UNROLL for (int j = 0; j < COLUMNS_IN; ++j) {
        VALUE line[ROWS_IN];
        UNROLL for (int i = 0; i < ROWS_IN; ++i) {
            const real *value = planes + (i * COLUMNS_IN + j) * plane;
            line[i] = LOAD(value, 1);
            for (int64_t other = 1; other < addends; ++other) line[i] += LOAD(value + other * addend, 1);
        }
        LEFT(line, 1, middle + j, COLUMNS_IN);
    }
    UNROLL for (int i = 0; i < ROWS; ++i) {
        VALUE sums[COLUMNS];
        RIGHT(middle + i * COLUMNS_IN, 1, sums, 1);
        UNROLL for (int j = 0; j < COLUMNS; ++j)
            if (i < rows && j < columns) {
                real *pixel = pixels + i * step_h + j * step_w;
                const VALUE result = sums[j] + shift;
                total += sums[j] * 0;
                STORE(pixel, step_c, adds ? result + LOAD(pixel, step_c) : result);
            }
    }
    return total;
}

static VALUE NAME(scatter)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    const int adds, const int rows, const int columns, real *pixels, const int64_t step_h,
    const int64_t step_w, const int64_t step_c, const VALUE total)
{
    if (rows == ROWS && columns == COLUMNS && addends == 1 && !adds && step_c == 1)
        return NAME(tile)(planes, plane, 1, 0, shift, 0, ROWS, COLUMNS, pixels, step_h, step_w, 1, total);
    return NAME(tile)(
        planes, plane, addends, addend, shift, adds, rows, columns, pixels, step_h, step_w, step_c, total);
}
