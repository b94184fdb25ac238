/* Convolution by a processor's matrix unit, whose factors are bfloat16: every float32 is the sum of two or three
 * of them, its addends, and products whose share is below the last one's rounding are left out. What is bfloat16
 * itself is its only addend.
 *
 * A unit is some rows of an image, or some slices of a volume: its part of x is split and padded, rows apart by
 * the phase of the stride, in panels of 32 channels, or in one of all where they do not make 32s; a pixel's
 * channels of a panel are next to each other. Then every output m of the unit reads the same places from m pixels
 * on, for each group of taps, which are neighbours in a row. What lies between the rows is computed, too, and left
 * out.
 */

#include <stdint.h>
#include <string.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

/* Bytes of the packed filter that a second-level cache keeps while it is used for all of a unit. */
#define KEPT (640 * 1024)

enum { LANES = 16, TILE = LANES * 2 * LANES, SIDE = 2 * LANES };

typedef float lanes __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

TILES

ELEMENTS

typedef struct { FIELDS_OF_IMAGE } image_t;
typedef struct { FIELDS_OF_SET } set_t;
typedef struct { FIELDS_OF_GROUP } group_t;
typedef struct { image_t x, y; FIELDS_OF_CALL } call_t;
typedef struct { FIELDS_OF_SHARE } share_t;

/* Where a unit lies: its image, and its first slice and row among the outputs of a set. */
typedef struct { int64_t n, d, h; } unit_t;

INLINE int64_t least(const int64_t a, const int64_t b) { return a < b ? a : b; }

INLINE int64_t most(const int64_t a, const int64_t b) { return a < b ? b : a; }

TRANSPOSITION

static double sum_of(const lanes total)
{
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return sum;
}

INLINE lanes load_floats(const float *from) { return *(const loose *)from; }

/* Load up to LANES values, `step` apart; the rest is zero. */
INLINE lanes load_some(const element *from, const int64_t step, const int64_t count)
{
    lanes value = {0};
    if (step == 1) return count >= LANES ? load(from) : load_first(from, most(count, 0));
    for (int i = 0; i < LANES && i < count; ++i) value[i] = value_of(from[i * step]);
    return value;
}

/* Load up to LANES words: of two elements each, if these are halves, that are `next` apart, and of which there are
 * `count` first and `next_count` second ones.
 */
INLINE lanes load_words(
    const element *from, const int64_t next, const int64_t step, const int64_t count, const int64_t next_count)
{
    const lanes value = load_some(from, step, count);
    if (IN_WORD == 1) return value;
    return (lanes)((words)value >> 16 | (words)load_some(from + next, step, next_count));
}

/* Store the addends of `count` values next to each other, one plane behind the other. */
INLINE void store_split(lanes value, uint16_t *to, const int64_t plane, const int addends, const int64_t count)
{
    for (int i = 0; i < addends; ++i) {
        const halves part = HALVES_OF(value);
        if (count >= LANES)
            *(halves *)(to + i * plane) = part;
        else
            for (int j = 0; j < count; ++j) to[i * plane + j] = part[j];
        if (i + 1 < addends) value -= (lanes)(__builtin_convertvector(part, words) << 16);
    }
}

INLINE words larger(const words a, const words b)
{
    const words is_a = (words)(a > b);
    return (a & is_a) | (b & ~is_a);
}

/* The larger ones of magnitudes seen so far and those of some values: what is no number is the largest. */
INLINE words largest_of(const words seen, const lanes value) { return larger(seen, (words)value & 0x7fffffff); }

/* The same of values or of words of two. */
INLINE words largest_in(const words seen, const lanes value)
{
    const words found = largest_of(seen, value);
    return IN_WORD == 1 ? found : largest_of(found, (lanes)((words)value << 16));
}

/* Store the addends of words of elements; two in a word are their own. */
INLINE void store_words(const lanes value, uint16_t *to, const int64_t plane, const int addends)
{
    if (IN_WORD == 1)
        store_split(value, to, plane, addends, LANES);
    else
        memcpy(to, &value, sizeof value);
}

INLINE void split_run(
    const element *from, const int64_t count, uint16_t *to, const int64_t plane, const int addends, words *largest)
{
    words seen = *largest;
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) {
        const lanes value = *(const loose *)(from + i);
        seen = largest_in(seen, value);
        store_words(value, to + i, plane, addends);
    }
    for (; i < count; i += LANES) {
        const lanes value = load_some(from + i, 1, count - i);
        seen = largest_of(seen, value);
        store_split(value, to + i, plane, addends, least(LANES, count - i));
    }
    *largest = seen;
}

INLINE void fill_zero(uint16_t *to, const int64_t plane, const int addends, const int64_t count)
{
    for (int i = 0; i < addends && count > 0; ++i) memset(to + i * plane, 0, sizeof *to * count);
}

