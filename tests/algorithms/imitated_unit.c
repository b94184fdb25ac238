/* The same as unit.c beside the source, on any processor: so that tests run everywhere. */
static __thread uint32_t tiles[8][16][16];

static void load_tile(const int tile, const void *from, const int64_t step)
{
    for (int i = 0; i < 16; ++i) memcpy(tiles[tile][i], (const char *)from + i * step, 64);
}

static void store_tile(const int tile, void *to, const int64_t step)
{
    for (int i = 0; i < 16; ++i) memcpy((char *)to + i * step, tiles[tile][i], 64);
}

static float part(const uint32_t word, const int is_high)
{
    const uint32_t bits = is_high ? word & 0xffff0000 : word << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void multiply_tiles(const int c, const int a, const int b)
{
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum;
            memcpy(&sum, &tiles[c][m][n], sizeof sum);
            for (int k = 0; k < 16; ++k)
                for (int high = 0; high < 2; ++high)
                    sum += part(tiles[a][m][k], high) * part(tiles[b][k][n], high);
            memcpy(&tiles[c][m][n], &sum, sizeof sum);
        }
}

/* Round to bfloat16, to the nearest, ties to even; what is no number stays so. */
INLINE halves halves_of(const lanes value)
{
    const words bits = (words)value, absent = (words)(value != value);
    const words near = (bits + 0x7fff + ((bits >> 16) & 1)) & ~absent;
    return __builtin_convertvector((near | (absent & 0x7fc00000)) >> 16, halves);
}

/* Load so many values of a vector; the rest is zero. */
#define LOAD_SOME(kind, from, count) \
    ({ kind some = {0}; for (int lane = 0; lane < (count); ++lane) some[lane] = (from)[lane]; some; })
#define STORE_SOME(to, value, first, last) \
    for (int lane = first; lane < (last); ++lane) (to)[lane] = (value)[lane]
#define LOAD_WORDS(from, count) LOAD_SOME(lanes, from, count)
#define LOAD_HALVES(from, count) LOAD_SOME(halves, from, count)
#define STORE_WORDS STORE_SOME
#define STORE_HALVES STORE_SOME
#define STORE_PAIRS(to, value, first, last) \
    for (int lane = first; lane < (last); ++lane) \
        (to)[lane] = (uint16_t)(((words)(value))[lane / 2] >> lane % 2 * 16)
#define HALVES_OF(value) halves_of(value)
#define STORED (void)0
#define CLEAR_TILES memset(tiles, 0, 4 * sizeof *tiles)
#define LOAD_TILE(tile, from, step) load_tile(tile, from, step)
#define STORE_TILE(tile, to, step) store_tile(tile, to, step)
#define MULTIPLY_TILES(c, a, b) multiply_tiles(c, a, b)
#define WITH_TILES(...) { __VA_ARGS__; }
