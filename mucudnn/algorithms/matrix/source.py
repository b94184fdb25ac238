"""The C source of convolutions by a matrix unit: the files beside this one, what they are told, and tiles.

There is a library for each type of elements. Where there is no such unit the same source may be compiled with
its tiles imitated, for tests.
"""

from pathlib import Path

from mucudnn.algorithms.compiled.source import FIELDS as FIELDS_OF_TILES
from mucudnn.algorithms.compiled.source import transposition

FIELDS = {
    "image": FIELDS_OF_TILES["image"],
    "set": dict.fromkeys(
        (
            *(f"{name}_{axis}" for name in ("start", "step", "count") for axis in "dhw"),
            *("first_group", "groups", "taps", "u"),
        ),
        "number",
    ),
    "group": dict.fromkeys(("shift", "d", "h", "w"), "number"),
    "call": {
        "filter": "address",
        **dict.fromkeys(("filter_x", "filter_y", "filter_d", "filter_h", "filter_w"), "number"),
        "bias": "address",
        **dict.fromkeys(("bias_step", "adds", "addends", "step_d", "step_h", "step_w"), "number"),
        **dict.fromkeys(("phases_d", "phases_h", "first_d", "first_h", "first_w"), "number"),
        **dict.fromkeys(("rows_d", "rows_h", "pitch", "band_d", "band_h", "bands_d", "bands_h"), "number"),
        **dict.fromkeys(("at_once", "unit_length", "panel", "panel_length"), "number"),
        **dict.fromkeys(("turned", "next_tap", "sets"), "number"),
        "set": "sets",
        "group": "groups",
    },
    "share": {
        **dict.fromkeys(("first", "last", "channel", "last_channel"), "number"),
        **dict.fromkeys(("u", "x", "pairs", "turned"), "address"),
        "sums": "floats",
        **dict.fromkeys(("totals", "next_total"), "number"),
    },
}
"""What the loops are told, all of 64 bits, in order.

image: as in Winograd's convolution in C.

set: outputs along d, h and w: the first, from one to the next, how many; the first of its groups of taps, how
many, and the taps of each; elements of the packed filter before its own.

group: pixels from an output's own place in a unit to what it reads; its first tap.

call: of all threads. The filter or its gradient, with its steps from one channel of x, of y, from one tap to
the next; whether to add to what is there; how many bfloat16 make a number; steps of x from one output to the
next, its phases along d and h, and where those of a unit begin; rows of each phase in a unit, outputs of a
row with those between rows, outputs of a unit, units of an image, units at once, elements of one, channels
and elements of a panel, places of a row of dy, and taps from one to the next of a group.

share: of one thread. Units from `first` to `last`, channels of y from `channel` to `last_channel`; places for
the packed filter, for x, its pairs, dy and sums of a gradient; how many threads have sums, and how far apart.
"""

_IN_C = {
    "number": "int64_t",
    "address": "element *",
    "floats": "float *",
    "sets": "const set_t *",
    "groups": "const group_t *",
}

_NATIVE = r"""
#include <immintrin.h>

/* Stores of what tiles will load are not the compiler's to move behind this. */
#define STORED __asm__ volatile("" ::: "memory")
#define CLEAR_TILES _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3)
#define LOAD_TILE(tile, from, step) _tile_loadd(tile, from, step)
#define STORE_TILE(tile, to, step) _tile_stored(tile, to, step)
#define MULTIPLY_TILES(c, a, b) _tile_dpbf16ps(c, a, b)
#define HALVES_OF(value) ((halves)_mm512_cvtneps_pbh((__m512)(value)))

/* The places of a vector from `first` to `last`: of words, of halves, of twice as many halves. */
#define SOME(first, last) ((1ull << (last)) - (1ull << (first)))
#define LOAD_WORDS(from, count) ((lanes)_mm512_maskz_loadu_ps((__mmask16)SOME(0, count), from))
#define LOAD_HALVES(from, count) ((halves)_mm256_maskz_loadu_epi16((__mmask16)SOME(0, count), from))
#define STORE_WORDS(to, value, first, last) \
    _mm512_mask_storeu_ps(to, (__mmask16)SOME(first, last), (__m512)(value))
#define STORE_HALVES(to, value, first, last) \
    _mm256_mask_storeu_epi16(to, (__mmask16)SOME(first, last), (__m256i)(value))
#define STORE_PAIRS(to, value, first, last) \
    _mm512_mask_storeu_epi16(to, (__mmask32)SOME(first, last), (__m512i)(value))

/* Libraries keep in mind how they have set up the tiles: it is left as it was. */
#define WITH_TILES(...) \
    { \
        uint8_t before[64] __attribute__((aligned(64))) = {0}, own[64] __attribute__((aligned(64))) = {1}; \
        for (int i = 0; i < 8; ++i) own[16 + 2 * i] = 64, own[48 + i] = 16; \
        __asm__ volatile("" : : "r"(before), "r"(own) : "memory"); /* gcc 12 knows of 8 bytes alone */ \
        _tile_storeconfig(before); \
        _tile_loadconfig(own); \
        __VA_ARGS__; \
        __asm__ volatile("" : : "r"(before) : "memory"); \
        if (before[0]) _tile_loadconfig(before); else _tile_release(); \
    }
"""

_IMITATED = r"""
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
"""

_APART = "#define INLINE static inline\n"
"""Not written out wherever they are called, its functions are compiled in 1.4 s instead of 9.6 (float32)."""

_HERE = Path(__file__).parent


def source_of(is_native: bool, dtype: str) -> str:
    """Return the source of a library.

    Args:
        is_native: whether for a matrix unit, or with one imitated.
        dtype: of the elements, float32 or bfloat16.
    """
    text = _text("products")
    for name, fields in FIELDS.items():
        in_c = " ".join(f"{_IN_C[kind]} {field};" for field, kind in fields.items())
        text = text.replace(f"FIELDS_OF_{name.upper()}", in_c)
    text = text.replace("TRANSPOSITION", transposition(16))
    text = text.replace("TILES\n", _NATIVE if is_native else _IMITATED, 1)
    text = text.replace("ELEMENTS\n", _text(dtype), 1)
    return text if is_native else f"{_APART}{text}"


def _text(name: str) -> str:
    return (_HERE / f"{name}.c").read_text(encoding="utf-8")