/* Split pixels of a row, whose channels lie apart, so that each has them next to each other. */
INLINE void split_apart(
    const image_t *x, const element *from, const int64_t channels, const int64_t pixels, uint16_t *to,
    const int64_t plane, const int addends, words *largest)
{
    for (int64_t p = 0; p < pixels; p += LANES) {
        const int64_t count = least(LANES, pixels - p);
        int64_t c = 0;
        for (; c + WIDE <= channels; c += WIDE) {
            lanes square[LANES];
            UNROLL for (int i = 0; i < LANES; ++i)
                square[i] = load_words(
                    from + (c + i * IN_WORD) * x->step_c + p * x->step_w, x->step_c, x->step_w, count, count);
            UNROLL for (int i = 0; i < LANES; ++i) *largest = largest_in(*largest, square[i]);
            transpose(square);
            for (int i = 0; i < count; ++i) store_words(square[i], to + (p + i) * channels + c, plane, addends);
        }
        for (; c < channels; ++c) {
            const lanes value = load_some(from + c * x->step_c + p * x->step_w, x->step_w, count);
            uint16_t column[ADDENDS_MOST * LANES];
            *largest = largest_of(*largest, value);
            store_split(value, column, LANES, addends, LANES);
            for (int a = 0; a < addends; ++a)
                for (int i = 0; i < count; ++i) to[a * plane + (p + i) * channels + c] = column[a * LANES + i];
        }
    }
}

/* Split pixels of a row, of all panels. */
INLINE void split_pixels(
    const call_t *call, const element *from, const int64_t pixels, uint16_t *to, const int64_t plane,
    const int addends, words *largest)
{
    const image_t *x = &call->x;
    const int64_t channels = call->panel;
    if (x->step_c == 1 && x->step_w == channels && x->channels == channels)
        split_run(from, pixels * channels, to, plane, addends, largest);
    else if (x->step_c == 1)
        for (int64_t p = 0; p < pixels; ++p, from += x->step_w, to += channels)
            for (int64_t c = 0, at = 0; c < x->channels; c += channels, at += call->panel_length)
                split_run(from + c, channels, to + at, plane, addends, largest);
    else
        for (int64_t c = 0; c < x->channels; c += channels, to += call->panel_length)
            split_apart(x, from + c * x->step_c, channels, pixels, to, plane, addends, largest);
}

/* Make pixels zero, of all panels. */
INLINE void clear_pixels(
    const call_t *call, const int64_t pixels, uint16_t *to, const int64_t plane, const int addends)
{
    for (int64_t c = 0; c < call->x.channels; c += call->panel, to += call->panel_length)
        fill_zero(to, plane, addends, pixels * call->panel);
}

/* Split rows of x that follow upon one another, with zeros around each. */
INLINE void split_rows(
    const call_t *call, const element *from, const int64_t rows, uint16_t *to, const int64_t plane,
    const int addends, words *largest)
{
    const image_t *x = &call->x;
    const int64_t channels = call->panel, columns = call->pitch * call->step_w;
    const int64_t left = least(most(-call->first_w, 0), columns), skipped = most(call->first_w, 0);
    const int64_t pixels = most(least(x->width - skipped, columns - left), 0);
    const int64_t next = call->step_h * x->step_h;
    from += skipped * x->step_w;
    if (pixels == columns && next == columns * x->step_w) {
        split_pixels(call, from, rows * pixels, to, plane, addends, largest);
        return;
    }
    for (int64_t h = 0; h < rows; ++h, from += next, to += columns * channels) {
        clear_pixels(call, left, to, plane, addends);
        split_pixels(call, from, pixels, to + left * channels, plane, addends, largest);
        clear_pixels(call, columns - left - pixels, to + (left + pixels) * channels, plane, addends);
    }
}

/* Split what a unit reads of x; return the largest magnitudes. */
INLINE words split_unit(
    const call_t *call, const unit_t unit, uint16_t *to, const int64_t plane, const int addends)
{
    const image_t *x = &call->x;
    const int64_t columns = call->pitch * call->step_w, row_length = columns * call->panel;
    words largest = {0};
    uint16_t *row = to;
    for (int64_t phase_d = 0; phase_d < call->phases_d; ++phase_d)
        for (int64_t slice = 0; slice < call->rows_d; ++slice) {
            const int64_t d = (unit.d + call->first_d + slice) * call->step_d + phase_d;
            const int is_inside = d >= 0 && d < x->depth;
            for (int64_t phase_h = 0; phase_h < call->phases_h; ++phase_h, row += call->rows_h * row_length) {
                const int64_t rows = (x->height - phase_h + call->step_h - 1) / call->step_h;
                const int64_t h = unit.h + call->first_h;
                const int64_t first = least(most(-h, 0), call->rows_h);
                const int64_t last = is_inside ? most(least(rows - h, call->rows_h), first) : first;
                const element *from = x->start + unit.n * x->step_n + d * x->step_d
                                      + ((h + first) * call->step_h + phase_h) * x->step_h;
                clear_pixels(call, first * columns, row, plane, addends);
                split_rows(call, from, last - first, row + first * row_length, plane, addends, &largest);
                clear_pixels(call, (call->rows_h - last) * columns, row + last * row_length, plane, addends);
            }
        }
    for (int64_t at = 0; at < call->unit_length; at += call->panel_length)
        fill_zero(row + at, plane, addends, to + call->panel_length - row);
    return largest;
}

