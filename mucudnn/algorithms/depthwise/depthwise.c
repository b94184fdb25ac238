/* Depthwise convolution: each channel by itself, by the definition, LANES channels at a time.
 *
 * A unit is a band of rows of one slice of an image, or a part of such rows where they are long. What of x it reads
 * lies in a stage, with zeros around the image, where the LANES channels of a pixel are one vector, whatever the
 * layout; so do the rows of y where the image has its channels elsewhere. Then every output is a sum of vectors times
 * vectors. The last vector of channels begins where LANES are left, so it may share some with the one before, which
 * come out equal.
 */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* Have an address in a register: else gcc adds up indices anew for every vector. */
#define AT_HAND(address) __asm__("" : "+r"(address))

/* Pixels of dy after which sums of their products are added to those of the gradient: short chains round less. */
#define CHAIN 128

enum { LANES = LANES_ };

typedef REAL_ real;
typedef real lanes __attribute__((vector_size(BYTES_)));
typedef real loose __attribute__((vector_size(BYTES_), aligned(sizeof(real)), may_alias));
typedef PLACE_ places __attribute__((vector_size(BYTES_)));

ELEMENTS

typedef struct { FIELDS_OF_IMAGE } image_t;
typedef struct { FIELDS_OF_TAP } tap_t;
typedef struct { FIELDS_OF_PHASE } phase_t;
typedef struct { FIELDS_OF_AXIS } axis_t;
typedef struct { image_t x, y; axis_t d, h, w; FIELDS_OF_CALL } call_t;
typedef struct { FIELDS_OF_SHARE } share_t;

/* Where a unit lies: its image, slice, rows of y from `row` to `end` and `width` columns from `left` on; its vector of
 * channels, the first of them, and how many there are.
 */
typedef struct { int64_t n, d, row, end, left, width, block, channel, channels; } unit_t;

INLINE int64_t least(const int64_t a, const int64_t b) { return a < b ? a : b; }

INLINE int64_t most(const int64_t a, const int64_t b) { return a < b ? b : a; }

TRANSPOSITION

static double sum_of(const lanes total)
{
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return sum;
}

INLINE int64_t channel_of(const call_t *call, const int64_t block)
{
    return least(block * LANES, most(call->channels - LANES, 0));
}

static unit_t unit_of(const call_t *call, const int64_t unit)
{
    const int64_t block = unit % call->blocks, strip = unit / call->blocks, band = strip / call->strips;
    const int64_t slice = band / call->bands, row = band % call->bands * call->band;
    const int64_t left = strip % call->strips * call->strip;
    return (unit_t){
        slice / call->d.outputs, slice % call->d.outputs, row, least(row + call->band, call->h.outputs), left,
        least(call->strip, call->w.outputs - left), block, channel_of(call, block), least(call->channels, LANES)};
}

INLINE element *pixel_of(const image_t *image, const unit_t *unit, const int64_t d, const int64_t h)
{
    return image->start + unit->n * image->step_n + unit->channel * image->step_c + d * image->step_d
           + h * image->step_h;
}

INLINE lanes *vector_at(real *stage, const int64_t place) { return (lanes *)stage + place; }

INLINE void clear(lanes *to, const int64_t count) { memset(to, 0, sizeof *to * most(count, 0)); }

COPYING

/* Have in the stage what a unit reads: one slice for each tap along d, one behind the other. */
static void stage_in(const call_t *call, const unit_t *unit, real *stage)
{
    const phase_t *phase = call->d.phase + unit->d % call->d.period;
    const int64_t d = unit->d / call->d.period * call->d.step;
    const int64_t row = unit->row / call->h.period * call->h.step + call->h.first;
    const int64_t column = unit->left / call->w.period * call->w.step + call->w.first;
    for (int64_t i = 0; i < phase->taps; ++i)
        rows_in(
            &call->x, unit, d + call->d.tap[phase->first + i].shift, row, call->rows, column, call->pitch,
            vector_at(stage, i * call->rows * call->pitch));
}

