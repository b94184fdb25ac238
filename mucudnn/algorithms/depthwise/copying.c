/* Rows of an image, copied to a stage and back: as vectors of channels, wherever these lie in the image. */

/* Load up to LANES elements that follow upon one another; the rest is zero. */
INLINE lanes load_some(const element *from, const int64_t count)
{
    lanes value = {0};
    if (count >= LANES) return load(from);
    for (int64_t i = 0; i < count; ++i) value[i] = value_of(from[i]);
    return value;
}

INLINE void put_some(element *to, const lanes value, const int64_t count)
{
    if (count >= LANES)
        put(to, value);
    else
        for (int64_t i = 0; i < count; ++i) to[i] = element_of(value[i]);
}

/* Copy a square of LANES channels and pixels to vectors of channels, of which `gap` are left out after `left` and then
 * after every `width`.
 */
INLINE void square_in(
    const element *from, const int64_t step_c, lanes *to, int64_t left, const int64_t width, const int64_t gap)
{
    lanes square[LANES];
    UNROLL for (int i = 0; i < LANES; ++i) square[i] = load(from + i * step_c);
    transpose(square);
    UNROLL for (int i = 0; i < LANES; ++i) {
        *to++ = square[i];
        if (--left == 0) to += gap, left = width;
    }
}

/* The same for all pixels, which follow upon one another in each channel; the last square may share some with the one
 * before.
 */
static void turn_in(
    const element *from, const int64_t step_c, const int64_t channels, const int64_t pixels, lanes *to,
    const int64_t width, const int64_t gap)
{
    if (channels == LANES && pixels >= LANES) {
        for (int64_t next = 0; next < pixels; next += LANES) {
            const int64_t p = least(next, pixels - LANES), row = p / width;
            square_in(from + p, step_c, to + p + row * gap, (row + 1) * width - p, width, gap);
        }
        return;
    }
    for (int64_t p = 0; p < pixels; ++p) {
        lanes *vector = to + p + p / width * gap;
        *vector = (lanes){0};
        for (int64_t i = 0; i < channels; ++i) (*vector)[i] = value_of(from[i * step_c + p]);
    }
}

/* Copy vectors of channels to pixels that follow upon one another in each channel. */
static void turn_out(
    const lanes *from, element *to, const int64_t step_c, const int64_t channels, const int64_t pixels)
{
    if (channels == LANES && pixels >= LANES) {
        for (int64_t next = 0; next < pixels; next += LANES) {
            const int64_t p = least(next, pixels - LANES);
            lanes square[LANES];
            UNROLL for (int i = 0; i < LANES; ++i) square[i] = from[p + i];
            transpose(square);
            UNROLL for (int i = 0; i < LANES; ++i) put(to + i * step_c + p, square[i]);
        }
        return;
    }
    for (int64_t p = 0; p < pixels; ++p)
        for (int64_t i = 0; i < channels; ++i) to[i * step_c + p] = element_of(from[p][i]);
}

/* Copy one row of pixels to vectors of channels. */
static void row_in(
    const image_t *image, const element *from, const int64_t channels, const int64_t pixels, lanes *to)
{
    if (image->step_w == 1 && image->step_c != 1)
        turn_in(from, image->step_c, channels, pixels, to, pixels, 0);
    else if (image->step_c == 1)
        for (int64_t p = 0; p < pixels; ++p) to[p] = load_some(from + p * image->step_w, channels);
    else
        for (int64_t p = 0; p < pixels; ++p) {
            to[p] = (lanes){0};
            for (int64_t i = 0; i < channels; ++i)
                to[p][i] = value_of(from[p * image->step_w + i * image->step_c]);
        }
}

static void row_out(
    const image_t *image, const lanes *from, const int64_t channels, const int64_t pixels, element *to)
{
    if (image->step_w == 1 && image->step_c != 1)
        turn_out(from, to, image->step_c, channels, pixels);
    else if (image->step_c == 1)
        for (int64_t p = 0; p < pixels; ++p) put_some(to + p * image->step_w, from[p], channels);
    else
        for (int64_t p = 0; p < pixels; ++p)
            for (int64_t i = 0; i < channels; ++i)
                to[p * image->step_w + i * image->step_c] = element_of(from[p][i]);
}

INLINE int has_long_rows(const image_t *image)
{
    return image->step_w == 1 && image->step_c != 1 && image->step_h == image->width;
}

/* Copy `rows` rows from `row` on, of `pitch` columns from `column` on, to a stage: zeros where the image is not. */
static void rows_in(
    const image_t *image, const unit_t *unit, const int64_t d, const int64_t row, const int64_t rows,
    const int64_t column, const int64_t pitch, lanes *to)
{
    const int is_inside = d >= 0 && d < image->depth;
    const int64_t top = is_inside ? least(most(row, 0), row + rows) : row + rows;
    const int64_t bottom = most(least(row + rows, image->height), top);
    const int64_t left = least(most(column, 0), column + pitch);
    const int64_t right = most(least(column + pitch, image->width), left);
    const int64_t pixels = right - left;
    clear(to, (top - row) * pitch);
    clear(to + (bottom - row) * pitch, (row + rows - bottom) * pitch);
    for (int64_t h = top; h < bottom; ++h) {
        clear(to + (h - row) * pitch, left - column);
        clear(to + (h - row) * pitch + right - column, column + pitch - right);
    }
    if (bottom == top || pixels == 0) return;
    const element *from = pixel_of(image, unit, d, top) + left * image->step_w;
    to += (top - row) * pitch + left - column;
    if (has_long_rows(image) && pixels == image->width) {
        turn_in(from, image->step_c, unit->channels, (bottom - top) * pixels, to, pixels, pitch - pixels);
        return;
    }
    for (int64_t h = top; h < bottom; ++h, from += image->step_h, to += pitch)
        row_in(image, from, unit->channels, pixels, to);
}

static void rows_out(const image_t *image, const unit_t *unit, const lanes *from)
{
    element *to = pixel_of(image, unit, unit->d, unit->row) + unit->left * image->step_w;
    const int64_t rows = unit->end - unit->row;
    if (has_long_rows(image) && unit->width == image->width) {
        turn_out(from, to, image->step_c, unit->channels, rows * image->width);
        return;
    }
    for (int64_t h = 0; h < rows; ++h, to += image->step_h, from += unit->width)
        row_out(image, from, unit->channels, unit->width, to);
}