INLINE unit_t unit_of(const call_t *call, const int64_t number)
{
    const int64_t slice = number / call->bands_h;
    return (unit_t){
        slice / call->bands_d, slice % call->bands_d * call->band_d, number % call->bands_h * call->band_h};
}

/* Pieces of 32 elements of a group: all channels of its taps. */
INLINE int64_t chunks_of(const call_t *call, const set_t *set)
{
    return (set->taps * call->x.channels + SIDE - 1) / SIDE;
}

/* Elements from one slice of a panel to the next. */
INLINE int64_t slice_length_of(const call_t *call)
{
    return call->phases_h * call->rows_h * call->pitch * call->step_w * call->panel;
}

/* Where pieces of a group follow upon one another in a unit: `inner` of them, `outer` times. */
typedef struct { int64_t outer, outer_step, inner, inner_step; } pieces_t;

INLINE pieces_t pieces_of(const call_t *call, const set_t *set)
{
    const int64_t panels = call->x.channels / call->panel;
    if (panels == 1) return (pieces_t){1, 0, chunks_of(call, set), SIDE};
    return (pieces_t){set->taps, SIDE, panels, call->panel_length};
}

/* Elements of the filter from its first one to the first channel of a tap of a group. */
INLINE int64_t place_of(const call_t *call, const group_t *group, const int64_t tap)
{
    return group->d * call->filter_d + group->h * call->filter_h
           + (group->w + tap * call->next_tap) * call->filter_w;
}

/* Pack a tile of the filter, (32 elements, 16 channels of y), in pairs of elements; add up its magnitudes. */
INLINE void pack_tile(
    const call_t *call, const int64_t *place, const int64_t elements, const int64_t channel, uint16_t *to,
    const int addends, const int is_run, lanes *sums)
{
    lanes part[ADDENDS_MOST][LANES];
    for (int64_t k = 0; k < LANES; ++k) {
        element values[SIDE] = {0};
        uint16_t split[ADDENDS_MOST * SIDE];
        words ignored = {0};
        if (channel + k < call->y.channels) {
            const element *from = call->filter + (channel + k) * call->filter_y;
            if (is_run)
                memcpy(values, from + place[0], sizeof values);
            else
                for (int i = 0; i < elements; ++i) values[i] = from[place[i]];
        }
        for (int half = 0; half < 2; ++half)
            sums[k] += (lanes)((words)load(values + half * LANES) & 0x7fffffff);
        split_run(values, SIDE, split, SIDE, addends, &ignored);
        for (int a = 0; a < addends; ++a) memcpy(&part[a][k], split + a * SIDE, sizeof(lanes));
    }
    for (int a = 0; a < addends; ++a) {
        transpose(part[a]);
        memcpy(to + a * 2 * TILE, part[a], sizeof part[a]);
    }
}

/* Pack the filter of some channels of y: for each set, 32 channels, group and 32 elements, the addends' tiles.
 * Return the largest sum of magnitudes of a channel; NaN if one is none.
 */
INLINE double pack(const call_t *call, const share_t *share, const int addends)
{
    double largest = 0;
    for (int64_t s = 0; s < call->sets; ++s) {
        const set_t *set = call->set + s;
        const int64_t length = set->taps * call->x.channels, chunks = chunks_of(call, set);
        uint16_t *to = (uint16_t *)share->u + set->u
                       + share->channel / SIDE * set->groups * chunks * addends * 2 * TILE;
        for (int64_t k = share->channel; k < share->last_channel; k += SIDE) {
            lanes sums[SIDE] = {{0}};
            for (int64_t g = 0; g < set->groups; ++g) {
                const group_t *group = call->group + set->first_group + g;
                int64_t tap = 0, channel = 0;
                for (int64_t chunk = 0; chunk < chunks; ++chunk, to += addends * 2 * TILE) {
                    int64_t place[SIDE] = {0};
                    const int64_t elements = least(SIDE, length - chunk * SIDE);
                    const int is_run = elements == SIDE && call->filter_x == 1 && channel + SIDE <= call->x.channels;
                    for (int64_t i = 0; i < elements; ++i) {
                        place[i] = place_of(call, group, tap) + channel * call->filter_x;
                        if (++channel == call->x.channels) channel = 0, ++tap;
                    }
                    pack_tile(call, place, elements, k, to, addends, is_run, sums);
                    pack_tile(call, place, elements, k + LANES, to + TILE, addends, is_run, sums + LANES);
                }
            }
            for (int i = 0; i < SIDE; ++i) {
                const double sum = sum_of(sums[i]);
                if (sum != sum) return sum;
                largest = sum > largest ? sum : largest;
            }
        }
    }
    return largest;
}

