/* Windows of an image, transformed along d, h and w, one value to each plane.
 *
 * Made for every form, and for VALUE, which is `lanes`, neighbouring channels, or `real`, one channel; EACH has
 * loops unrolled for the former. Slices are taken one after another, and kept until all can be transformed along
 * d; a single one goes where it belongs. Channels that lie apart are loaded one by one, which takes longest to
 * compile: that is made for filters alone, since those of an image lie next to each other (IS_NEAR).
 */

INLINE void NAME(window)(const real *window, const steps_t step, real *planes, const int64_t plane)
{
    VALUE slices[SLICES_IN * ROWS * COLUMNS];
    for (int d = 0; d < SLICES_IN; ++d) {
        VALUE middle[ROWS * COLUMNS_IN];
        EACH for (int j = 0; j < COLUMNS_IN; ++j) {
            VALUE line[ROWS_IN];
            EACH for (int i = 0; i < ROWS_IN; ++i)
                line[i] = LOAD(window + d * step.d + i * step.h + j * step.w, step.c);
            ALONG_H(line, 1, middle + j, COLUMNS_IN);
        }
        EACH for (int i = 0; i < ROWS; ++i) {
            VALUE sums[COLUMNS];
            ALONG_W(middle + i * COLUMNS_IN, 1, sums, 1);
            EACH for (int j = 0; j < COLUMNS; ++j)
                if (IS_FLAT)
                    STORE(planes + (i * COLUMNS + j) * plane, 1, sums[j]);
                else
                    slices[(d * ROWS + i) * COLUMNS + j] = sums[j];
        }
    }
    for (int p = 0; !IS_FLAT && p < ROWS * COLUMNS; ++p) {
        VALUE sums[SLICES];
        ALONG_D(slices + p, ROWS * COLUMNS, sums, 1);
        EACH for (int d = 0; d < SLICES; ++d) STORE(planes + (d * ROWS * COLUMNS + p) * plane, 1, sums[d]);
    }
}

/* What lies outside of `inside` is zero. */
static void NAME(gather)(
    const real *window, steps_t step, const box_t inside, real *planes, const int64_t plane)
{
    VALUE pixels[SLICES_IN][ROWS_IN][COLUMNS_IN];
    if (!is_equal(inside, (box_t){0, SLICES_IN, 0, ROWS_IN, 0, COLUMNS_IN})) {
        memset(pixels, 0, sizeof pixels);
        for (int d = inside.front; d < inside.back; ++d)
            for (int i = inside.top; i < inside.bottom; ++i)
                for (int j = inside.left; j < inside.right; ++j)
                    pixels[d][i][j] = LOAD(window + d * step.d + i * step.h + j * step.w, step.c);
        window = (const real *)pixels;
        step = (steps_t){ROWS_IN * COLUMNS_IN * WIDTH, COLUMNS_IN * WIDTH, WIDTH, 1};
    }
    if (IS_NEAR || WIDTH == 1 || step.c == 1)
        NAME(window)(window, (steps_t){step.d, step.h, step.w, 1}, planes, plane);
    else
        NAME(window)(window, step, planes, plane);
}
