/* Windows of an image, transformed: left x window x right', one value to each plane.
 *
 * Made for every form, and for VALUE, which is `lanes`, neighbouring channels, or `real`, one channel.
 */

/* Rows [top, bottom) and columns [left, right) of the window lie in the image; all others are zero. */
INLINE void NAME(window)(
    const real *window, const int64_t step_h, const int64_t step_w, const int64_t step_c, const int top,
    const int bottom, const int left, const int right, real *planes, const int64_t plane)
{
    VALUE middle[ROWS * COLUMNS_IN];
    UNROLL for (int j = 0; j < COLUMNS_IN; ++j) {
        VALUE line[ROWS_IN];
        UNROLL for (int i = 0; i < ROWS_IN; ++i) {
            const int is_inside = top <= i && i < bottom && left <= j && j < right;
            line[i] = is_inside ? LOAD(window + i * step_h + j * step_w, step_c) : (VALUE){0};
        }
        LEFT(line, 1, middle + j, COLUMNS_IN);
    }
    UNROLL for (int i = 0; i < ROWS; ++i) {
        VALUE sums[COLUMNS];
        RIGHT(middle + i * COLUMNS_IN, 1, sums, 1);
        UNROLL for (int j = 0; j < COLUMNS; ++j) STORE(planes + (i * COLUMNS + j) * plane, 1, sums[j]);
    }
}

static void NAME(gather)(
    const real *window, const int64_t step_h, const int64_t step_w, const int64_t step_c, const int top,
    const int bottom, const int left, const int right, real *planes, const int64_t plane)
{
    if (top > 0 || bottom < ROWS_IN || left > 0 || right < COLUMNS_IN)
        NAME(window)(window, step_h, step_w, step_c, top, bottom, left, right, planes, plane);
    else if (step_c == 1)
        NAME(window)(window, step_h, step_w, 1, 0, ROWS_IN, 0, COLUMNS_IN, planes, plane);
    else
        NAME(window)(window, step_h, step_w, step_c, 0, ROWS_IN, 0, COLUMNS_IN, planes, plane);
}