/* Multiply-adds of two by two tiles, A of 4 and 5, B of 6 and 7, for all pairs of addends that count. */
#define TAKE_A(i) LOAD_TILE(4, a + (i) * a_plane, a_step); LOAD_TILE(5, a + (i) * a_plane + a_next, a_step)
#define TAKE_B(i) LOAD_TILE(6, b + (i) * b_plane, b_step); LOAD_TILE(7, b + (i) * b_plane + b_next, b_step)
#define MULTIPLY MULTIPLY_TILES(0, 4, 6); MULTIPLY_TILES(1, 4, 7); MULTIPLY_TILES(2, 5, 6); MULTIPLY_TILES(3, 5, 7)

INLINE void multiply(
    const uint16_t *a, const int64_t a_plane, const int64_t a_next, const int64_t a_step, const uint16_t *b,
    const int64_t b_plane, const int64_t b_next, const int64_t b_step, const int addends)
{
    if (addends == 3) {
        TAKE_A(2); TAKE_B(0); MULTIPLY;
        TAKE_A(1); MULTIPLY;
        TAKE_B(1); MULTIPLY;
        TAKE_A(0); MULTIPLY;
        TAKE_B(2); MULTIPLY;
        TAKE_B(0); MULTIPLY;
    } else if (addends == 2) {
        TAKE_A(1); TAKE_B(0); MULTIPLY;
        TAKE_A(0); MULTIPLY;
        TAKE_B(1); MULTIPLY;
    } else {
        TAKE_A(0); TAKE_B(0); MULTIPLY;
    }
}

INLINE void store_tiles(float *square)
{
    STORE_TILE(0, square, SIDE * sizeof(float));
    STORE_TILE(1, square + LANES, SIDE * sizeof(float));
    STORE_TILE(2, square + LANES * SIDE, SIDE * sizeof(float));
    STORE_TILE(3, square + LANES * SIDE + LANES, SIDE * sizeof(float));
}

/* Where the outputs of a set lie that a slice of a unit computes. */
typedef struct { element *start; int64_t step_h, step_w, rows, columns; } outputs_t;

INLINE outputs_t outputs_of(const call_t *call, const set_t *set, const unit_t unit, const int64_t slice)
{
    const image_t *y = &call->y;
    const int64_t d = set->start_d + (unit.d + slice) * set->step_d, h = set->start_h + unit.h * set->step_h;
    return (outputs_t){
        y->start + unit.n * y->step_n + d * y->step_d + h * y->step_h + set->start_w * y->step_w,
        set->step_h * y->step_h, set->step_w * y->step_w, least(call->band_h, set->count_h - unit.h),
        set->count_w};
}

INLINE int64_t slices_of(const call_t *call, const set_t *set, const unit_t unit)
{
    return set->count_h > unit.h && set->count_w > 0 ? most(least(call->band_d, set->count_d - unit.d), 0) : 0;
}

/* Load 16 channels of an output, with their bias. */
INLINE lanes output_of(const float *square, const lanes *bias, const int output, const int64_t channel)
{
    return load_floats(square + output * SIDE + channel) + bias[channel / LANES];
}

/* Write outputs of 32 pixels and up to 32 channels, which follow upon one another in y. */
INLINE void write_rows(
    const call_t *call, const outputs_t out, const float *square, const lanes *bias, const int64_t m,
    const int64_t channel)
{
    const int64_t count = least(SIDE, call->y.channels - channel);
    int64_t row = m / call->pitch, column = m % call->pitch;
    for (int i = 0; i < SIDE && row < out.rows; ++i) {
        element *to = out.start + row * out.step_h + column * out.step_w + channel;
        if (column < out.columns && count == SIDE)
            UNROLL for (int64_t k = 0; k < SIDE; k += LANES) put(to + k, output_of(square, bias, i, k));
        else
            for (int64_t k = 0; column < out.columns && k < count; k += LANES)
                put_first(to + k, output_of(square, bias, i, k), least(LANES, count - k));
        if (++column == call->pitch) column = 0, ++row;
    }
}

