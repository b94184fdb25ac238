/* Lines of windows of an image, transformed into planes of (windows, channels).
 *
 * Made for x and for y. Windows are ROWS_IN x COLUMNS_IN pixels, OUTPUTS_H and OUTPUTS_W apart, and begin `margin`
 * before the image. A line is a row of windows; lines are counted through all images.
 */

static void NAME(lines)(
    const call_t *call, const image_t *image, const int64_t margin_h, const int64_t margin_w, const int64_t first,
    const int64_t last, const int64_t channel, const int64_t channels, real *planes, const int64_t plane,
    real *stage)
{
    for (int64_t line = first; line < last; ++line) {
        const int64_t n = line / call->tiles_h, top = line % call->tiles_h * OUTPUTS_H - margin_h;
        const int64_t row = least(most(top, 0), image->height);
        const int64_t end = most(least(top + ROWS_IN, image->height), row);
        for (int64_t c = 0, next; c < channels; c = next) {
            const int is_vector = c + LANES <= channels;
            next = c + (is_vector ? LANES : 1);
            real *from = image->start + n * image->step_n + (channel + c) * image->step_c + row * image->step_h;
            int64_t step_h = image->step_h, step_w = image->step_w, step_c = image->step_c;
            if (is_vector && step_c != 1) {
                turn_rows(image, from, stage, end - row, 1);
                from = stage, step_h = image->width * LANES, step_w = LANES, step_c = 1;
            }
            for (int64_t tile = 0; tile < call->tiles_w; ++tile) {
                const int64_t left = tile * OUTPUTS_W - margin_w;
                const int begin = (int)least(most(-left, 0), COLUMNS_IN);
                const int stop = (int)most(least(image->width - left, COLUMNS_IN), begin);
                const real *window = from + (top - row) * step_h + left * step_w;
                real *to = planes + ((line - first) * call->tiles_w + tile) * channels + c;
                (is_vector ? NAME_OF(gather, lanes) : NAME_OF(gather, real))(
                    window, step_h, step_w, step_c, (int)(row - top), (int)(end - top), begin, stop, to, plane);
            }
        }
    }
}
