/* Products of matrices by panels: of a matrix some rows and WIDTH columns, packed, so that a first-level cache holds
 * them while many rows of the other matrix are multiplied by them, as products.c does it.
 *
 * Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34 (3), 2008.
 */

#define WIDTH (MOST_VECTORS * LANES)
#define ROWS_AT_ONCE 192  /* pixels whose channels a second-level cache holds */

typedef struct { FIELDS_OF_IMAGE } image_t;
typedef struct { image_t x, y; FIELDS_OF_CALL } call_t;
typedef struct { FIELDS_OF_SHARE } share_t;

/* A matrix of which `width` columns lie in an image, and others `next` elements farther each. */
typedef struct { real *start; int64_t row, column, width, next; } plane_t;

INLINE real *place(const plane_t *of, const int64_t column)
{
    return of->start + column / of->width * of->next + column % of->width * of->column;
}

/* So many columns from `column` on that lie in one image, of `count`. */
INLINE int64_t run_of(const plane_t *of, const int64_t column, const int64_t count)
{
    return least(count, of->width - column % of->width);
}

/* Rows whose elements lie next to each other, turned into columns, a square at a time. */
static void turn(real *panel, const real *from, const int64_t rows, const int64_t columns, const int64_t step)
{
    const int64_t squares = rows / LANES * LANES;
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t many = least(LANES, columns - c);
        const real *at = from + c * step;
        int64_t i = 0;
        for (; many == LANES && i < squares; i += LANES) {
            lanes square[LANES];
            UNROLL for (int each = 0; each < LANES; ++each) square[each] = load_lanes(at + each * step + i, 1);
            transpose(square);
            UNROLL for (int each = 0; each < LANES; ++each)
                store_lanes(panel + (i + each) * WIDTH + c, 1, square[each]);
        }
        for (; i < rows; ++i)
            for (int64_t each = 0; each < many; ++each) panel[i * WIDTH + c + each] = at[each * step + i];
    }
}

/* Pack some rows of a matrix, and columns from `column` on; zeros fill the last vector. */
static void pack(real *panel, const plane_t *from, const int64_t rows, const int64_t column, const int64_t count)
{
    for (int64_t c = 0; c < count;) {
        const int64_t run = run_of(from, column + c, count - c);
        const real *at = place(from, column + c);
        if (from->column == 1 && run == WIDTH)
            for (int64_t i = 0; i < rows; ++i)
                UNROLL for (int v = 0; v < MOST_VECTORS; ++v)
                    store_lanes(panel + i * WIDTH + v * LANES, 1, load_lanes(at + i * from->row + v * LANES, 1));
        else if (from->column == 1)
            for (int64_t i = 0; i < rows; ++i)
                memcpy(panel + i * WIDTH + c, at + i * from->row, (size_t)run * sizeof(real));
        else if (from->row == 1)
            turn(panel + c, at, rows, run, from->column);
        else
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t each = 0; each < run; ++each)
                    panel[i * WIDTH + c + each] = at[i * from->row + each * from->column];
        c += run;
    }
    for (int64_t c = count; c % LANES; ++c)
        for (int64_t i = 0; i < rows; ++i) panel[i * WIDTH + c] = 0;
}

/* All rows of some vectors of columns. */
APART void product_vectors(
    const product_t *of, const int64_t vectors, const real *a, const real *panel, real *to)
{
    if (vectors == 1) product_rows(of, 1, a, panel, to);
    if (vectors == 2) product_rows(of, 2, a, panel, to);
#if MOST_VECTORS > 2
    if (vectors == 3) product_rows(of, 3, a, panel, to);
    if (vectors == 4) product_rows(of, 4, a, panel, to);
#endif
}

/* Columns that fill no vectors, are of several images, or do not lie next to each other: by way of sums. */
APART void product_scattered(
    const product_t *of, const int64_t count, const real *a, const real *panel, const plane_t *to,
    const int64_t column)
{
    real sums[MOST_ROWS * WIDTH];
    product_t some = *of;
    some.to_row = WIDTH;
    some.adds = 0;
    for (int64_t i = 0; i < of->rows; i += MOST_ROWS) {
        some.rows = least(MOST_ROWS, of->rows - i);
        product_vectors(&some, (count + LANES - 1) / LANES, a + i * of->a_row, panel, sums);
        for (int64_t c = 0, run; c < count; c += run) {
            run = run_of(to, column + c, count - c);
            real *at = place(to, column + c) + i * to->row;
            for (int64_t row = 0; row < some.rows; ++row)
                for (int64_t each = 0; each < run; ++each) {
                    const real sum = sums[row * WIDTH + c + each];
                    real *one = at + row * to->row + each * to->column;
                    *one = of->adds ? *one + sum : sum;
                }
        }
    }
}

/* So many columns of a result, from `column` on, of a panel that has them. */
static void multiply(
    const product_t *of, const int64_t count, const real *a, const real *panel, const plane_t *to,
    const int64_t column)
{
    if (to->column == 1 && count % LANES == 0 && run_of(to, column, count) == count) {
        product_t direct = *of;
        direct.to_row = to->row;
        product_vectors(&direct, count / LANES, a, panel, place(to, column));
    } else {
        product_scattered(of, count, a, panel, to, column);
    }
}