/* The same of as many pixels as a vector holds, where channels lie apart: it holds those of one channel. Rows
 * that follow upon one another in y are written as one.
 */
INLINE void write_columns(
    const call_t *call, const outputs_t out, const float *square, const lanes *bias, const int64_t m,
    const int64_t channel)
{
    struct { element *to; int first, last; } run[WIDE];
    int runs = 0;
    int64_t row = m / call->pitch, column = m % call->pitch;
    for (int i = 0; i < WIDE && row < out.rows;) {
        const int length = (int)least(WIDE - i, call->pitch - column);
        const int inside = (int)least(length, out.columns - column);
        element *to = out.start + row * out.step_h + column * out.step_w;
        const int is_next = runs && run[runs - 1].last == i;
        if (inside > 0 && is_next && to == run[runs - 1].to + (i - run[runs - 1].first) * out.step_w)
            run[runs - 1].last = i + inside;
        else if (inside > 0)
            run[runs].to = to, run[runs].first = i, run[runs].last = i + inside, ++runs;
        i += length, column = 0, ++row;
    }
    for (int64_t k = 0; k < SIDE && channel + k < call->y.channels && runs; k += LANES) {
        lanes value[LANES];
        UNROLL for (int i = 0; i < LANES; ++i) {
            const int output = i * IN_WORD;
            value[i] = word_of(output_of(square, bias, output, k), output_of(square, bias, output + IN_WORD - 1, k));
        }
        transpose(value);
        const int64_t count = least(LANES, call->y.channels - channel - k);
        for (int64_t c = 0; c < count; ++c)
            for (int r = 0; r < runs; ++r) {
                element *to = run[r].to + (channel + k + c) * call->y.step_c;
                const int first = run[r].first, last = run[r].last;
                if (out.step_w == 1) {
                    put_run(to - first, value[c], first, last);
                } else {
                    element part[WIDE];
                    memcpy(part, &value[c], sizeof part);
                    for (int i = first; i < last; ++i) to[(i - first) * out.step_w] = part[i];
                }
            }
    }
}

/* Write outputs of 32 pixels and up to 32 channels. */
INLINE void write_square(
    const call_t *call, const outputs_t out, const float *square, const int64_t m, const int64_t channel)
{
    const int64_t count = call->y.channels - channel;
    lanes bias[2] = {{0}, {0}};
    for (int i = 0; call->bias && i < 2; ++i)
        bias[i] = load_some(
            call->bias + (channel + i * LANES) * call->bias_step, call->bias_step, count - i * LANES);
    if (call->y.step_c == 1)
        write_rows(call, out, square, bias, m, channel);
    else
        for (int i = 0; i < SIDE; i += WIDE)
            write_columns(call, out, square + i * SIDE, bias, m + i, channel);
}

/* Have the lines of planes that the next outputs are written to on their way while these are computed. Not those
 * of halves, which were written more slowly so.
 */
INLINE void expect_writes(const call_t *call, const outputs_t out, const int64_t m, const int64_t channel)
{
    const int64_t row = m / call->pitch, column = m % call->pitch;
    if (IN_WORD > 1 || call->y.step_c == 1 || row >= out.rows) return;
    const element *start = out.start + row * out.step_h + column * out.step_w + channel * call->y.step_c;
    for (int64_t i = 0; i < SIDE; ++i) {
        __builtin_prefetch(start + i * call->y.step_c, 1);
        __builtin_prefetch(start + i * call->y.step_c + WIDE, 1);
    }
}

/* Compute the outputs of a set in one slice of a unit, of channels from `channel` to `last`. */
INLINE void compute(
    const call_t *call, const set_t *set, const outputs_t out, const uint16_t *x, const int64_t plane,
    const uint16_t *u, const int64_t channel, const int64_t last, const int addends)
{
    const int64_t pixel = call->step_w * call->panel;
    const pieces_t pieces = pieces_of(call, set);
    const int64_t outputs = (out.rows - 1) * call->pitch + out.columns;
    float square[SIDE * SIDE] __attribute__((aligned(64)));
    STORED;
    for (int64_t m = 0; m < outputs; m += SIDE) {
        const uint16_t *b = u;
        for (int64_t k = channel; k < last; k += SIDE) {
            CLEAR_TILES;
            expect_writes(call, out, m + SIDE, k);
            for (int64_t g = 0; g < set->groups; ++g) {
                const uint16_t *first = x + m * pixel + call->group[set->first_group + g].shift * call->panel;
                for (int64_t outer = 0; outer < pieces.outer; ++outer, first += pieces.outer_step) {
                    const uint16_t *a = first;
                    for (int64_t i = 0; i < pieces.inner; ++i, a += pieces.inner_step, b += addends * 2 * TILE)
                        multiply(a, plane, LANES * pixel, pixel * sizeof *a, b, 2 * TILE, TILE, 64, addends);
                }
            }
            store_tiles(square);
            write_square(call, out, square, m, k);
        }
    }
}

