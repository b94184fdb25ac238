/* The filter's gradient by tiles: the same loops for wgrad, after those of fprop.
 *
 * Sums of products are planes of (channels of y, of x), and are transformed when all that is summed is there.
 */

static const margin_t NO_MARGIN = {0, 0, 0};

/* Transform the sums of some channels of y into the filter's gradient; return NaN if one was not finite.
 *
 * What is left of the channels of x beside whole vectors is taken one by one, since it may be added to.
 */
static double scatter_filter(
    const call_t *call, const int64_t channel, const int64_t channels, const real *sums, const int64_t plane,
    const int64_t addends, const int64_t addend)
{
    const int64_t x_channels = call->x.channels;
    const int adds = call->adds != 0;
    const steps_t step = {call->filter_d, call->filter_h, call->filter_w, call->filter_x};
    lanes total = {0};
    real rest = 0;
    for (int64_t k = 0; k < channels; ++k)
        for (int64_t c = 0, next; c < x_channels; c = next) {
            const int is_vector = c + LANES <= x_channels;
            next = c + (is_vector ? LANES : 1);
            real *taps = call->filter + c * call->filter_x + (channel + k) * call->filter_y;
            const real *from = sums + k * x_channels + c;
            if (is_vector)
                total = scatter_w_lanes(from, plane, addends, addend, (lanes){0}, adds, ALL_TAPS, taps, step, total);
            else
                rest = scatter_w_real(from, plane, addends, addend, 0, adds, ALL_TAPS, taps, step, rest);
        }
    return sum_of(total) + rest;
}

/* sums = y' x for each product, or that added to them. */
static void multiply_sums(
    const call_t *call, const share_t *share, const int64_t tiles, const int64_t channels, const int adds)
{
    const int m = (int)call->x.channels, n = (int)channels, k = (int)tiles;
    const real one = 1, kept = adds ? 1 : 0;
    for (int i = 0; i < PLANES; ++i) {
        const real *x = share->x + PRODUCT[i].x * share->x_plane, *y = share->y + PRODUCT[i].y * share->y_plane;
        real *sums = share->sums + PRODUCT[i].u * share->sums_plane;
        if (call->gemm)
            call->gemm("N", "T", &m, &n, &k, &one, x, &m, y, &n, &kept, sums, &m);
        else
            product((product_t){channels, m, tiles, 1, channels, m, m, adds}, y, x, sums);
    }
}

/* Add the products of this thread's lines to its own sums, or start these with them. */
void add(const call_t *call, const share_t *share)
{
    int adds = call->adds != 0;
    for (int64_t line = share->first; line < share->last; line += share->lines) {
        const int64_t end = least(line + share->lines, share->last);
        gather_x(call, share, line, end, share->x);
        lines_y(
            call, &call->y, NO_MARGIN, line, end, 0, call->y.channels, share->y, share->y_plane, share->stage);
        multiply_sums(call, share, (end - line) * call->tiles_w, call->y.channels, adds);
        adds = 1;
    }
    for (int i = 0; !adds && i < PLANES; ++i)  /* nothing to start them with */
        memset(share->sums + i * share->sums_plane, 0, sizeof(real) * call->y.channels * call->x.channels);
}

/* Transform the sums of all threads, the first of which lie at u, of this thread's channels of y; return
 * NaN if one was not finite. */
double finish(const call_t *call, const share_t *share)
{
    return scatter_filter(
        call, share->channel, share->last_channel - share->channel,
        share->u + share->channel * call->x.channels, share->u_plane, share->addends, share->addend);
}

/* Compute the gradient of this thread's channels of y, some at a time; return NaN if one was not finite. */
double grouped_sums(const call_t *call, const share_t *share)
{
    double found = 0;
    for (int64_t channel = share->channel; channel < share->last_channel; channel += share->group) {
        const int64_t channels = least(share->group, share->last_channel - channel);
        lines_y(
            call, &call->y, NO_MARGIN, 0, share->lines, channel, channels, share->y, share->y_plane, share->stage);
        multiply_sums(call, share, share->lines * call->tiles_w, channels, 0);
        found += scatter_filter(call, channel, channels, share->sums, share->sums_plane, 1, 0);
    }
    return found;
}
