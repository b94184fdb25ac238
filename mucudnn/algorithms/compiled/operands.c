/* What the loops are told, and images whose channels do not lie next to each other. */

typedef void gemm_t(
    const char *, const char *, const int *, const int *, const int *, const real *, const real *, const int *,
    const real *, const int *, const real *, real *, const int *);

typedef struct { FIELDS_OF_IMAGE } image_t;
typedef struct { image_t x, y; FIELDS_OF_CALL } call_t;
typedef struct { FIELDS_OF_SHARE } share_t;

INLINE int64_t least(const int64_t a, const int64_t b) { return a < b ? a : b; }

INLINE int64_t most(const int64_t a, const int64_t b) { return a < b ? b : a; }

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