/* Compute a block of units: those panels of the filter that a cache holds are used for all of it in turn.
 *
 * Pixels whose channels lie next to each other are written as far as possible at once, others plane by plane.
 */
INLINE void compute_block(
    const call_t *call, const share_t *share, const set_t *set, const int64_t first, const int64_t count,
    const int addends)
{
    const int64_t panel = set->groups * chunks_of(call, set) * addends * 2 * TILE;
    const int64_t kept = call->y.step_c == 1 ? KEPT / most(panel * (int64_t)sizeof(uint16_t), 1) : 1;
    const int64_t step = most(kept, 1) * SIDE;
    for (int64_t k = share->channel; k < share->last_channel; k += step)
        for (int64_t i = 0; i < count; ++i) {
            const unit_t unit = unit_of(call, first + i);
            const uint16_t *x = (const uint16_t *)share->x + i * call->unit_length;
            for (int64_t d = 0; d < slices_of(call, set, unit); ++d)
                compute(
                    call, set, outputs_of(call, set, unit, d), x + d * slice_length_of(call),
                    call->at_once * call->unit_length, (const uint16_t *)share->u + set->u + k / SIDE * panel, k,
                    least(k + step, share->last_channel), addends);
        }
}

/* Compute this thread's units; return the largest magnitude of x. */
INLINE double compute_units(const call_t *call, const share_t *share, const int addends)
{
    words largest = {0};
    for (int64_t first = share->first; first < share->last; first += call->at_once) {
        const int64_t count = least(call->at_once, share->last - first);
        for (int64_t i = 0; i < count; ++i) {
            const words seen = split_unit(
                call, unit_of(call, first + i), (uint16_t *)share->x + i * call->unit_length,
                call->at_once * call->unit_length, addends);
            largest = larger(largest, seen);
        }
        for (int64_t s = 0; s < call->sets; ++s) compute_block(call, share, call->set + s, first, count, addends);
    }
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits = largest[i] > bits ? largest[i] : bits;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}

/* Of a gradient of the filter: pairs of pixels of x that follow upon one another, for every element of a panel. */
INLINE void pair(
    const call_t *call, const uint16_t *x, const int64_t plane, uint32_t *to, const int64_t pairs_plane,
    const int addends)
{
    const int64_t pixel = call->step_w * call->panel, whole = most(call->panel_length - pixel, 0);
    for (int a = 0; a < addends; ++a) {
        const uint16_t *from = x + a * plane;
        uint32_t *into = to + a * pairs_plane;
        int64_t i = 0;
        for (; i + LANES <= whole; i += LANES) {
            const words low = __builtin_convertvector(*(const halves *)(from + i), words);
            const words high = __builtin_convertvector(*(const halves *)(from + i + pixel), words);
            const lanes both = (lanes)(low | (high << 16));
            memcpy(into + i, &both, sizeof both);
        }
        for (; i < call->panel_length; ++i) into[i] = from[i] | (i < whole ? (uint32_t)from[i + pixel] << 16 : 0);
    }
}

/* Split channels of a slice of y whose rows lie as they are wanted. */
INLINE void turn_rows(
    const call_t *call, const outputs_t out, const int64_t channel, const int64_t last, uint16_t *to,
    const int64_t plane, const int addends)
{
    const int is_whole = call->pitch == out.columns && out.step_h == out.columns;
    const int64_t pieces = is_whole ? 1 : out.rows, count = is_whole ? out.rows * out.columns : out.columns;
    for (int64_t k = channel; k < last; ++k)
        for (int64_t h = 0; h < pieces; ++h) {
            uint16_t *row = to + (k - channel) * call->turned + h * call->pitch;
            words ignored = {0};
            split_run(out.start + h * out.step_h + k * call->y.step_c, count, row, plane, addends, &ignored);
            fill_zero(row + count, plane, addends, call->pitch - out.columns);
        }
}

