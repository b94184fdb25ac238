/* One value of each plane, transformed along d, h and w into the pixels of a tile.
 *
 * Made for every form and VALUE, as what gathers is. A value is the sum of `addends` planes. What is written is
 * the result and `shift`, or these added to what was there. Returned is `total` and the sum of all results times
 * zero: NaN if one was not finite.
 */

/* The sum of `addends` values, so many elements apart. */
INLINE VALUE NAME(sum)(const real *value, const int64_t addends, const int64_t addend)
{
    VALUE sum = LOAD(value, 1);
    for (int64_t other = 1; other < addends; ++other) sum += LOAD(value + other * addend, 1);
    return sum;
}

/* Apart, since two places call it. */
APART VALUE NAME(tile)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    real *pixels, const steps_t step, VALUE total)
{
    VALUE slices[SLICES * ROWS_IN * COLUMNS_IN];
    for (int p = 0; !IS_FLAT && p < ROWS_IN * COLUMNS_IN; ++p) {
        VALUE line[SLICES_IN];
        EACH for (int d = 0; d < SLICES_IN; ++d)
            line[d] = NAME(sum)(planes + (d * ROWS_IN * COLUMNS_IN + p) * plane, addends, addend);
        ALONG_D(line, 1, slices + p, ROWS_IN * COLUMNS_IN);
    }
    for (int d = 0; d < SLICES; ++d) {
        VALUE middle[ROWS * COLUMNS_IN];
        EACH for (int j = 0; j < COLUMNS_IN; ++j) {
            VALUE line[ROWS_IN];
            EACH for (int i = 0; i < ROWS_IN; ++i) {
                const int p = i * COLUMNS_IN + j;
                line[i] = IS_FLAT ? NAME(sum)(planes + p * plane, addends, addend)
                                  : slices[d * ROWS_IN * COLUMNS_IN + p];
            }
            ALONG_H(line, 1, middle + j, COLUMNS_IN);
        }
        EACH for (int i = 0; i < ROWS; ++i) {
            VALUE sums[COLUMNS];
            ALONG_W(middle + i * COLUMNS_IN, 1, sums, 1);
            EACH for (int j = 0; j < COLUMNS; ++j) {
                total += sums[j] * 0;
                STORE(pixels + d * step.d + i * step.h + j * step.w, 1, sums[j] + shift);
            }
        }
    }
    return total;
}

/* What lies outside of `inside` is not written. Apart, since inlined in a loop over tiles it takes 3 % longer. */
APART VALUE NAME(scatter)(
    const real *planes, const int64_t plane, const int64_t addends, const int64_t addend, const VALUE shift,
    const int adds, const box_t inside, real *pixels, const steps_t step, VALUE total)
{
    const int is_whole = is_equal(inside, (box_t){0, SLICES, 0, ROWS, 0, COLUMNS});
    if (is_whole && !adds && (WIDTH == 1 || step.c == 1))
        return NAME(tile)(planes, plane, addends, addend, shift, pixels, step, total);
    VALUE tile[SLICES][ROWS][COLUMNS];
    const steps_t within = {ROWS * COLUMNS * WIDTH, COLUMNS * WIDTH, WIDTH, 1};
    NAME(tile)(planes, plane, addends, addend, (VALUE){0}, (real *)tile, within, (VALUE){0});
    for (int d = inside.front; d < inside.back; ++d)
        for (int i = inside.top; i < inside.bottom; ++i)
            for (int j = inside.left; j < inside.right; ++j) {
                real *pixel = pixels + d * step.d + i * step.h + j * step.w;
                const VALUE result = tile[d][i][j] + shift;
                total += tile[d][i][j] * 0;
                STORE(pixel, step.c, adds ? result + LOAD(pixel, step.c) : result);
            }
    return total;
}
