/* What the loops are told, and images whose channels do not lie next to each other. */

typedef void gemm_t(
    const char *, const char *, const int *, const int *, const int *, const real *, const real *, const int *,
    const real *, const int *, const real *, real *, const int *);

typedef struct { FIELDS_OF_IMAGE } image_t;
typedef struct { image_t x, y; FIELDS_OF_CALL } call_t;
typedef struct { FIELDS_OF_SHARE } share_t;

/* Elements from one slice, row, column, channel to the next. */
typedef struct { int64_t d, h, w, c; } steps_t;

/* Slices, rows and columns of zeros before an image. */
typedef struct { int64_t d, h, w; } margin_t;

/* What of a window or tile lies in its image: slices [front, back), rows [top, bottom), columns [left, right). */
typedef struct { int front, back, top, bottom, left, right; } box_t;

/* What of one axis of a window lies in its image, and where in the image that starts. */
typedef struct { int64_t start; int first, last; } run_t;

/* The image of a line, and which slice and row of tiles it is there. */
typedef struct { int64_t n, d, h; } line_t;

INLINE int64_t most(const int64_t a, const int64_t b) { return a < b ? b : a; }

/* Where a vector of channels begins; the last one begins earlier if need be, so that some are taken twice. */
INLINE int64_t vector_at(const int64_t channel, const int64_t channels)
{
    return least(channel, channels - LANES);
}

INLINE int is_equal(const box_t a, const box_t b)
{
    return a.front == b.front && a.back == b.back && a.top == b.top && a.bottom == b.bottom && a.left == b.left
           && a.right == b.right;
}

INLINE run_t run_of(const int64_t begin, const int64_t length, const int64_t size)
{
    const int64_t start = least(most(begin, 0), size), end = most(least(begin + length, size), start);
    return (run_t){start, (int)(start - begin), (int)(end - begin)};
}

INLINE line_t line_of(const call_t *call, const int64_t line)
{
    const int64_t slice = line / call->tiles_h;
    return (line_t){slice / call->tiles_d, slice % call->tiles_d, line % call->tiles_h};
}

INLINE steps_t steps_of(const image_t *image)
{
    return (steps_t){image->step_d, image->step_h, image->step_w, image->step_c};
}

/* The same where LANES channels of so many rows of each slice lie in a stage. */
INLINE steps_t steps_of_stage(const image_t *image, const int64_t rows)
{
    return (steps_t){rows * image->width * LANES, image->width * LANES, LANES, 1};
}

INLINE real *pixel_of(const image_t *image, const int64_t n, const int64_t c, const int64_t d, const int64_t h)
{
    return image->start + n * image->step_n + c * image->step_c + d * image->step_d + h * image->step_h;
}

static double sum_of(const lanes total)
{
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return sum;
}

/* Copy pixels of LANES channels from an image, where they lie some steps apart, to a stage, or back. */
INLINE void turn_pixels(
    real *outside, const int64_t step_w, const int64_t step_c, real *stage, const int64_t pixels, const int is_way_in)
{
    int64_t p = 0;
    for (; step_w == 1 && p + LANES <= pixels; p += LANES) {
        lanes square[LANES];
        UNROLL for (int i = 0; i < LANES; ++i)
            square[i] = load_lanes(is_way_in ? outside + i * step_c + p : stage + (p + i) * LANES, 1);
        transpose(square);
        UNROLL for (int i = 0; i < LANES; ++i)
            store_lanes(is_way_in ? stage + (p + i) * LANES : outside + i * step_c + p, 1, square[i]);
    }
    for (; p < pixels; ++p)
        for (int i = 0; i < LANES; ++i)
            if (is_way_in)
                stage[p * LANES + i] = outside[i * step_c + p * step_w];
            else
                outside[i * step_c + p * step_w] = stage[p * LANES + i];
}

/* The same for rows, whose pixels follow upon one another in the stage, and mostly in the image. */
INLINE void turn_rows(
    const image_t *image, real *outside, real *stage, const int64_t rows, const int is_way_in)
{
    const int is_even = image->step_h == image->width * image->step_w;
    const int64_t pieces = is_even ? least(rows, 1) : rows, pixels = is_even ? rows * image->width : image->width;
    for (int64_t piece = 0; piece < pieces; ++piece)
        turn_pixels(
            outside + piece * image->step_h, image->step_w, image->step_c, stage + piece * pixels * LANES, pixels,
            is_way_in);
}

/* The same for rows of slices. */
INLINE void turn_box(
    const image_t *image, real *outside, real *stage, const int64_t slices, const int64_t rows, const int is_way_in)
{
    for (int64_t d = 0; d < slices; ++d)
        turn_rows(image, outside + d * image->step_d, stage + d * rows * image->width * LANES, rows, is_way_in);
}