/* The same where they do not, 32 pixels at a time: a line of the cache. */
INLINE void turn_pixels(
    const call_t *call, const outputs_t out, const int64_t channel, const int64_t last, uint16_t *to,
    const int64_t plane, const int addends)
{
    for (int64_t h = 0; h < out.rows; ++h)
        for (int64_t first = 0; first < call->pitch; first += SIDE)
            for (int64_t k = channel; k < last; k += LANES)
                for (int64_t w = first; w < least(first + SIDE, call->pitch); w += WIDE) {
                    const int64_t channels = least(LANES, last - k), count = most(least(WIDE, out.columns - w), 0);
                    const element *from = out.start + h * out.step_h + w * out.step_w + k * call->y.step_c;
                    uint16_t *rows = to + (k - channel) * call->turned + h * call->pitch + w;
                    lanes square[LANES];
                    if (count == WIDE && channels == LANES)
                        UNROLL for (int i = 0; i < LANES; ++i)
                            square[i] = load_words(
                                from + i * IN_WORD * out.step_w, out.step_w, call->y.step_c, LANES, LANES);
                    else
                        for (int i = 0; i < LANES; ++i) {
                            const int64_t left = count - i * IN_WORD;
                            square[i] = load_words(
                                from + i * IN_WORD * out.step_w, out.step_w, call->y.step_c,
                                left > 0 ? channels : 0, left > 1 ? channels : 0);
                        }
                    transpose(square);
                    for (int i = 0; i < channels; ++i) store_words(square[i], rows + i * call->turned, plane, addends);
                }
}

/* Split some channels of a slice of y: a row for each, with its pixels at the places of x that they belong to. */
INLINE void turn(
    const call_t *call, const outputs_t out, const int64_t channel, const int64_t last, uint16_t *to,
    const int64_t plane, const int addends)
{
    const int64_t end = out.rows * call->pitch;
    if (out.step_w == 1)
        turn_rows(call, out, channel, last, to, plane, addends);
    else
        turn_pixels(call, out, channel, last, to, plane, addends);
    for (int64_t k = channel; k < last; ++k)
        fill_zero(to + (k - channel) * call->turned + end, plane, addends, call->turned - end);
}

/* Where the sums of 32 channels of y, from `channel` on, and of a piece of a group lie: a row for each channel. */
INLINE float *square_of(
    const call_t *call, const share_t *share, const int64_t channel, const int64_t group, const int64_t chunk)
{
    const int64_t squares = channel / SIDE * call->set->groups + group;
    return share->sums + (squares * chunks_of(call, call->set) + chunk) * SIDE * SIDE;
}

/* Add the products of a block of units to a square of sums, or start it with them. */
INLINE void sum_square(
    const call_t *call, const share_t *share, const int64_t first, const int64_t count, const int64_t channel,
    const int64_t place, float *sums, const int adds, const int addends)
{
    const set_t *set = call->set;
    const int64_t pixel = call->step_w * call->panel;
    const int64_t own = share->last_channel - share->channel, turned_slice = own * call->turned;
    const int64_t pairs_plane = call->at_once * call->unit_length;
    const int64_t turned_plane = call->at_once * call->band_d * turned_slice;
    const uint16_t *turned = (const uint16_t *)share->turned + (channel - share->channel) * call->turned;
    float square[SIDE * SIDE] __attribute__((aligned(64)));
    CLEAR_TILES;
    for (int64_t i = 0; i < count; ++i) {
        const unit_t unit = unit_of(call, first + i);
        const int64_t rows = least(call->band_h, set->count_h - unit.h);
        const int64_t outputs = (rows - 1) * call->pitch + set->count_w;
        for (int64_t d = 0; d < slices_of(call, set, unit); ++d) {
            const uint16_t *a = turned + (i * call->band_d + d) * turned_slice;
            const uint32_t *b =
                (const uint32_t *)share->pairs + i * call->unit_length + d * slice_length_of(call) + place;
            for (int64_t m = 0; m < outputs; m += SIDE)
                multiply(
                    a + m, turned_plane, LANES * call->turned, call->turned * sizeof *a,
                    (const uint16_t *)(b + m * pixel), 2 * pairs_plane, 2 * LANES, 2 * pixel * sizeof *b, addends);
        }
    }
    store_tiles(square);
    for (int64_t i = 0; i < SIDE * SIDE; i += LANES) {
        lanes value = load_floats(square + i);
        if (adds) value += load_floats(sums + i);
        *(loose *)(sums + i) = value;
    }
}

/* Add the products of a block of units to this thread's sums: a piece of x stays in the cache for all channels. */
INLINE void sum_block(
    const call_t *call, const share_t *share, const int64_t first, const int64_t count, const int adds,
    const int addends)
{
    const set_t *set = call->set;
    const pieces_t pieces = pieces_of(call, set);
    STORED;
    for (int64_t g = 0; g < set->groups; ++g)
        for (int64_t outer = 0; outer < pieces.outer; ++outer)
            for (int64_t inner = 0; inner < pieces.inner; ++inner) {
                const int64_t shift = call->group[set->first_group + g].shift * call->panel;
                const int64_t place = shift + outer * pieces.outer_step + inner * pieces.inner_step;
                for (int64_t k = share->channel; k < share->last_channel; k += SIDE)
                    sum_square(
                        call, share, first, count, k, place,
                        square_of(call, share, k, g, outer * pieces.inner + inner), adds, addends);
            }
}