/* Add the bias to some rows and columns; it has a number for each row, or for each column. */
static void add_bias(
    const call_t *call, const int of_rows, const int64_t rows, const int64_t count, const plane_t *to,
    const int64_t column)
{
    for (int64_t c = 0, run; c < count; c += run) {
        run = run_of(to, column + c, count - c);
        for (int64_t row = 0; row < rows; ++row) {
            real *at = place(to, column + c) + row * to->row;
            const real *bias = call->bias + (of_rows ? row : column + c) * call->bias_step;
            const int64_t step = of_rows ? 0 : call->bias_step;
            int64_t each = 0;
            for (; to->column == 1 && each + LANES <= run; each += LANES)
                store_lanes(at + each, 1, load_lanes(at + each, 1) + load_lanes(bias + each * step, step));
            for (; each < run; ++each) at[each * to->column] += bias[each * step];
        }
    }
}

/* Pack all of the filter, panels of channels of y from `channel` to `last_channel`; see `rows`. */
void prepare(const call_t *call, const share_t *share)
{
    const plane_t filter = {call->filter, call->filter_x, call->filter_y, call->y_channels, 0};
    for (int64_t j = share->channel; j < share->last_channel; ++j)
        pack(share->u + j * call->x_channels * WIDTH, &filter, call->x_channels, j * WIDTH,
             least(WIDTH, call->y_channels - j * WIDTH));
}

/* y' = x' W', where channels lie next to each other: pixels are rows, of all images, and the filter is packed. */
void rows(const call_t *call, const share_t *share)
{
    const image_t *x = &call->x, *y = &call->y;
    product_t of = {.a_row = x->step_p, .a_term = x->step_c, .b_row = WIDTH};
    for (int64_t p = share->first; p < share->last; p += of.rows) {
        const plane_t to = {y->start + p * y->step_p, y->step_p, y->step_c, call->y_channels, 0};
        of.rows = least(ROWS_AT_ONCE, share->last - p);
        for (int64_t t = 0; t < call->x_channels; t += MOST_TERMS) {
            of.terms = least(MOST_TERMS, call->x_channels - t);
            of.adds = t > 0;
            for (int64_t j = 0; j < call->y_channels; j += WIDTH)
                multiply(&of, least(WIDTH, call->y_channels - j), x->start + p * x->step_p + t * x->step_c,
                         share->u + j * call->x_channels + t * WIDTH, &to, j);
        }
        if (call->bias) add_bias(call, 0, of.rows, call->y_channels, &to, 0);
    }
}

/* y = W x, where pixels lie next to each other: they are columns, of all images, and x is packed. */
void columns(const call_t *call, const share_t *share)
{
    const image_t *x = &call->x, *y = &call->y;
    const plane_t to = {y->start, y->step_c, y->step_p, call->pixels, y->step_n};
    product_t of = {.rows = call->y_channels, .a_row = call->filter_y, .a_term = call->filter_x, .b_row = WIDTH};
    real panel[MOST_TERMS * WIDTH] __attribute__((aligned(64)));
    for (int64_t j = share->first * WIDTH; j < least(share->last * WIDTH, call->images * call->pixels); j += WIDTH) {
        const int64_t count = least(WIDTH, call->images * call->pixels - j);
        for (int64_t t = 0; t < call->x_channels; t += MOST_TERMS) {
            const plane_t from = {x->start + t * x->step_c, x->step_c, x->step_p, call->pixels, x->step_n};
            of.terms = least(MOST_TERMS, call->x_channels - t);
            of.adds = t > 0;
            pack(panel, &from, of.terms, j, count);
            multiply(&of, count, call->filter + t * call->filter_x, panel, &to, j);
        }
        if (call->bias) add_bias(call, 1, call->y_channels, count, &to, j);
    }
}

/* dW = y x', or that added to it, of some channels of y, and panels of those of x from `first` to `last`. */
void add(const call_t *call, const share_t *share)
{
    const image_t *x = &call->x, *y = &call->y;
    const plane_t to = {
        call->filter + share->channel * call->filter_y, call->filter_y, call->filter_x, call->x_channels, 0};
    product_t of = {
        .rows = share->last_channel - share->channel, .a_row = y->step_c, .a_term = y->step_p, .b_row = WIDTH,
        .adds = call->adds != 0};
    real panel[MOST_TERMS * WIDTH] __attribute__((aligned(64)));
    if (of.rows == 0) return;
    for (int64_t n = 0; n < call->images; ++n)
        for (int64_t p = 0; p < call->pixels; p += MOST_TERMS, of.adds = 1) {
            const plane_t from = {
                x->start + n * x->step_n + p * x->step_p, x->step_p, x->step_c, call->x_channels, 0};
            const real *a = y->start + n * y->step_n + p * y->step_p + share->channel * y->step_c;
            of.terms = least(MOST_TERMS, call->pixels - p);
            for (int64_t j = share->first * WIDTH; j < least(share->last * WIDTH, call->x_channels); j += WIDTH) {
                const int64_t count = least(WIDTH, call->x_channels - j);
                pack(panel, &from, of.terms, j, count);
                multiply(&of, count, a, panel, &to, j);
            }
        }
}