/* Compute `n` outputs of a row, of one phase, from the stage; `step` inputs apart. */
INLINE void outputs_at(
    const int n, const int64_t step, const call_t *call, const phase_t *d, const phase_t *h, const phase_t *w,
    const lanes *stage, const lanes *u, const lanes shift, lanes *sum)
{
    UNROLL for (int i = 0; i < n; ++i) sum[i] = shift;
    for (int64_t a = 0; a < d->taps; ++a)
        for (int64_t b = 0; b < h->taps; ++b) {
            const tap_t *along_h = call->h.tap + h->first + b;
            const lanes *row = stage + (a * call->rows + along_h->shift) * call->pitch;
            const lanes *weights =
                u + (call->d.tap[d->first + a].tap * call->h.taps + along_h->tap) * call->w.taps;
            for (int64_t c = 0; c < w->taps; ++c) {
                const tap_t *along_w = call->w.tap + w->first + c;
                const lanes weight = weights[along_w->tap];
                const lanes *from = row + along_w->shift;
                AT_HAND(from);
                UNROLL for (int i = 0; i < n; ++i) sum[i] += weight * from[i * step];
            }
        }
}

/* Compute a row's outputs of one phase, some at a time, the last of them perhaps a second time; return `total`, or NaN
 * where one is not finite.
 */
INLINE lanes outputs_of(
    const int n, const int64_t step, const call_t *call, const phase_t *d, const phase_t *h, const phase_t *w,
    const lanes *stage, const lanes *u, const lanes shift, const int64_t count, element *to, const int64_t to_step,
    lanes *to_stage, lanes total)
{
    const int64_t period = call->w.period;
    for (int64_t next = 0; next < count; next += n) {
        const int64_t at = least(next, count - n);
        lanes sum[8];
        outputs_at(n, step, call, d, h, w, stage + at * step, u, shift, sum);
        UNROLL for (int i = 0; i < n; ++i) {
            total += sum[i] * 0; /* NaN if it is not finite */
            if (to_stage)
                to_stage[(at + i) * period] = sum[i];
            else
                put(to + (at + i) * period * to_step, sum[i]);
        }
    }
    return total;
}

#define OUTPUTS_OF(n, step) \
    outputs_of(n, step, call, d, h, w, stage, u, shift, count, to, to_step, to_stage, total)
#define BY_STEP(n) \
    (call->w.step == 1 ? OUTPUTS_OF(n, 1) : call->w.step == 2 ? OUTPUTS_OF(n, 2) : OUTPUTS_OF(n, call->w.step))

static lanes row_of(
    const call_t *call, const phase_t *d, const phase_t *h, const phase_t *w, const lanes *stage, const lanes *u,
    const lanes shift, const int64_t count, element *to, const int64_t to_step, lanes *to_stage, const lanes total)
{
    if (count >= 8) return BY_STEP(8);
    return count >= 4 ? BY_STEP(4) : BY_STEP(1);
}

/* Compute y of a thread's units from x and the filter in `u`; return NaN if some of it is not finite. */
double slices(const call_t *call, const share_t *share)
{
    const int64_t taps = call->d.taps * call->h.taps * call->w.taps;
    lanes total = {0};
    for (int64_t number = share->first; number < share->last; ++number) {
        const unit_t unit = unit_of(call, number);
        const int is_direct = call->y.step_c == 1 && unit.channels == LANES;
        const phase_t *d = call->d.phase + unit.d % call->d.period;
        const lanes *u = (const lanes *)share->u + unit.block * taps;
        lanes shift = {0};
        for (int64_t i = 0; call->bias && i < unit.channels; ++i)
            shift[i] = value_of(call->bias[(unit.channel + i) * call->bias_step]);
        stage_in(call, &unit, share->x);
        for (int64_t row = unit.row; row < unit.end; ++row) {
            const phase_t *h = call->h.phase + row % call->h.period;
            const int64_t from = (row - unit.row) / call->h.period * call->h.step - call->h.first;
            const lanes *stage = vector_at(share->x, from * call->pitch - call->w.first);
            for (int64_t i = 0; i < least(call->w.period, unit.width); ++i) {
                const int64_t count = (unit.width - i + call->w.period - 1) / call->w.period;
                lanes *to_stage = vector_at(share->y, (row - unit.row) * unit.width + i);
                element *to = pixel_of(&call->y, &unit, unit.d, row) + (unit.left + i) * call->y.step_w;
                total = row_of(
                    call, d, h, call->w.phase + i, stage, u, shift, count, to, call->y.step_w,
                    is_direct ? 0 : to_stage, total);
            }
        }
        if (!is_direct) rows_out(&call->y, &unit, (const lanes *)share->y);
    }
    return sum_of(total);
}

