/* Convolution by tiles: loops over lines of tiles, and over groups of channels of y.
 *
 * x is cut into overlapping windows, one for each tile of y. Planes of x and y are (tiles, channels), those of the
 * filter (channels of x, of y). Every function is called by each thread with a share of its own; the functions'
 * names are those that Python calls.
 */

static const box_t ALL_TAPS = {0, TAPS_D, 0, TAPS_H, 0, TAPS_W};

/* A product of planes of u and x, which is a plane of y, or is added to it. */
static const struct { int u, x, y, adds; } PRODUCT[PLANES] = PRODUCTS;

/* Transform products into lines of y; return NaN if one was not finite. */
static double scatter_lines(
    const call_t *call, const int64_t first, const int64_t last, const int64_t channel, const int64_t channels,
    const real *planes, const int64_t plane, real *stage)
{
    const image_t *image = &call->y;
    const int is_vector = channels >= LANES, is_staged = is_vector && image->step_c != 1;
    lanes total = {0};
    real rest = 0;
    for (int64_t line = first; line < last; ++line) {
        const line_t at = line_of(call, line);
        const int64_t slice = at.d * OUTPUTS_D, row = at.h * OUTPUTS_H;
        const int slices = (int)least(OUTPUTS_D, image->depth - slice);
        const int rows = (int)least(OUTPUTS_H, image->height - row);
        for (int64_t begin = 0; begin < channels; begin += is_vector ? LANES : 1) {
            const int64_t c = is_vector ? vector_at(begin, channels) : begin;
            real *start = pixel_of(image, at.n, channel + c, slice, row);
            real *to = is_staged ? stage : start;
            const steps_t step = is_staged ? steps_of_stage(image, rows) : steps_of(image);
            lanes shift = {0};
            for (int i = 0; call->bias && i < (is_vector ? LANES : 1); ++i)
                shift[i] = call->bias[(channel + c + i) * call->bias_step];
            for (int64_t tile = 0; tile < call->tiles_w; ++tile) {
                const int64_t left = tile * OUTPUTS_W;
                const box_t inside = {0, slices, 0, rows, 0, (int)least(OUTPUTS_W, image->width - left)};
                const real *from = planes + ((line - first) * call->tiles_w + tile) * channels + c;
                real *pixels = to + left * step.w;
                if (is_vector)
                    total = scatter_y_lanes(from, plane, 1, 0, shift, 0, inside, pixels, step, total);
                else
                    rest = scatter_y_real(from, plane, 1, 0, shift[0], 0, inside, pixels, step, rest);
            }
            if (is_staged) turn_box(image, start, stage, slices, rows, 0);
        }
    }
    return sum_of(total) + rest;
}

/* Transform the filter of some channels of y. */
static void gather_filter(
    const call_t *call, const int64_t channel, const int64_t channels, real *u, const int64_t plane,
    const int64_t row)
{
    const steps_t step = {call->filter_d, call->filter_h, call->filter_w, call->filter_y};
    const int is_vector = channels >= LANES;
    for (int64_t begin = 0; begin < channels; begin += is_vector ? LANES : 1) {
        const int64_t k = is_vector ? vector_at(begin, channels) : begin;
        for (int64_t c = 0; c < call->x.channels; ++c)
            (is_vector ? gather_w_lanes : gather_w_real)(
                call->filter + c * call->filter_x + (channel + k) * call->filter_y, step, ALL_TAPS,
                u + c * row + k, plane);
    }
}

/* y = x u for each product, or the sum of those of the same y; by BLAS if the call has its product. */
static void multiply(
    const call_t *call, const share_t *share, const int64_t u_row, const int64_t tiles, const int64_t channels)
{
    const int m = (int)channels, n = (int)tiles, k = (int)call->x.channels, row = (int)u_row;
    const real one = 1, zero = 0;
    for (int i = 0; i < PLANES; ++i) {
        const real *u = share->u + PRODUCT[i].u * share->u_plane, *x = share->x + PRODUCT[i].x * share->x_plane;
        real *y = share->y + PRODUCT[i].y * share->y_plane;
        const int adds = PRODUCT[i].adds;
        if (call->gemm)
            call->gemm("N", "N", &m, &n, &k, &one, u, &row, x, &k, adds ? &one : &zero, y, &m);
        else
            product((product_t){tiles, channels, k, k, 1, u_row, channels, adds}, x, u, y);
    }
}

static void gather_x(const call_t *call, const share_t *share, const int64_t first, const int64_t last, real *to)
{
    const margin_t margin = {call->margin_d, call->margin_h, call->margin_w};
    lines_x(call, &call->x, margin, first, last, 0, call->x.channels, to, share->x_plane, share->stage);
}

/* Transform this thread's channels of the filter, for all threads. */
void prepare(const call_t *call, const share_t *share)
{
    gather_filter(
        call, share->channel, share->last_channel - share->channel, share->u + share->channel, share->u_plane,
        call->y.channels);
}

/* Compute this thread's lines of y, block by block; return NaN if one was not finite. */
double slices(const call_t *call, const share_t *share)
{
    double found = 0;
    for (int64_t line = share->first; line < share->last; line += share->lines) {
        const int64_t end = least(line + share->lines, share->last);
        gather_x(call, share, line, end, share->x);
        multiply(call, share, call->y.channels, (end - line) * call->tiles_w, call->y.channels);
        found += scatter_lines(call, line, end, 0, call->y.channels, share->y, share->y_plane, share->stage);
    }
    return found;
}

/* Transform this thread's lines of x, for all threads. */
void gather(const call_t *call, const share_t *share)
{
    gather_x(
        call, share, share->first, share->last,
        share->x + share->first * call->tiles_w * call->x.channels);
}

/* Compute this thread's channels of y, some at a time, from all lines of x; return NaN if one was not finite. */
double grouped_slices(const call_t *call, const share_t *share)
{
    double found = 0;
    for (int64_t channel = share->channel; channel < share->last_channel; channel += share->group) {
        const int64_t channels = least(share->group, share->last_channel - channel);
        gather_filter(call, channel, channels, share->u, share->u_plane, channels);
        multiply(call, share, channels, share->lines * call->tiles_w, channels);
        found += scatter_lines(call, 0, share->lines, channel, channels, share->y, share->y_plane, share->stage);
    }
    return found;
}