INLINE void add_units(const call_t *call, const share_t *share, const int addends)
{
    const set_t *set = call->set;
    const int64_t own = share->last_channel - share->channel, turned_slice = own * call->turned;
    const int64_t last = least(share->last_channel, call->y.channels);
    int adds = call->adds != 0;
    for (int64_t first = share->first; first < share->last; first += call->at_once) {
        const int64_t count = least(call->at_once, share->last - first);
        for (int64_t i = 0; i < count; ++i) {
            const unit_t unit = unit_of(call, first + i);
            split_unit(call, unit, (uint16_t *)share->x, call->unit_length, addends);
            for (int64_t at = 0; at < call->unit_length; at += call->panel_length)
                pair(
                    call, (uint16_t *)share->x + at, call->unit_length,
                    (uint32_t *)share->pairs + i * call->unit_length + at, call->at_once * call->unit_length,
                    addends);
            for (int64_t d = 0; d < slices_of(call, set, unit); ++d)
                turn(
                    call, outputs_of(call, set, unit, d), share->channel, last,
                    (uint16_t *)share->turned + (i * call->band_d + d) * turned_slice,
                    call->at_once * call->band_d * turned_slice, addends);
        }
        sum_block(call, share, first, count, adds, addends);
        adds = 1;
    }
    if (!adds) {
        float *from = square_of(call, share, share->channel, 0, 0);
        memset(from, 0, sizeof *from * (square_of(call, share, share->last_channel, 0, 0) - from));
    }
}

/* What is done for each number of addends that there is of these elements. */
#define BY_ADDENDS(function, call, share) \
    (ADDENDS_MOST == 1          ? function(call, share, 1) \
     : (call)->addends == 2     ? function(call, share, 2) \
                                : function(call, share, ADDENDS_MOST))

/* Pack this thread's channels of the filter, for all threads; return the largest sum of a channel's magnitudes. */
double prepare(const call_t *call, const share_t *share) { return BY_ADDENDS(pack, call, share); }

/* Compute this thread's units of y; return the largest magnitude of x that it has seen. */
double slices(const call_t *call, const share_t *share)
{
    double found;
    WITH_TILES(found = BY_ADDENDS(compute_units, call, share));
    return found;
}

/* Add the products of this thread's units to its own sums, or start these with them. */
void add(const call_t *call, const share_t *share) { WITH_TILES(BY_ADDENDS(add_units, call, share)); }

/* Write up to 16 values of a gradient, or add them: of floats or of elements. */
INLINE void write_some(
    const call_t *call, const int64_t place, lanes value, const int64_t count, const int is_float)
{
    const int64_t step = call->filter_x;
    if (is_float) {
        float part[LANES], *to = (float *)call->filter + place;
        memcpy(part, &value, sizeof part);
        for (int i = 0; i < count; ++i) to[i * step] = call->adds ? to[i * step] + part[i] : part[i];
    } else {
        element part[LANES], *to = call->filter + place;
        if (call->adds) value += load_some(to, step, count);
        if (step == 1) {
            put_first(to, value, count);
        } else {
            put(part, value);
            for (int i = 0; i < count; ++i) to[i * step] = part[i];
        }
    }
}

/* Write the sums of all threads, of this thread's channels of y, to the filter's gradient, or add them; return
 * NaN if one was not finite. The gradient is of elements or, where parts are summed elsewhere, of floats.
 */
INLINE double finish_in(const call_t *call, const share_t *share, const int is_float)
{
    const set_t *set = call->set;
    const int64_t channels = call->x.channels;
    lanes found = {0};
    for (int64_t k = share->channel; k < least(share->last_channel, call->y.channels); ++k)
        for (int64_t g = 0; g < set->groups; ++g) {
            const float *sums = square_of(call, share, k, g, 0) + k % SIDE * SIDE;
            for (int64_t tap = 0; tap < set->taps; ++tap) {
                const int64_t place = k * call->filter_y + place_of(call, call->group + set->first_group + g, tap);
                for (int64_t c = 0, at = tap * channels; c < channels;) {
                    const int64_t count = least(least(LANES, SIDE - at % SIDE), channels - c);
                    const float *from = sums + at / SIDE * SIDE * SIDE + at % SIDE;
                    lanes sum = LOAD_WORDS(from, count);
                    for (int64_t i = 1; i < share->totals; ++i) sum += LOAD_WORDS(from + i * share->next_total, count);
                    found += sum * 0;
                    write_some(call, place + c * call->filter_x, sum, count, is_float);
                    c += count, at += count;
                }
            }
        }
    return sum_of(found);
}

double finish(const call_t *call, const share_t *share) { return finish_in(call, share, 0); }

double finish_floats(const call_t *call, const share_t *share) { return finish_in(call, share, 1); }