/* Read the filter: for each vector of channels its taps. */
void prepare(const call_t *call, const share_t *share)
{
    const int64_t taps = call->d.taps * call->h.taps * call->w.taps;
    for (int64_t block = 0; block < call->blocks; ++block) {
        const element *filter = call->filter + channel_of(call, block) * call->filter_c;
        lanes *u = (lanes *)share->u + block * taps;
        if (call->is_dense) {
            turn_in(filter, call->filter_c, least(call->channels, LANES), taps, u, taps, 0);
            continue;
        }
        for (int64_t a = 0; a < call->d.taps; ++a)
            for (int64_t b = 0; b < call->h.taps; ++b)
                for (int64_t c = 0; c < call->w.taps; ++c, ++u) {
                    const element *from =
                        filter + a * call->filter_d + b * call->filter_h + c * call->filter_w;
                    *u = (lanes){0};
                    for (int64_t i = 0; i < least(call->channels, LANES); ++i)
                        (*u)[i] = value_of(from[i * call->filter_c]);
                }
    }
}

/* Add to the sums of `rows` x `n` taps what the rows of dy of a unit, and of x, come to; rows and columns of taps are
 * `down` and `apart` vectors apart.
 */
INLINE void sums_at(
    const int rows, const int n, const call_t *call, const unit_t *unit, const lanes *x, const lanes *dy,
    const int64_t down, const int64_t apart, lanes *sums)
{
    const int64_t width = least(unit->width, CHAIN), height = CHAIN / width, end = unit->end - unit->row;
    for (int64_t top = 0; top < end; top += height)
        for (int64_t left = 0; left < unit->width; left += width) {
            const int64_t right = least(left + width, unit->width);
            lanes sum[16] = {{0}};
            for (int64_t h = top; h < least(top + height, end); ++h) {
                const lanes *from = x + h * call->h.step * call->pitch + left * call->w.step;
                const lanes *gradient = dy + h * unit->width;
                for (int64_t w = left; w < right; ++w, from += call->w.step) {
                    const lanes each = gradient[w];
                    UNROLL for (int r = 0; r < rows; ++r)
                        UNROLL for (int i = 0; i < n; ++i) sum[r * n + i] += each * from[r * down + i * apart];
                }
            }
            UNROLL for (int r = 0; r < rows; ++r)
                UNROLL for (int i = 0; i < n; ++i) sums[r * call->w.taps + i] += sum[r * n + i];
        }
}

#define SUMS_OF(rows, n, apart) \
    case n: \
        for (; b + rows <= call->h.taps; b += rows) \
            sums_at(rows, n, call, unit, x + b * down, dy, down, apart, sums + b * call->w.taps); \
        for (; b < call->h.taps; ++b) \
            sums_at(1, n, call, unit, x + b * down, dy, down, apart, sums + b * call->w.taps); \
        break;

/* The same for all rows of `n` taps: several at once where they are short, so that there are sums enough to keep a
 * processor busy, and no more than it has registers.
 */
