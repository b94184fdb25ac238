/* Lines of windows of an image, transformed into planes of (windows, channels).
 *
 * Made for x and for y. Windows are SLICES_IN x ROWS_IN x COLUMNS_IN pixels, STEP_D, STEP_H and STEP_W apart,
 * and begin `margin` before the image. A line is a row of windows; lines are counted through all images.
 */

static void NAME(lines)(
    const call_t *call, const image_t *image, const margin_t margin, const int64_t first, const int64_t last,
    const int64_t channel, const int64_t channels, real *planes, const int64_t plane, real *stage)
{
    const int is_vector = channels >= LANES;
    for (int64_t line = first; line < last; ++line) {
        const line_t at = line_of(call, line);
        const run_t d = run_of(at.d * STEP_D - margin.d, SLICES_IN, image->depth);
        const run_t h = run_of(at.h * STEP_H - margin.h, ROWS_IN, image->height);
        for (int64_t begin = 0; begin < channels; begin += is_vector ? LANES : 1) {
            const int64_t c = is_vector ? vector_at(begin, channels) : begin;
            real *from = pixel_of(image, at.n, channel + c, d.start, h.start);
            steps_t step = steps_of(image);
            if (is_vector && step.c != 1) {
                turn_box(image, from, stage, d.last - d.first, h.last - h.first, 1);
                from = stage, step = steps_of_stage(image, h.last - h.first);
            }
            for (int64_t tile = 0; tile < call->tiles_w; ++tile) {
                const int64_t left = tile * STEP_W - margin.w;
                const run_t w = run_of(left, COLUMNS_IN, image->width);
                const box_t inside = {d.first, d.last, h.first, h.last, w.first, w.last};
                const real *window = from - d.first * step.d - h.first * step.h + left * step.w;
                real *to = planes + ((line - first) * call->tiles_w + tile) * channels + c;
                (is_vector ? NAME_OF(gather, lanes) : NAME_OF(gather, real))(window, step, inside, to, plane);
            }
        }
    }
}