static void near_sums(
    const int n, const call_t *call, const unit_t *unit, const lanes *x, const lanes *dy, const int64_t down,
    lanes *sums)
{
    int64_t b = 0;
    switch (n) {
        SUMS_OF(8, 1, 1) SUMS_OF(4, 2, 1) SUMS_OF(3, 3, 1) SUMS_OF(2, 4, 1)
        SUMS_OF(2, 5, 1) SUMS_OF(1, 6, 1) SUMS_OF(1, 7, 1) SUMS_OF(1, 8, 1)
    }
}

/* The same where taps are not neighbours; of four at most. */
static void far_sums(
    const int n, const call_t *call, const unit_t *unit, const lanes *x, const lanes *dy, const int64_t down,
    lanes *sums)
{
    const int64_t apart = call->dilation_w;
    int64_t b = 0;
    switch (n) { SUMS_OF(1, 1, apart) SUMS_OF(1, 2, apart) SUMS_OF(1, 3, apart) SUMS_OF(1, 4, apart) }
}

/* Add up the products of x and dy of a thread's units, by channels and taps. */
void add(const call_t *call, const share_t *share)
{
    const int64_t taps = call->d.taps * call->h.taps * call->w.taps;
    const int is_near = call->dilation_w == 1;
    const int64_t pieces = (call->w.taps + (is_near ? 7 : 3)) / (is_near ? 8 : 4);
    if (!call->adds) clear((lanes *)share->sums, call->blocks * taps);
    for (int64_t number = share->first; number < share->last; ++number) {
        const unit_t unit = unit_of(call, number);
        const int64_t height = unit.end - unit.row, down = call->dilation_h * call->pitch;
        const lanes *dy = (const lanes *)share->y;
        lanes *sums = (lanes *)share->sums + unit.block * taps;
        stage_in(call, &unit, share->x);
        rows_in(&call->y, &unit, unit.d, unit.row, height, unit.left, unit.width, (lanes *)share->y);
        for (int64_t a = 0; a < call->d.taps; ++a)
            for (int64_t i = 0; i < pieces; ++i) {
                const int64_t first = call->w.taps * i / pieces, n = call->w.taps * (i + 1) / pieces - first;
                const lanes *x = vector_at(share->x, a * call->rows * call->pitch + first * call->dilation_w);
                (is_near ? near_sums : far_sums)(
                    (int)n, call, &unit, x, dy, down, sums + a * call->h.taps * call->w.taps + first);
            }
    }
}

/* Write the sums of all threads to a gradient of reals or elements, or add them; return NaN if some is not finite. */
INLINE double sums_out(const call_t *call, const share_t *share, const int is_real)
{
    const int64_t taps = call->d.taps * call->h.taps * call->w.taps;
    lanes found = {0};
    for (int64_t block = 0; block < call->blocks; ++block) {
        const int64_t channel = channel_of(call, block);
        const lanes *sums = (const lanes *)share->sums + block * taps;
        for (int64_t a = 0; a < call->d.taps; ++a)
            for (int64_t b = 0; b < call->h.taps; ++b)
                for (int64_t c = 0; c < call->w.taps; ++c, ++sums) {
                    const int64_t tap = a * call->filter_d + b * call->filter_h + c * call->filter_w;
                    lanes total = {0};
                    for (int64_t i = 0; i < share->totals; ++i) total += sums[i * share->next_total];
                    found += total * 0;
                    for (int64_t i = block * LANES - channel; i < least(call->channels, LANES); ++i) {
                        const int64_t place = (channel + i) * call->filter_c + tap;
                        real *sum = (real *)call->filter + place;
                        element *each = call->filter + place;
                        if (is_real)
                            *sum = total[i] + (call->adds ? *sum : 0);
                        else
                            *each = element_of(total[i] + (call->adds ? value_of(*each) : 0));
                    }
                }
    }
    return sum_of(found);
}

double finish(const call_t *call, const share_t *share) { return sums_out(call, share, 0); }

double finish_reals(const call_t *call, const share_t *share) { return sums_out(call, share, 1); }
